"""Programs of the policy in a sandbox: the tools `python` and `shell`.

`[sandbox]` has their limits; `[environment.tool_args.python] timeout_s` is only for this tool. Guarantees: the output
is the answer, with the status if the program failed; a sandbox that cannot be used fails the sample. Each call of
`python` is a separate program; with `keep_state = true` the calls of a sample share one interpreter, as in a notebook.
The calls of `shell` share their files and the folder. If such a process is lost, the answer says so, and the next call
begins anew. A call waits for a free place before its time begins, and never in the default pool of asyncio: weight
updates need its threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import AsyncRLError
from producers.sandbox import Sandbox, SandboxResult, SandboxSession
from producers.support.blocking_calls import run_blocking
from producers.tools.base import FunctionTool, Tool

SHOWN_LETTERS = 4000

Run = Callable[[str], SandboxResult]


class PythonTool(FunctionTool):
    def __init__(self, sandbox: Callable[[], Sandbox], *, timeout_s: float = 0.0, keep_state: bool = False) -> None:
        self._sandbox = sandbox()
        self._timeout_s = float(timeout_s) or None  # that of `[sandbox]`
        self._keep_state = keep_state
        self.places = asyncio.Semaphore(Sandbox.at_once if keep_state else self._sandbox.at_once)
        if keep_state:
            self._sandbox.open_session().close()  # raises here if this kind has none
        super().__init__(make_python(partial(self._sandbox.run, timeout_s=self._timeout_s)))

    def begin(self) -> Tool:
        """The tool of one sample."""
        if not self._keep_state:
            return self
        return SessionTool(self._sandbox.open_session(), make_python, self._timeout_s, places=self.places)

    async def close(self) -> None:
        self._sandbox.close()


class ShellTool(FunctionTool):
    """Commands of the host's `/bin` and `/usr/bin`."""

    def __init__(self, sandbox: Callable[[], Sandbox], *, timeout_s: float = 0.0) -> None:
        self._sandbox = sandbox()
        self._timeout_s = float(timeout_s) or None
        self.places = asyncio.Semaphore(Sandbox.at_once)
        self._sandbox.open_session(shell=True).close()  # raises here if this kind has none
        super().__init__(make_shell(_no_sample))

    def begin(self) -> Tool:
        """The tool of one sample."""
        return SessionTool(self._sandbox.open_session(shell=True), make_shell, self._timeout_s, places=self.places)

    async def close(self) -> None:
        self._sandbox.close()


class SessionTool(FunctionTool):
    """A tool whose calls share one process; `close` ends it."""

    def __init__(
        self,
        session: SandboxSession,
        make: Callable[[Run], Callable[..., Any]],
        timeout_s: float | None,
        *,
        places: asyncio.Semaphore,
    ) -> None:
        self._session = session
        self.places = places
        super().__init__(make(partial(session.run, timeout_s=timeout_s)))

    async def close(self) -> None:
        await run_blocking(self._session.close)  # bounded: it kills the process


def make_python(run: Run) -> Callable[..., Any]:
    async def python(code: str) -> str:
        """Run a Python program and give back what it prints.

        Args:
            code: the program; print what you want to see
        """
        return await _answer(run, code)

    return python


def make_shell(run: Run) -> Callable[..., Any]:
    async def shell(command: str) -> str:
        """Run commands of a Unix shell and give back what they print. Files and the folder stay for later calls.

        Args:
            command: one or several lines
        """
        return await _answer(run, command)

    return shell


def _no_sample(_command: str) -> SandboxResult:
    raise AssertionError("a shell belongs to a sample: call `begin`")


async def _answer(run: Run, text: str) -> str:
    try:
        result = await run_blocking(run, text)  # bounded: by its time limit
    except AsyncRLError as error:
        raise EnvironmentFailure("raised", f"the sandbox: {error.message}") from None
    shown = result.stdout[:SHOWN_LETTERS]
    if result.ok:
        return shown
    how = f"exit code {result.exit_code}" if result.status == "finished" else result.status
    how += "; variables and files are lost" * result.state_lost
    return f"{shown}{result.stderr[-SHOWN_LETTERS:]}\n[{how}]".strip()
