"""Pages of a folder in a browser: the tools `browser_open`, `browser_click`, `browser_type` and `browser_read`.

`[environment.tool_args.browser] pages = "FOLDER"`. Each sample has a Chromium of its own in the sandbox, without
network, from its first call to its end (`producers.sandbox.browser_runner`). Guarantees: an answer is the page as text
with numbered links; a call that the page does not allow is an error message for the policy; a browser that is lost, or
passes its time or memory, is closed, the answer says so, and the next call begins anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import AsyncRLError, ConfigError
from producers.sandbox import Sandbox, SandboxResult, SandboxSession
from producers.support.blocking_calls import run_blocking
from producers.tools.base import FunctionTool, Tool, ToolError
from producers.tools.python import SHOWN_LETTERS, Run, SessionTool


class BrowserTools:
    """Four tools over one browser. Raises `config.environment` or `sandbox.unavailable`."""

    def __init__(self, sandbox: Callable[[], Sandbox], *, pages: str, timeout_s: float = 0.0) -> None:
        folder = Path(pages).absolute()
        if not folder.is_dir():
            where = f"environment.tool_args.browser.pages: {pages}"
            raise ConfigError("config.environment", "there is no such folder", where=where)
        self._pages = str(folder)
        self._timeout_s = float(timeout_s) or None  # that of `[sandbox]`
        self._sandbox = sandbox()
        self._places = asyncio.Semaphore(Sandbox.at_once)
        self._sandbox.open_session(pages=self._pages).close()  # raises here if this kind, or this host, has none

    async def open(self) -> Sequence[Tool]:
        return [FunctionTool(make(_no_sample)) for make in FUNCTIONS]

    def begin(self) -> Sequence[Tool]:
        """The tools of one sample."""
        session: SandboxSession = self._sandbox.open_session(pages=self._pages)
        return [SessionTool(session, make, self._timeout_s, places=self._places) for make in FUNCTIONS]

    async def close(self) -> None:
        self._sandbox.close()


def make_open(run: Run) -> Callable[..., Any]:
    async def browser_open(page: str) -> str:
        """Open a page and give back its text, with numbered links and buttons and named fields.

        Args:
            page: its file, such as index.html
        """
        return await _answer(run, "open", page)

    return browser_open


def make_click(run: Run) -> Callable[..., Any]:
    async def browser_click(target: str) -> str:
        """Click a link or a button and give back the page as it is then.

        Args:
            target: its number or its text
        """
        return await _answer(run, "click", target)

    return browser_click


def make_type(run: Run) -> Callable[..., Any]:
    async def browser_type(field: str, text: str) -> str:
        """Fill in a field and give back the page as it is then.

        Args:
            field: its name
            text: the new content; a line break at its end sends the form
        """
        return await _answer(run, "type", field, text)

    return browser_type


def make_read(run: Run) -> Callable[..., Any]:
    async def browser_read() -> str:
        """Give back the page as it is now."""
        return await _answer(run, "read")

    return browser_read


FUNCTIONS = (make_open, make_click, make_type, make_read)


def _no_sample(_command: str) -> SandboxResult:
    raise AssertionError("a browser belongs to a sample: call `begin`")


async def _answer(run: Run, action: str, target: str = "", text: str = "") -> str:
    command = json.dumps({"do": action, "target": target, "text": text})
    try:
        result = await run_blocking(run, command)  # bounded: by its time limit
    except AsyncRLError as error:
        raise EnvironmentFailure("raised", f"the browser: {error.message}") from None
    if result.status != "finished":
        raise ToolError(f"{result.status}; the browser is closed: open a page again")
    if not result.ok:
        raise ToolError(result.stderr[:SHOWN_LETTERS])
    return result.stdout[:SHOWN_LETTERS]
