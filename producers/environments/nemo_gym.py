"""Environments of NeMo-Gym, which are servers of resources: the environment `nemo_gym`.

`[environment] name = "nemo_gym"`, `args = {url = "http://127.0.0.1:8000"}`, and `[data] prompt_key =
"responses_create_params"` for the rows of NeMo-Gym, unmodified. The server has the packages; here its HTTP interface
is spoken (NeMo-Gym 0.4), as its agents `simple_agent` and `gymnasium_agent` do. Guarantees:
1. every sample has its own session of the server (a cookie); `seed_session` and `verify` get the whole row;
2. the policy sees the tools of the row. Their calls are requests to the server, one after the other; any other name is
   an error message, so no call reaches `verify`. If the server runs none of the row's tools, a call ends the sample;
3. an answer of a tool with status 4xx or 500 is an error message for the policy, as in NeMo-Gym;
4. the reward is that of `verify`, its other numbers are parts. A server with `reset` and `step` gives each turn its
   reward;
5. a server without an answer for `args.timeout_s`, an error of any other request, and a `verify` without a reward fail
   the sample (`environment.raised`, `environment.no_reward`).
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from asyncrl.config.sections.environment import REQUESTS
from asyncrl.environment import Chat, EnvironmentFailure, Message, Row, ToolCall, Turn
from asyncrl.errors import ConfigError
from producers.data.openai_items import answer_items
from producers.data.prompt_forms import is_request
from producers.environments.conversation import require_number
from producers.tools.base import ERROR, ToolError

URL = "environment.args"  # the table of the setting
SHOWN = 300  # characters of a server's error
NOT_RUN = {"content": f"{ERROR}it was not run"}
Object = dict[str, Any]


class NemoGym:
    """A resources server; every sample is a session of it."""

    def __init__(self, url: str, *, timeout_s: float = 60) -> None:
        try:
            import aiohttp
        except ImportError as error:
            message = f"{error}: pip install 'asyncrl[http]'"
            raise ConfigError("config.extra", message, where="environment.name") from None
        if not url.startswith(("http://", "https://")):
            raise ConfigError("config.environment", f"{url!r} is not a http:// or https:// address", where=URL)
        self._http, self._url, self._timeout_s = aiohttp, url.rstrip("/"), timeout_s
        self._paths: Sequence[str] = ()

    async def open(self) -> None:
        """Ask for the server's routes. Raises `config.environment`."""
        try:
            async with self._connect() as http, http.get(f"{self._url}/openapi.json") as answer:
                self._paths = list((await answer.json())["paths"])
        except (self._http.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
            what = f"no server of NeMo-Gym answers at {self._url}: {type(error).__name__}: {error}"
            raise ConfigError("config.environment", what, where=URL, remedy="start it before the run") from None
        if not {"/verify", "/step"} & {*self._paths}:
            what = f"{self._url} has neither /verify nor /step, but {', '.join(self._paths)}"
            raise ConfigError("config.environment", what, where=URL, remedy="name a resources server")

    async def __call__(self, chat: Chat, row: Row) -> Object | None:
        if not is_request(row.get(REQUESTS)):
            raise EnvironmentFailure("raised", f"the row has no request in column {REQUESTS!r}")
        async with self._connect() as http:
            session = _Session(http, self._url, self._timeout_s, self._http.ClientError)
            play = self._play_calls if "/verify" in self._paths else self._play_steps
            return await play(chat, row, session)

    def _connect(self) -> Any:
        """With cookies of its own, also from an address without a name."""
        limit = self._http.ClientTimeout(total=self._timeout_s)
        return self._http.ClientSession(cookie_jar=self._http.CookieJar(unsafe=True), timeout=limit)

    async def _play_calls(self, chat: Chat, row: Row, session: _Session) -> Object | None:
        tools = self._tools(row, session)
        runs_calls = bool(tools) or not row[REQUESTS].get("tools")
        await session.post("/seed_session", row)
        items: list[Object] = []
        last = turn = await chat.say()
        while not turn.over:
            items, last = items + turn_items(turn), turn
            if not turn.malformed and not (turn.calls and runs_calls):
                break
            answers = await chat.call(turn, tools=tools)
            items += call_items(turn, answers)
            turn = await chat.say(answers)
        if not items:
            return None
        found = await session.post("/verify", {**row, "response": response(row, items, last)})
        if found.get("reward") is None:
            raise EnvironmentFailure("no_reward", f"{self._url}/verify gave none, but {', '.join(found)}"[:SHOWN])
        parts = {name: value for name, value in found.items() if name not in row and _is_number(value)}
        return {**parts, "reward": require_number(found["reward"])}

    async def _play_steps(self, chat: Chat, row: Row, session: _Session) -> None:
        chat.show((await session.post("/reset", row)).get("observation"))
        turn = await chat.say()
        while not turn.over:
            found = await session.post("/step", {**row, "response": response(row, turn_items(turn), turn)})
            if found.get("reward") is not None:  # without any, reward workers score the sample
                chat.reward(found["reward"])
            if found.get("terminated") or found.get("truncated"):
                return
            names = {name: call.name for name, call in named_calls(turn)}
            shown: list[Message] = [
                {"role": "tool", "name": names.get(one["call_id"], ""), "content": one["output"]}
                for one in (found.get("info") or {}).get("tool_outputs") or ()
            ]
            if found.get("observation"):
                shown.append({"role": "user", "content": found["observation"]})
            turn = await chat.say(shown)

    def _tools(self, row: Row, session: _Session) -> dict[str, _Tool]:
        """Those of the row, by name; none if the server runs none of them."""
        names = [tool["name"] for tool in row[REQUESTS].get("tools") or ()]
        any_name = any(path.startswith("/{") for path in self._paths)
        known = [name for name in names if any_name or f"/{name}" in self._paths]
        if known and len(known) < len(names):
            what = f"{self._url} has no tool {', '.join(sorted({*names} - {*known}))}: is it the server of these rows?"
            raise EnvironmentFailure("raised", what)
        return {name: _Tool(name, session) for name in known}


class _Session:
    """Requests of one sample."""

    def __init__(self, http: Any, url: str, timeout_s: float, errors: type[Exception]) -> None:
        self._http, self._url, self._timeout_s, self._errors = http, url, timeout_s, errors
        self.turns = asyncio.Lock()  # calls reach the server in their order

    async def ask(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        """Status and text. Raises `EnvironmentFailure` if the server is lost."""
        try:
            async with self._http.post(self._url + path, json=dict(body)) as answer:
                return answer.status, await answer.text()
        except TimeoutError:
            raise EnvironmentFailure("raised", f"{self._url}{path}: no answer within {self._timeout_s:g} s") from None
        except self._errors as error:
            raise EnvironmentFailure("raised", f"{self._url}{path}: {type(error).__name__}: {error}") from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Object:
        """The object that answers. Raises `EnvironmentFailure`."""
        status, text = await self.ask(path, body)
        try:
            found = json.loads(text) if status < 400 else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EnvironmentFailure("raised", f"{self._url}{path} answers {status}: {text[:SHOWN]}")
        return found


class ServerError(Exception):
    """A tool raised in the server; the text is the server's."""


class _Tool:
    """A tool of the server, for one sample."""

    def __init__(self, name: str, session: _Session) -> None:
        self._name, self._session = name, session

    async def call(self, arguments: Mapping[str, Any]) -> str:
        async with self._session.turns:  # bounded: every request has its limit
            status, text = await self._session.ask(f"/{self._name}", arguments)
        if status == 500:
            raise ServerError(text)
        if status > 500:
            raise EnvironmentFailure("raised", f"tool {self._name} answers {status}: {text[:SHOWN]}")
        if status >= 400:
            raise ToolError(f"{self._name}: {text}")
        return text


def named_calls(turn: Turn) -> list[tuple[str, ToolCall]]:
    """The calls of a turn, each with its id."""
    return [(f"call_{turn.number}_{place}", call) for place, call in enumerate(turn.calls)]


def turn_items(turn: Turn) -> list[Object]:
    """What the policy said, in the form of Responses."""
    status = "incomplete" if turn.finish == "length" else "completed"
    return answer_items(turn.answer, named_calls(turn), number=str(turn.number), status=status)


def call_items(turn: Turn, answers: Sequence[Message]) -> list[Object]:
    """The answers to the calls of a turn, in the form of Responses. Errors of malformed calls are left out: servers
    read every message as the policy's."""
    run = [answer for answer in answers if "name" in answer]
    return [
        {"type": "function_call_output", "call_id": name, "output": str(answer["content"])}
        for (name, _), answer in zip_longest(named_calls(turn), run, fillvalue=NOT_RUN)  # type: ignore[misc]
    ]


def response(row: Row, items: list[Object], last: Turn) -> Object:
    """The answer of a model to the row's request, as Responses has it."""
    request = row[REQUESTS]
    cut = last.finish == "length"
    return {
        "id": f"resp_{last.number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": "policy",
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"strict": False, **tool} for tool in request.get("tools") or ()],
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) and math.isfinite(value)
