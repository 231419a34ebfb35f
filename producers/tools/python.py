"""Python in a sandbox: the tool `python`.

Settings in `[environment.tool_args.python]`: `sandbox` (bubblewrap, an address of a SandboxFusion server, or none where
that is spelled out), `timeout_s`, `memory_mb`. Guarantees: each call is a program of its own that sees nothing of another
(`producers.sandbox`); what it printed is the answer, with how it ended where that was not well; a sandbox that cannot be
used fails the sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import AsyncRLError
from producers.sandbox import SandboxLimits, open_sandbox
from producers.sandbox.base import MIB
from producers.tools.base import FunctionTool

SHOWN_LETTERS = 4000


class PythonTool:
    """Runs programs."""

    name = "python"

    def __init__(
        self, sandbox: str = "bubblewrap", timeout_s: float = 10.0, memory_mb: int = 512, workers: int = 4
    ) -> None:  # fmt: skip
        limits = SandboxLimits(timeout_s=float(timeout_s), memory_bytes=int(memory_mb) * MIB)
        self._sandbox = open_sandbox(sandbox, limits, workers=workers)
        self._inner = FunctionTool(self.python)
        self.schema: Mapping[str, Any] = self._inner.schema

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the program printed."""
        return await self._inner.call(arguments)

    async def python(self, code: str) -> str:
        """Run a Python program and give back what it prints.

        Args:
            code: the program; print what you want to see
        """
        try:
            result = await self._sandbox.arun(code)
        except AsyncRLError as error:
            raise EnvironmentFailure("raised", f"the sandbox: {error.message}") from None
        shown = result.stdout[:SHOWN_LETTERS]
        if result.ok:
            return shown
        how = f"exit code {result.exit_code}" if result.status == "finished" else result.status
        return f"{shown}{result.stderr[-SHOWN_LETTERS:]}\n[{how}]".strip()

    async def close(self) -> None:
        """End what was started for it."""
        self._sandbox.close()
