"""Python in a sandbox: the tool `python`.

`[sandbox]` has its limits; `[environment.tool_args.python] timeout_s` is only for this tool. Guarantees: each call is a
separate program (`producers.sandbox`); its output is the answer, with the status if it failed; a sandbox that cannot be
used fails the sample.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import AsyncRLError
from producers.sandbox import Sandbox
from producers.tools.base import FunctionTool

SHOWN_LETTERS = 4000


class PythonTool(FunctionTool):
    def __init__(self, sandbox: Callable[[], Sandbox], *, timeout_s: float = 0.0) -> None:
        self._sandbox = sandbox()
        self._timeout_s = float(timeout_s) or None  # that of `[sandbox]`
        super().__init__(self.python)

    async def python(self, code: str) -> str:
        """Run a Python program and give back what it prints.

        Args:
            code: the program; print what you want to see
        """
        try:
            result = await self._sandbox.arun(code, timeout_s=self._timeout_s)  # bounded: by it
        except AsyncRLError as error:
            raise EnvironmentFailure("raised", f"the sandbox: {error.message}") from None
        shown = result.stdout[:SHOWN_LETTERS]
        if result.ok:
            return shown
        how = f"exit code {result.exit_code}" if result.status == "finished" else result.status
        return f"{shown}{result.stderr[-SHOWN_LETTERS:]}\n[{how}]".strip()

    async def close(self) -> None:
        self._sandbox.close()
