"""Sandboxes for programs that a model wrote: `open_sandbox("bubblewrap")` and `Sandbox.run`.

Guarantee: nothing runs without isolation unless the kind is `none`.
"""

from __future__ import annotations

from asyncrl.config.sections.sandbox import SandboxConfig
from asyncrl.errors import ConfigError
from producers.sandbox.base import Sandbox, SandboxJob, SandboxLimits, SandboxResult, SandboxSession

__all__ = [
    "Sandbox",
    "SandboxJob",
    "SandboxLimits",
    "SandboxResult",
    "SandboxSession",
    "configured_limits",
    "open_sandbox",
    "ready_sandbox",
]


def open_sandbox(kind: str = "bubblewrap", limits: SandboxLimits | None = None, *, workers: int = 1) -> Sandbox:
    """A sandbox by its name: bubblewrap, none, or the http(s) address of a SandboxFusion server.

    Its first program starts it. Raises `config.type` for another name.
    """
    if kind == "bubblewrap":
        from producers.sandbox.bubblewrap import Bubblewrap

        return Bubblewrap(limits, workers=workers)
    if kind == "none":
        from producers.sandbox.local import Unprotected

        return Unprotected(limits, workers=workers)
    if kind.startswith(("http://", "https://")):
        from producers.sandbox.remote import HTTPSandbox

        return HTTPSandbox(kind, limits)
    raise ConfigError("config.type", f"sandbox = {kind!r} is not bubblewrap, none or an http address")


def configured_limits(config: SandboxConfig) -> SandboxLimits:
    """The limits of `[sandbox]`."""
    return SandboxLimits(**{name: getattr(config, name) for name in SandboxLimits.__struct_fields__})


def ready_sandbox(kind: str = "bubblewrap", limits: SandboxLimits | None = None) -> Sandbox:
    """`open_sandbox` with a probe: raises `sandbox.unavailable` now, not at the first program."""
    sandbox = open_sandbox(kind, limits)
    sandbox.probe()
    return sandbox
