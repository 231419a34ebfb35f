"""The processes of an agent: one per session, or a few that play one session after the other.

A process gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL in its environment, ANTHROPIC_BASE_URL,
ANTHROPIC_API_KEY and ANTHROPIC_MODEL too, with the variables of every child (`asyncrl.runtime.child_environment`) and
those of `environment.env`. The row comes as JSON on its standard input, which is then closed; its last line of output
may be the reward: a number, or an object with `reward`. With `sessions` above 1 it gets a line
{"row", "base_url", "anthropic_base_url", "api_key", "model"} for every session and answers each with a line: a number,
such an object, or null. Guarantees:
1. a process that is no longer needed (time limit, lost lease, end of the producer) gets SIGTERM with its whole group,
   and SIGKILL after `grace_s`, with its descendants in other groups; it always dies with the producer (Linux);
2. an exit code other than 0 is `environment.crashed` with the last lines of its standard error;
3. only the end of its output is kept: an endless print costs no memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from asyncrl.config.sections.environment import AgentConfig
from asyncrl.environment import EnvironmentFailure, Row
from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.runtime.child_environment import child_environment
from asyncrl.runtime.host_facts import descendants

CHUNK = 1 << 16
KEPT = 4096  # characters of its output
LONGEST_LINE = 1 << 20
SHOWN_LINES = 5


class _Tail:
    """The end of a pipe's output."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept: deque[bytes] = deque()
        self._size = 0
        self.reading = asyncio.create_task(self._read_all(stream))

    async def _read_all(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(CHUNK):  # bounded: the process is ended, and its pipe with it
            self._kept.append(data)
            self._size += len(data)
            while self._size - len(self._kept[0]) > KEPT:
                self._size -= len(self._kept.popleft())

    def lines(self) -> list[str]:
        """Its last non-empty lines."""
        text = b"".join(self._kept)[-KEPT:].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]


class AgentProcess:
    """One running process."""

    def __init__(self, process: asyncio.subprocess.Process, *, grace_s: float) -> None:
        assert process.stderr is not None
        self.process = process
        self.played = 0
        self.errors = _Tail(process.stderr)
        self._grace_s = grace_s

    async def end(self) -> None:
        """End it and everything that it started."""
        below = self._open_descendants()  # they have other parents as soon as it has ended
        try:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), self._grace_s)
        finally:  # also if this is cancelled
            below += self._open_descendants()
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # itself, or its children
            for descriptor in below:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
            self.errors.reading.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), self._grace_s)
        # Its pipes stay open as long as any process has them, for example a child that lost its parent earlier.
        self.process._transport.close()  # type: ignore[attr-defined]

    def _open_descendants(self) -> list[int]:
        """Descriptors of what it has started and is alive: the number of a process may come again."""
        found: list[int] = []
        for pid in descendants(self.process.pid) if self.process.returncode is None else ():
            with suppress(ProcessLookupError):
                found.append(os.pidfd_open(pid))
        return found

    async def crash_failure(self) -> EnvironmentFailure:
        """The failure of a process that ended, or closed its output, too early."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), self._grace_s)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.errors.reading), 1.0)
        said = " | ".join(self.errors.lines()[-SHOWN_LINES:])
        return EnvironmentFailure("crashed", f"the agent ended with {self.process.returncode}: {said}"[:600])


class Agent:
    """Starts processes of a command and plays sessions with them. `env`: names of variables that they inherit."""

    def __init__(self, config: AgentConfig, *, env: Collection[str] = ()) -> None:
        self._config = config
        self._env = env
        self._idle: list[AgentProcess] = []
        self._living: set[AgentProcess] = set()

    async def play(self, row: Row, *, url: str, key: str) -> Any:
        """Play one session; its reward, None if the agent printed none."""
        if self._config.sessions > 1:
            return await self._line(row, url, key)
        process = await self._start(
            {
                "OPENAI_BASE_URL": url,
                "OPENAI_API_KEY": key,
                "ANTHROPIC_BASE_URL": anthropic_url(url),
                "ANTHROPIC_API_KEY": key,
            }
        )
        assert process.process.stdin is not None and process.process.stdout is not None
        printed = _Tail(process.process.stdout)
        try:
            with suppress(ConnectionError):  # an agent need not read the row
                process.process.stdin.write(json.dumps(dict(row)).encode() + b"\n")
                await process.process.stdin.drain()
                process.process.stdin.close()
            code = await process.process.wait()  # bounded: by the episode's time limit, which cancels this
            if code:
                raise await process.crash_failure()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(printed.reading), 1.0)
            return parse_reward(printed.lines()[-1:])
        finally:
            printed.reading.cancel()
            await self._end(process)

    async def _line(self, row: Row, url: str, key: str) -> Any:
        process = self._idle.pop() if self._idle else await self._start({})
        assert process.process.stdin is not None and process.process.stdout is not None
        asked = {
            "row": dict(row),
            "base_url": url,
            "anthropic_base_url": anthropic_url(url),
            "api_key": key,
            "model": self._config.model,
        }
        try:
            process.process.stdin.write(json.dumps(asked).encode() + b"\n")
            await process.process.stdin.drain()
            # bounded: by the episode's time limit, which cancels this
            line = await process.process.stdout.readline()
        except (ConnectionError, ValueError):  # the process is gone, or the line has no end
            line = b""
        except asyncio.CancelledError:
            await self._end(process)
            raise
        if not line.endswith(b"\n"):
            failure = await process.crash_failure()
            await self._end(process)
            raise failure
        process.played += 1
        if process.played < self._config.sessions:
            self._idle.append(process)
        else:
            await self._end(process)
        return parse_reward([line.decode(errors="replace").strip()], strict=True)

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(self._end(process) for process in list(self._living)))  # bounded: each by its grace

    async def _start(self, more: Mapping[str, str]) -> AgentProcess:
        model = self._config.model
        tied = [
            sys.executable,
            "-m",
            "asyncrl.launcher.parent_guard",
            "--parent",
            str(os.getpid()),
            "--",
            *self._config.command,
        ]
        try:
            made = await asyncio.create_subprocess_exec(
                *tied,
                env=child_environment(self._env, more={"OPENAI_MODEL": model, "ANTHROPIC_MODEL": model, **more}),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=LONGEST_LINE,
            )
        except OSError as error:
            raise ConfigError(
                "config.environment", f"the agent cannot be started: {error}", where="environment.agent.command"
            ) from None
        process = AgentProcess(made, grace_s=self._config.grace_s)
        self._living.add(process)
        return process

    async def _end(self, process: AgentProcess) -> None:
        self._living.discard(process)
        await process.end()


def anthropic_url(url: str) -> str:
    """The base URL for Anthropic's clients: they add /v1 themselves."""
    return url.removesuffix("/v1")


def parse_reward(lines: list[str], *, strict: bool = False) -> Any:
    """The reward in a line: a number, an object with `reward` or `score`, or None. Other lines have none; with `strict`
    they are a failure.

    >>> parse_reward(["0.5"]), parse_reward(['{"reward": 1, "steps": 2}']), parse_reward(["done"])
    (0.5, {'reward': 1, 'steps': 2}, None)
    """
    if not lines:
        return None
    try:
        found = msgspec.json.decode(lines[0])
    except UNREADABLE:
        found = lines[0]
    if found is None or (isinstance(found, int | float) and not isinstance(found, bool)):
        return found
    if isinstance(found, dict) and ("reward" in found or "score" in found):
        return found
    if strict:
        raise EnvironmentFailure(
            "result", f"a line that is neither a number, an object with reward nor null: {lines[0][:80]!r}"
        )
    return None
