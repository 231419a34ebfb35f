"""The outermost loop of every role process: arguments, signals, exit codes.

Guarantees:
1. SIGTERM or SIGINT asks for a graceful stop. SIGTERM may come several times, where a service manager or a preemption
   signals every process and the launcher asks too; SIGINT after the first signal ends the process at once (code 130);
2. the process ends with its parent (Linux), so a killed launcher leaves no orphan;
3. SIGUSR1 prints the stacks of all threads to the log;
4. an `AsyncRLError` ends the process with its text and exit code, without a traceback; anything else is a bug: exit 70;
5. files that it writes are readable by their owner alone.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from asyncrl.config import Config, load
from asyncrl.errors import EXIT_INTERNAL, AsyncRLError, ConfigError
from asyncrl.net.descriptors import raise_descriptor_limit
from asyncrl.net.keys import Keys, Role, read_keys
from asyncrl.runtime.failpoints import arm
from asyncrl.runtime.run_dir import RunDir

PR_SET_PDEATHSIG = 1
_ASKED = re.compile(rb": ended after [\d.]+ s (SIG[A-Z]+)$", re.MULTILINE)  # the last line of `run`
MAY_RENAME = "ASYNCRL_MAY_RENAME"  # set by the launcher: a worker takes a suffix if its name is in use


class Stop:
    """Whether and why this process should end. Safe in signal handlers and between threads."""

    def __init__(self) -> None:
        self.reason = ""
        self._event = threading.Event()

    def set(self, reason: str) -> None:
        """Request the end; the first reason is kept."""
        self.reason = self.reason or reason
        self._event.set()

    def is_set(self) -> bool:
        """True once the end was asked for."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; True if the end was requested."""
        return self._event.wait(timeout_s)


class RoleArgs(argparse.Namespace):
    """Arguments of every role."""

    config: Path
    name: str
    connect: str  # buffer address; empty: from the configuration
    key: str
    takeover: bool
    standby: bool  # of a buffer
    judge: str  # judge of a reward worker; empty: the default one


def arguments(role: str, argv: Sequence[str] | None) -> RoleArgs:
    """The command line of a role process (the launcher builds it)."""
    parser = argparse.ArgumentParser(prog=role)
    parser.add_argument("--config", type=Path, required=True, help="resolved TOML")
    parser.add_argument("--name", default=role)
    parser.add_argument("--connect", default="", help="address of the buffer")
    parser.add_argument("--key", default="", help="key file")
    parser.add_argument("--takeover", action="store_true", help="fence a learner that is still registered")
    parser.add_argument("--standby", action="store_true", help="a buffer: wait until the serving one is gone")
    parser.add_argument("--judge", default="", help="of a reward worker: the judge that it scores for")
    return parser.parse_args(argv, namespace=RoleArgs())


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux only)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def install_signals(stop: Stop) -> None:
    """SIGTERM and SIGINT set `stop`; SIGINT after that ends the process. SIGUSR1 dumps stacks."""

    def handle(number: int, _frame: object) -> None:
        if not stop.reason:  # which is there before `set` takes its lock: a signal may interrupt the handler of another
            stop.set(signal.Signals(number).name)
        elif number == signal.SIGINT:
            os._exit(130)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def key_file(args: RoleArgs, config: Config) -> Path | None:
    """The key file of this process: `--key`, else the one of the configuration."""
    path = args.key or config.network.key_file
    return Path(path) if path else None


def run_key(args: RoleArgs, config: Config) -> Keys | None:
    """The run's keys of this process; None without a file."""
    path = key_file(args, config)
    return read_keys(path) if path else None


def worker_key(args: RoleArgs, config: Config, role: Role) -> Keys | None:
    """The key of a worker. Raises `config.network` for one of another role: code in a worker must not have more."""
    keys = run_key(args, config)
    if keys is not None and keys.role != role:
        what, remedy = f"a {role} was given the key of role {keys.role}", f"give it a key made for the role {role}"
        raise ConfigError("config.network", what, where=str(key_file(args, config)), remedy=remedy)
    return keys


def find_end_signal(log: bytes) -> str:
    """The signal that asked a role to end, by the end of its log; empty if it ended by itself."""
    found = _ASKED.findall(log)
    return found[-1].decode() if found else ""


def run(role: str, body: Callable[[RoleArgs, Config, Stop], None], argv: Sequence[str] | None = None) -> int:
    """Run a role to its end and return its exit code."""
    args = arguments(role, argv)
    os.umask(0o077)  # files of a role are private, even in a shared run folder
    die_with_parent()
    stop = Stop()
    install_signals(stop)
    started = time.monotonic()
    try:
        arm()
        raise_descriptor_limit()
        config = load(args.config)
        RunDir(config.run_dir).create().record_process(role, args.name)
        body(args, config, stop)
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        traceback.print_exc()
        print(f"error[internal] {role}: see the traceback above", file=sys.stderr, flush=True)
        return EXIT_INTERNAL
    print(f"{role} {args.name}: ended after {time.monotonic() - started:.1f} s {stop.reason}", flush=True)
    return 0
