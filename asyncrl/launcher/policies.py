"""`asyncrl launch all` with `[policies]`: one launcher for each policy, as children of this process.

Guarantees:
1. nothing is started before the configurations of all policies have been checked, together with the addresses that they
   would share;
2. SIGINT, SIGTERM and SIGHUP (unless it is ignored) go to every launcher, and this process ends when all have ended,
   with the highest of their codes;
3. if a policy fails for good, the others are stopped: its weights would stay as they are;
4. the launchers die with this process, and their roles with them;
5. the output of the launchers is read to its end, though it can no longer be printed: none of them waits for a reader.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from asyncrl.config import Config
from asyncrl.config.policies import KEY
from asyncrl.errors import AsyncRLError, ConfigErrors
from asyncrl.launcher.launch import LaunchOptions, checked_files
from asyncrl.launcher.parent_guard import guard_command
from asyncrl.launcher.progress import print_line
from asyncrl.launcher.stop_signals import stop_signals
from asyncrl.preflight.policies import merge_errors
from asyncrl.process_plan.interpreters import python_path
from asyncrl.runtime.run_dir import RunDir, launcher_lock, run_keys

LOOK_S = 0.1


def launch_policies(paths: Sequence[Path], options: LaunchOptions, names: Sequence[str]) -> int:
    """Run all policies to their end; the exit code. Raises ConfigErrors before anything is started."""
    configs = check_policies(paths, options, names)
    for config in configs.values():
        run_keys(config, make=True)  # before several launchers would
    root = RunDir(next(iter(configs.values())).run_dir).root.parent
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with launcher_lock(RunDir(root), "all"):
        return Launchers([(name, command(paths, options, name)) for name in names]).run()


def check_policies(paths: Sequence[Path], options: LaunchOptions, names: Sequence[str]) -> dict[str, Config]:
    """The configuration of each policy. Raises ConfigErrors with every mistake, each once and with its policy."""
    configs: dict[str, Config] = {}
    found: dict[str, list[AsyncRLError]] = {}
    for name in names:
        try:
            configs[name], _ = checked_files(paths, choose(options, name), fetch=True)
        except ConfigErrors as error:
            found[name] = error.errors
    if errors := merge_errors(found, configs):
        raise ConfigErrors(errors)
    return configs


def choose(options: LaunchOptions, name: str) -> LaunchOptions:
    """The options of the launcher of one policy."""
    return replace(options, overrides=(*options.overrides, f"{KEY}={name}"))


def command(paths: Sequence[Path], options: LaunchOptions, name: str) -> list[str]:
    """The command line of the launcher of one policy."""
    words = [sys.executable, "-m", "asyncrl", "launch", "all", *map(str, paths), "--policy", name, "--plain"]
    for override in options.overrides:
        words += ["--set", override]
    for flag in ("takeover", "verbose", "insecure_no_auth", "job"):
        if getattr(options, flag):
            words.append(f"--{flag.replace('_', '-')}")
    return [*words, "--key", options.key] if options.key else words


class Launchers:
    """The launchers: (name, command) of each."""

    def __init__(self, commands: Sequence[tuple[str, list[str]]], *, say: Callable[[str], None] = print_line) -> None:
        self._commands = commands
        self._say = say
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self._signals: list[int] = []  # that have come and were not forwarded

    def run(self) -> int:
        """Start all; return when all have ended."""
        before = {one: signal.signal(one, self._note) for one in stop_signals()}
        try:
            for name, words in self._commands:
                self._start(name, words)
            return self._await_all()
        finally:
            for process in self._running.values():
                process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        self._signals.append(number)

    def _start(self, name: str, words: list[str]) -> None:
        process = subprocess.Popen(
            guard_command(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(python_path())},
            start_new_session=True,
        )
        self._running[name] = process
        reader = threading.Thread(target=self._copy, args=(name, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _copy(self, name: str, process: subprocess.Popen[str]) -> None:
        """Print the lines of a launcher behind the name of its policy."""
        assert process.stdout is not None
        for line in process.stdout:
            self._say(f"{name} | {line.rstrip()}")

    def _await_all(self) -> int:
        worst = 0
        while self._running:  # bounded: the life of the run; each launcher has its own limits
            while self._signals:
                self._send(self._signals.pop(0))
            for name, process in list(self._running.items()):
                if (code := process.poll()) is None:
                    continue
                del self._running[name]
                code = 128 - code if code < 0 else code
                if code and not worst and self._running:
                    others = ", ".join(self._running)
                    self._say(f"policy {name} ended with exit code {code}; asked the launchers of {others} to stop")
                    self._send(signal.SIGTERM)
                worst = max(worst, code)
            time.sleep(LOOK_S)
        for reader in self._readers:
            reader.join(timeout=1.0)
        return worst

    def _send(self, number: int) -> None:
        for process in self._running.values():
            process.send_signal(number)
