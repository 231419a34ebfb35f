"""Every error that a user can meet: one hierarchy, with a stable code and a remedy for each.

Guarantees:
1. each `AsyncRLError` has a code of `CATALOGUE`, a message, a place and a remedy;
2. `exit_code` decides what a supervisor does: 2, 65, 75 and 78 are final, others are restarted within a budget;
3. `render()` is the text for the terminal; a user error never shows a traceback. This module does not log and does not
   exit: the outermost loop of a role does.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import NamedTuple

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_DATA = 65
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_FENCED = 75
EXIT_HANDSHAKE = 78
EXIT_STOPPED = 143  # a job that SIGTERM stopped before its end
#: Exit codes after which a restart of the same process cannot help.
FINAL_EXIT_CODES = frozenset({EXIT_OK, EXIT_CONFIG, EXIT_DATA, EXIT_FENCED, EXIT_HANDSHAKE})


class ErrorInfo(NamedTuple):
    """Meaning of a code: a title, a remedy, and the exit code of a role that ends with it."""

    title: str
    remedy: str
    exit_code: int


#: Code -> title, remedy, exit code.
_CATALOGUE = {
    # configuration
    "config.file": ("configuration file cannot be read", "check the path and the TOML syntax", EXIT_CONFIG),
    "config.unknown_key": ("unknown configuration key", "remove the key or correct its name", EXIT_CONFIG),
    "config.type": ("wrong type or value", "give a value of the type that the message names", EXIT_CONFIG),
    "config.conflict": ("settings contradict each other", "change one of the named settings", EXIT_CONFIG),
    "tune.refused": ("a setting cannot be changed to this value", "give another value", EXIT_CONFIG),
    "config.missing": ("a required setting is missing", "add the named key", EXIT_CONFIG),
    "config.model": ("model not found", "set model.path to a folder in Hugging Face format", EXIT_CONFIG),
    "config.trust": (
        "the code of a model folder may not run",
        "read the folder's .py files; if you trust them, set trust_remote_code = true in [model], or in the [[judge]] "
        "that names the folder",
        EXIT_CONFIG,
    ),
    "config.data": ("prompts cannot be read", "check data.path, data.source and data.prompt_key", EXIT_CONFIG),
    "config.reward": ("reward function cannot be used", "see docs/rewards.md for names and signatures", EXIT_CONFIG),
    "config.environment": (
        "environment or tool cannot be used",
        "see docs/environments.md; asyncrl test-env runs it alone",
        EXIT_CONFIG,
    ),
    "config.template": (
        "chat template cannot append messages to an answer",
        'use another template, or set environment.template = "tail" if the message suggests it',
        EXIT_CONFIG,
    ),
    "config.filter": (
        "filter cannot be used",
        "write it as zero_variance or 'module:function' on the Python path",
        EXIT_CONFIG,
    ),
    "config.preset": ("preset cannot be used", "name a file of configs/presets, or give a .toml", EXIT_CONFIG),
    "config.network": (
        "unsafe or impossible address",
        "bind to loopback, or set network.key_file for CURVE keys",
        EXIT_CONFIG,
    ),
    "config.tokenizer": ("tokenizer cannot be used", "give model.path a tokenizer with an EOS", EXIT_CONFIG),
    "plan.numbers": (
        "the forecast lacks numbers",
        "give --from RUN of a run with more steps, or --assume KEY=VALUE",
        EXIT_CONFIG,
    ),
    "plan.stuck": ("the forecast run is stuck", "raise buffer.late_timeout_s, or correct the assumptions", EXIT_CONFIG),
    "config.extra": ("an optional package is missing", "install the named extra", EXIT_CONFIG),
    # things outside
    "net.port_in_use": ("address already in use", "stop the other process or choose another", EXIT_CONFIG),
    "net.unreachable": (
        "service does not answer",
        "check that it runs and that the address is right",
        EXIT_UNAVAILABLE,
    ),
    "config.forbidden": (
        "this key does not allow it",
        "use a key of the role that may do this: asyncrl keys DIR --list shows them; docs/security.md has the table",
        EXIT_CONFIG,
    ),
    "store.unreachable": ("store does not answer", "start Redis or correct buffer.redis_url", EXIT_UNAVAILABLE),
    "store.no_server": (
        "no Redis server found",
        'install redis-server or valkey-server, set buffer.redis_url, or use buffer.store = "sqlite"',
        EXIT_CONFIG,
    ),
    "store.refused": ("the store refused a write", "look at its memory and disk limits", EXIT_UNAVAILABLE),
    "store.corrupt": ("stored state is inconsistent", "restart from the last checkpoint", EXIT_INTERNAL),
    "file.refused": ("the system refuses a file", "check the path and its permissions", EXIT_CONFIG),
    "disk.full": ("no space left", "free space in the run folder", EXIT_UNAVAILABLE),
    # protocol
    "wire.prefix": ("not an asyncrl message", "check that the peer speaks this protocol", EXIT_FAILED),
    "wire.schema": ("another schema version", "install the same minor version on both ends", EXIT_HANDSHAKE),
    "wire.checksum": ("corrupt frame", "send it again; look at the network if it repeats", EXIT_FAILED),
    "wire.decode": ("message cannot be decoded", "check the sender's version", EXIT_FAILED),
    "wire.place": ("payload is not in the named file", "nothing: the payload is sent instead", EXIT_FAILED),
    "wire.size": ("message too large", "raise network.max_message_bytes on both ends", EXIT_FAILED),
    "wire.unexpected": ("message not expected here", "check the address of the service", EXIT_FAILED),
    "handshake.mismatch": ("peer runs another model or run", "start it with the same configuration", EXIT_HANDSHAKE),
    "handshake.name": (
        "the name is in use",
        "stop the other process, wait until it is silent for buffer.lease_timeout_s, or start with another name",
        EXIT_HANDSHAKE,
    ),
    "buffer.lost_state": ("the buffer lost its state", "nothing: the learner registers again", EXIT_UNAVAILABLE),
    "fenced": ("another process has taken over this role", "do not restart this one", EXIT_FENCED),
    "learner.duplicate": ("a learner is already registered", "stop it first, or start with --takeover", EXIT_FENCED),
    "service.duplicate": ("a service already owns this run", "stop it first", EXIT_FENCED),
    # work
    "sample.invalid": (
        "a sample fails validation",
        "look at the reason; the group goes to the dead letters",
        EXIT_FAILED,
    ),
    "image.invalid": ("an image is not accepted", "look at the reason; the prompt is set aside", EXIT_FAILED),
    "reward.failed": ("a reward function failed", "correct the function that the message names", EXIT_FAILED),
    "reward.budget": (
        "too many groups failed in their reward",
        "correct the reward function; asyncrl test-reward tries it alone",
        EXIT_DATA,
    ),
    "reward.judge": (
        "no such judge in this run",
        "name one of the run's judges: those of its [[judge]] tables",
        EXIT_CONFIG,
    ),
    "sandbox.unavailable": (
        "model-written code cannot be isolated on this host",
        "install bubblewrap 0.8 or later (apt-get install bubblewrap) and allow user namespaces, or give the address "
        "of a SandboxFusion server; 'none' runs it without protection",
        EXIT_CONFIG,
    ),
    "sandbox.failed": ("a sandbox failed, not the program in it", "see the message", EXIT_UNAVAILABLE),
    "rescore.file": ("a file of scores cannot be read", "write it with `asyncrl rescore`", EXIT_CONFIG),
    "filter.rate": (
        "nearly every group was filtered",
        "look at the data or the rewards, or change buffer.filters",
        EXIT_DATA,
    ),
    "filter.budget": ("too many groups failed in a filter", "correct the filter function", EXIT_DATA),
    "environment.budget": (
        "too many groups failed in their environment",
        "correct the environment; asyncrl test-env tries it",
        EXIT_DATA,
    ),
    "poison.budget": ("too many groups were poisoned", "look at the dead letters for the top reason", EXIT_DATA),
    "engine.broken": ("the engine failed", "it is restarted at the last committed version", EXIT_INTERNAL),
    "sync.failed": ("weights did not arrive", "see the weight-sync log for the member", EXIT_UNAVAILABLE),
    "sync.plan": ("the ends have different tensor layouts", "load the same model on both ends", EXIT_HANDSHAKE),
    "learner.packing": (
        "packed rows disagree with single rows",
        "set learner.packing = false for this model",
        EXIT_CONFIG,
    ),
    "learner.checkpoint": ("no usable checkpoint", "remove the damaged folder and start again", EXIT_FAILED),
    "learner.nonfinite": ("loss or gradient is not finite", "lower the learning rate or look at the data", EXIT_FAILED),
    "hang": ("no progress within the limit", "see the diagnosis for the role that the run waits for", EXIT_INTERNAL),
    "internal": ("a bug in asyncrl", "please report it with the log", EXIT_INTERNAL),
    "role.failed": ("a role ended with an error", "see its log", EXIT_FAILED),
    "run.missing": ("not a run folder", "give the folder that holds config.toml", EXIT_CONFIG),
    "replay.missing": (
        "the run cannot be replayed",
        "archive batches with log.archive, keep more by learner.checkpoint_keep",
        EXIT_CONFIG,
    ),
    "fork.step": ("no such checkpoint", "use a step that has a checkpoint", EXIT_CONFIG),
    "trace.unknown": ("unknown group or step", "asyncrl status RUN shows the number of issued prompts", EXIT_CONFIG),
    "usage": ("wrong command line", "see asyncrl --help", EXIT_CONFIG),
}
CATALOGUE = {code: ErrorInfo(*info) for code, info in _CATALOGUE.items()}


class AsyncRLError(Exception):
    """Base class of all errors. `code` must be in `CATALOGUE`."""

    def __init__(self, code: str, message: str, *, where: str = "", remedy: str = "", suggestion: str = "") -> None:
        info = CATALOGUE[code]
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.remedy = remedy or info.remedy
        self.suggestion = suggestion  # only the name or value that was probably meant
        self.exit_code = info.exit_code

    def render(self) -> str:
        """The text for the terminal: `error[code] where: message` and the remedy below it."""
        place = f" {self.where}:" if self.where else ""
        return f"error[{self.code}]{place} {self.message}\n  -> {self.remedy}"

    def __str__(self) -> str:
        return self.render()


class ConfigError(AsyncRLError):
    """The user must change the configuration."""


class Unavailable(AsyncRLError):
    """Another process or service does not answer in time."""


class WireError(AsyncRLError):
    """A frame that this process does not accept."""


class Fenced(AsyncRLError):
    """A newer process has taken over; this one must stop writing."""


class StateLost(AsyncRLError):
    """The buffer has lost state (its store was emptied or restored): the learner must register again."""


class HandshakeError(AsyncRLError):
    """The peer belongs to another model, run or schema."""


class WorkError(AsyncRLError):
    """A piece of work (sample, reward, step) failed."""


class ConfigErrors(ConfigError):
    """All mistakes of one configuration at once."""

    def __init__(self, errors: list[AsyncRLError]) -> None:
        super().__init__(errors[0].code, errors[0].message, where=errors[0].where, remedy=errors[0].remedy)
        self.errors = errors

    def render(self) -> str:
        return "\n".join(error.render() for error in self.errors)


_KINDS: dict[str, type[AsyncRLError]] = {
    "config": ConfigError,
    "usage": ConfigError,
    "run": ConfigError,
    "net": Unavailable,
    "store": Unavailable,
    "disk": Unavailable,
    "wire": WireError,
    "fenced": Fenced,
    "sandbox": Unavailable,
    "buffer": StateLost,
    "handshake": HandshakeError,
}


def near_miss(name: str, known: Iterable[str]) -> tuple[str, str]:
    """The known name that was probably meant, and the end of a message about it; both empty without one."""
    near = next(iter(difflib.get_close_matches(name, list(known), n=1)), "")
    return near, f"; did you mean {near!r}?" if near else ""


def error_for(code: str, message: str, *, where: str = "", remedy: str = "", suggestion: str = "") -> AsyncRLError:
    """The error of the right class for a code that arrived over the wire; unknown codes become `internal`."""
    if code not in CATALOGUE:
        return AsyncRLError("internal", f"{code}: {message}", where=where, remedy=remedy)
    kind = _KINDS.get(code.split(".", maxsplit=1)[0], WorkError)
    return kind(code, message, where=where, remedy=remedy, suggestion=suggestion)


# Errors of decoding bytes of another process or a damaged disk: `msgspec.DecodeError` alone is not enough,
# because invalid UTF-8 raises UnicodeDecodeError (both are ValueErrors) and deep nesting raises RecursionError.
UNREADABLE = (ValueError, RecursionError)


def file_error(error: OSError) -> AsyncRLError:
    """The error for a refusal of the operating system, with the file: `disk.full`, else `file.refused`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = ", ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return AsyncRLError("disk.full" if full else "file.refused", error.strerror or str(error), where=where)
