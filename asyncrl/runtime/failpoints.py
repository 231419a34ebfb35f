"""Named places where a test can make a process fail: `failpoint("learner.after_step")`.

Without the environment variable a call is one dictionary lookup.

    ASYNCRL_FAILPOINT=name:action:count[,name:action:count...]
    ASYNCRL_FAILPOINT_ONCE=folder       each entry fires once in all processes together: a file there records it

`action` is kill (SIGKILL), stop (SIGSTOP), exit (exit code 1 at once), raise (`internal`), enospc (the error of a full
disk), hang (native code that never returns and holds the interpreter: no other thread runs, and no signal handler), or
a number: seconds to sleep. `count` is the pass at which it fires (1 = the first).

Guarantees:
1. an unknown name, action or count ends the process at its start with `usage`: a fail-point that never fires proves
   nothing;
2. nothing here has an effect unless the variable is set.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.errors import AsyncRLError, ConfigError

#: Every place, and the state of the work there.
SITES: dict[str, str] = {
    "learner.at_register": "the checkpoint is loaded, the buffer knows nothing of this learner",
    "learner.after_register": "registered and reconciled, nothing published or claimed",
    "learner.after_claim": "the batch is recorded, nothing trained",
    "learner.at_turn": "the learner alone may use the device, its states are still in host memory",
    "learner.after_turn": "the states of all ranks are in host memory, engines may use the device",
    "learner.after_step": "the optimizer has updated the weights, nothing published",
    "learner.writing_rows": "a rank is about to copy its rows of a version into the slot, which is not offered",
    "learner.before_commit": "the weights are staged for the generators, the buffer has not heard of the version",
    "learner.after_commit": "the groups are TRAINED, their line of metrics is not written",
    "learner.checkpoint_begin": "its hidden folder is made, nothing is in it",
    "learner.checkpoint_shard": "this rank's tensors are written, not synced",
    "learner.checkpoint_state": "tensors of all ranks are synced, state.json is missing",
    "learner.checkpoint_manifest": "state.json is written, manifest.json is missing",
    "learner.checkpoint_rename": "all files are written, the folder is still hidden",
    "learner.checkpoint_renamed": "the folder has its name, older ones are not removed",
    "learner.before_checkpointed": "the checkpoint is durable, the buffer has not retired its groups",
    "learner.after_checkpointed": "the buffer has retired the groups of the checkpoint",
    "learner.at_export": "all steps are done and in a checkpoint, the weights are not exported",
    "learner.at_goodbye": "weights and result are written, the buffer has not heard of the end",
    "buffer.at_open": "the service has its epoch, no row is read",
    "buffer.after_open": "store, segments and history agree, no request is answered yet",
    "buffer.before_segments": "messages are decided on, none of their payloads is written",
    "buffer.after_segments": "payloads are written, the store knows nothing of them",
    "buffer.rotate": "a segment file is full, the next one is not made",
    "buffer.before_apply": "payloads of the drain are on disk, its rows are not in the store",
    "buffer.after_apply": "rows are in the store, their lines are not in the history and no request is answered",
    "buffer.before_answer": "the whole drain is written, no request is answered",
    "buffer.before_release": "answers are sent, the payloads that are free now still lie in their files",
    "buffer.at_reseed": "the store has lost its rows, nothing is written to it again",
    "buffer.after_reseed": "the store holds all rows again, the drain's lines are not in the history",
    "buffer.after_reconcile": "a learner is registered in memory alone",
    "buffer.at_close": "the service was asked to end, polls are not answered",
    "producer.after_lease": "groups are granted, nothing of them is begun",
    "producer.at_wake": "the engine may use the device, its weights are still in host memory",
    "producer.awake": "the engine is on the device, nothing is generated",
    "producer.at_sleep": "no request is left, the engine is still on the device",
    "producer.asleep": "the engine is off the device, the learner may use it",
    "producer.before_send": "samples are finished, not sent",
    "producer.after_place": "the payload lies in a file of this producer, the buffer has not heard of it",
    "producer.after_ack": "the buffer has samples of the group, the others are under way",
    "producer.before_piece": "tokens of samples under way are there, not sent",
    "producer.after_piece": "the buffer has tokens of samples that are under way",
    "producer.before_give_back": "generation is cancelled, the buffer has not heard of it",
    "reward.before_score": "samples are leased, no function was called",
    "reward.after_score": "rewards are there, not sent",
    "reward.after_ack": "the buffer has rewards of the batch, the others are under way",
    "weightsync.staged": "the learner has copied a version out, the service has not heard of it",
    "weightsync.at_publish": "the service knows the version, the learner has no answer",
    "weightsync.serve_blob": "a source of weights is about to answer for the first piece of a blob",
    "weightsync.send_blob": "the publisher is about to broadcast a blob",
    "weightsync.send_tensor": "the publisher is about to broadcast a bucket from its device",
    "weightsync.write_blob": "the publisher is about to write a bucket or a hop to the disk, in a hidden folder",
    "weightsync.before_rename": "all files of a version are written, its folder is still hidden",
    "weightsync.after_bucket": "a generator has taken a bucket, the version is not whole",
    "weightsync.after_direct_bucket": "an engine has taken a bucket of a direct transfer",
    "weightsync.before_commit": "a generator holds a complete version next to the current one",
    "weightsync.after_commit": "a generator has swapped, the service has not heard of it",
}

ACTIONS = ("kill", "stop", "exit", "raise", "enospc", "hang")
HANG_S = 600  # the test has failed anyway


class Armed(msgspec.Struct):
    """One entry of the variable, and how often its place was passed."""

    name: str
    action: str
    count: int
    passed: int = 0


def parse(text: str) -> dict[str, list[Armed]]:
    """The entries by name. Raises `usage` for an invalid one.

    >>> SITES["x"] = "an example"; parse("x:kill:2,x:0.5:1")["x"][1].action
    '0.5'
    """
    armed: dict[str, list[Armed]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, rest = entry.partition(":")
        action, _, count = rest.partition(":")
        known = name in SITES and (action in ACTIONS or _seconds(action) is not None)
        if not known or not count.isdigit() or int(count) < 1:
            raise ConfigError(
                "usage", f"{entry!r} is not name:action:count of a known place", where="ASYNCRL_FAILPOINT"
            )
        armed.setdefault(name, []).append(Armed(name, action, int(count)))
    return armed


def _seconds(action: str) -> float | None:
    try:
        value = float(action)
    except ValueError:
        return None
    return value if 0 <= value <= 600 else None


class Failpoints:
    """The armed places of one process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.armed = parse(environment.get("ASYNCRL_FAILPOINT", ""))
        once = environment.get("ASYNCRL_FAILPOINT_ONCE", "")
        self._once = Path(once) if once else None

    def hit(self, name: str) -> None:
        """Pass the place `name`."""
        for entry in self.armed.get(name, ()):
            entry.passed += 1
            if entry.passed == entry.count and self._first(entry):
                _act(entry)

    def _first(self, entry: Armed) -> bool:
        if self._once is None:
            return True
        try:
            (self._once / f"{entry.name}.{entry.action}.{entry.count}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _act(entry: Armed) -> None:
    print(f"failpoint {entry.name}: {entry.action} at pass {entry.passed}", flush=True)
    if entry.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif entry.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif entry.action == "exit":
        os._exit(1)
    elif entry.action == "raise":
        raise AsyncRLError("internal", f"failpoint {entry.name}")
    elif entry.action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"failpoint {entry.name}")
    elif entry.action == "hang":
        hang(HANG_S)
    else:
        time.sleep(float(entry.action))


def hang(seconds: float) -> None:
    """Hold the interpreter: `PyDLL` calls C without releasing it. A signal ends one such call, not the hang."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ctypes.PyDLL(None).sleep(int(left) + 1)


_here: Failpoints | None = None


def failpoint(name: str) -> None:
    """Pass the place `name` of `SITES`."""
    if _here is not None:
        _here.hit(name)


def arm(environment: Mapping[str, str] | None = None) -> None:
    """Read the variable; `asyncrl.runtime.role.run` calls this once, at the start of a process."""
    global _here  # noqa: PLW0603 - one per process, set before anything runs
    points = Failpoints(os.environ if environment is None else environment)
    _here = points if points.armed else None
