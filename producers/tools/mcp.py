"""Tools of MCP servers, by the official client (`pip install asyncrl[mcp]`).

The tool `mcp:NAME`; `[environment.tool_args.mcp.NAME] command = "python"`, `args = ["server.py"]`, or `url` for a
server that runs already (streamable HTTP), with `token_env` for its bearer token. Guarantees:
1. one server process or connection for each producer, started before the first prompt and ended with the producer; its
   tools have their own names and schemas;
2. an error answer of the server goes to the policy; a server that is gone fails the sample, and the next call starts
   it, or connects, again;
3. the stderr of a server process goes to the producer's log.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import ConfigError
from asyncrl.runtime.child_environment import child_environment
from producers.tools.base import Tool, ToolError

CLOSE_S = 5.0


class MCPTools:
    """The tools of one server."""

    def __init__(
        self,
        name: str,
        *,
        command: str = "",
        url: str = "",
        token_env: str = "",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        tools: Sequence[str] = (),
        start_timeout_s: float = 60.0,
        inherits: Collection[str] = (),
    ) -> None:
        """`env`: variables of the server alone; `inherits`: names of those that it gets from this process
        (`environment.env`), in addition to those of every child; `token_env`: the variable of this process that holds
        the token for `url`. Raises `config.environment`.
        """
        if bool(command) == bool(url) or (token_env and not url):
            what = "set `command`, or `url` (and `token_env` only with it)"
            raise ConfigError("config.environment", what, where=f"environment.tool_args.mcp.{name}")
        self._name = name
        self._url, self._token_env = url, token_env
        self._server = {"command": command, "args": list(args), "cwd": cwd or None}
        self._env, self._inherits = dict(env or {}), inherits
        self._wanted = tuple(tools)  # only these; empty: all
        self._limit_s = start_timeout_s
        self._session: Any = None
        self._starting = asyncio.Lock()
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Sequence[Tool]:
        """Start the server and list its tools. Raises `config.environment` or `config.extra`."""
        found = await self._start()
        where = f"environment.tools: mcp:{self._name}"
        missing = sorted(set(self._wanted) - {tool.name for tool in found})
        if missing:
            known = ", ".join(tool.name for tool in found)
            raise ConfigError("config.environment", f"it has no tool {missing[0]!r}, but {known}", where=where)
        return [_MCPTool(self, tool) for tool in found if not self._wanted or tool.name in self._wanted]

    async def _start(self) -> list[Any]:
        """Start the server and return its tools."""
        await self.close()  # of an earlier server
        self._leave = asyncio.Event()
        found: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(found, self._leave))
        try:
            return await asyncio.wait_for(asyncio.shield(found), self._limit_s)
        except TimeoutError:
            await self.close()
            where = f"environment.tools: mcp:{self._name}"
            raise ConfigError("config.environment", f"it did not answer in {self._limit_s:g} s", where=where) from None

    async def close(self) -> None:
        self._leave.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_S)
            self._task.cancel()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of an answer."""
        session = await self._get_session()
        try:
            result = await session.call_tool(name, dict(arguments))
        except _client().MCPError as error:
            if error.code != _client().types.CONNECTION_CLOSED:  # the server's own answer, such as bad arguments
                raise ToolError(f"{name}: {error}") from None
            self._session = None if self._session is session else self._session
            raise EnvironmentFailure("raised", f"the MCP server {self._name!r} is gone: {error}") from None
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def _get_session(self) -> Any:
        """The session; restarts the server if it is gone."""
        async with self._starting:  # bounded: by `start_timeout_s`
            if self._session is None:
                print(f"warning: the MCP server {self._name!r} is gone: restarting it", flush=True)
                try:
                    await self._start()
                except ConfigError as error:
                    what = f"the MCP server {self._name!r} is gone and does not start: {error.message}"
                    raise EnvironmentFailure("raised", what) from None
            return self._session

    async def _live(self, found: asyncio.Future[list[Any]], leave: asyncio.Event) -> None:
        """The connection: one task from beginning to end, as the client requires."""
        mine: Any = None
        try:
            async with self._streams() as (reader, writer), _client().ClientSession(reader, writer) as session:
                await session.initialize()
                tools = list((await session.list_tools()).tools)
                self._session = mine = session
                if not found.done():
                    found.set_result(tools)
                await leave.wait()  # bounded: the life of the producer
        except Exception as error:  # any end of the connection; later calls report it
            if not found.done():
                what = f"{type(error).__name__}: {error}"
                where = f"environment.tools: mcp:{self._name}"
                found.set_exception(ConfigError("config.environment", what, where=where))
        finally:
            if self._session is mine:  # not yet that of the next server
                self._session = None

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """What the client reads from and writes to."""
        mcp = _client()
        if not self._url:
            server = mcp.StdioServerParameters(**self._server, env=child_environment(self._inherits, more=self._env))
            async with mcp.stdio_client(server, errlog=sys.stderr) as streams:
                yield streams
            return
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client  # type: ignore[attr-defined]

        token = os.environ.get(self._token_env, "") if self._token_env else ""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            create_mcp_http_client(headers) as client,
            streamable_http_client(self._url, http_client=client) as streams,
        ):
            yield streams


class _MCPTool:
    """One tool of a server."""

    def __init__(self, server: MCPTools, tool: Any) -> None:
        self.name: str = tool.name
        self._server = server
        about = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        self.schema: Mapping[str, Any] = {"type": "function", "function": about}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        return await self._server.call(self.name, arguments)


def _client() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError("config.extra", f"{error}: pip install 'asyncrl[mcp]'", where="environment.tools") from None
    return mcp
