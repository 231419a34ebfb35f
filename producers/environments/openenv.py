"""Environments of OpenEnv, which are servers: the environment `openenv`.

`[environment] name = "openenv"`, `args = {url = "http://127.0.0.1:8000"}`. The server has the packages; here
its WebSocket interface is spoken (OpenEnv 0.3: messages `reset`, `step` and `close`, one session for each connection).
The row's columns `seed` and `options` (a table) go to `reset`. `args.observe` and `args.act` ('module:function') turn
an observation (a dictionary) into text and the text of a turn into an action (a dictionary). Guarantees:
1. every sample has its own session, which ends with it; `done` ends the sample;
2. a text that is not an action, by `act` (ValueError, RecursionError) or by the server's own check, gets an error
   message and reward 0;
3. a reward of null is none: without any, reward workers score the sample;
4. a server without an answer for `args.timeout_s` fails the sample (`environment.raised`).

Example: an environment whose action has one required text, `{"message": "..."}`, gets the whole text of a turn there;
for other actions the turn must hold a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from asyncrl.environment import EnvironmentFailure, Row, Step, Turn
from asyncrl.errors import UNREADABLE, ConfigError
from producers.environments.gymnasium import converter

Object = Mapping[str, Any]
MOST_BYTES = 64 << 20  # of one message
REFUSED = "VALIDATION_ERROR"  # the server's code for an action that it does not know


def one_text(seen: Object) -> str:
    """The only text of an observation; without one, the whole observation in JSON.

    >>> one_text({"echoed": "hi", "length": None}), one_text({"board": [1, 2]})
    ('hi', '{"board": [1, 2]}')
    """
    texts = [value for value in seen.values() if value is not None]
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(dict(seen), ensure_ascii=False)


def text_field(schema: Object) -> str:
    """The one required text of an action, by the JSON schema of actions; empty if it needs something else."""
    required = list(schema.get("required", ()))
    kind = schema.get("properties", {}).get(required[0], {}).get("type") if len(required) == 1 else None
    return required[0] if kind == "string" else ""


def object_in(text: str) -> dict[str, Any]:
    """The JSON object between the first and the last brace of a text. Raises one of `UNREADABLE`."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise ValueError("no JSON object in it")
    found = json.loads(text[start : end + 1])
    assert isinstance(found, dict)
    return found


class OpenEnvironment:
    """One episode: a connection of its own to the server."""

    def __init__(self, url: str, *, observe: str = "", act: str = "", intro: str = "", timeout_s: float = 60) -> None:
        try:
            import aiohttp
        except ImportError as error:
            message = f"{error}: pip install 'asyncrl[http]'"
            raise ConfigError("config.extra", message, where="environment.name") from None
        if not url.startswith(("http://", "https://")):
            raise ConfigError("config.environment", "not a http:// or https:// address", where=f"args.url = {url!r}")
        self._http, self._url, self._intro, self._timeout_s = aiohttp, url.rstrip("/"), intro, timeout_s
        self._observe = converter(observe, "observe") if observe else one_text
        self._act = converter(act, "act") if act else None
        self._field = ""
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, row: Row) -> str:
        self._session = self._http.ClientSession(timeout=self._http.ClientTimeout(total=self._timeout_s))
        if self._act is None:
            async with self._session.get(f"{self._url}/schema") as answer:
                self._field = text_field((await answer.json()).get("action", {}))
        self._socket = await self._session.ws_connect(f"{self._url}/ws", max_msg_size=MOST_BYTES)
        options = row.get("options") or {}
        data = {**options, **({} if row.get("seed") is None else {"seed": row["seed"]})}
        kind, found = await self._ask("reset", data)
        if kind == "error":
            raise EnvironmentFailure("raised", f"{self._url}: reset: {found}")
        return self._intro + str(self._observe(found["observation"]))

    async def step(self, action: Turn) -> Step:
        try:
            chosen = self._action(action.text)
        except UNREADABLE as error:
            return Step(f"not an action: {error}", 0.0)
        kind, found = await self._ask("step", chosen)
        if kind == "error" and found.get("code") == REFUSED:
            return Step(f"not an action: {_refusal(found)}", 0.0)
        if kind == "error":
            raise EnvironmentFailure("raised", f"{self._url}: {found}")
        reward = found.get("reward")
        reward = None if reward is None else float(reward)
        return Step(str(self._observe(found["observation"])), reward, bool(found.get("done")))

    async def close(self) -> None:
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        finally:
            if self._session is not None:
                await self._session.close()

    def _action(self, text: str) -> Object:
        if self._act is not None:
            chosen: Object = self._act(text)
            return chosen
        return {self._field: text} if self._field else object_in(text)

    async def _ask(self, kind: str, data: Object) -> tuple[str, dict[str, Any]]:
        """The kind and the data of the server's answer."""
        await self._socket.send_json({"type": kind, "data": dict(data)})
        try:
            answer = await self._socket.receive_json(timeout=self._timeout_s)
        except (TimeoutError, TypeError, ValueError) as error:  # TypeError: the connection ended
            what = f"{self._url}: no answer to {kind!r} within {self._timeout_s:g} s, or none in JSON: {error}"
            raise EnvironmentFailure("raised", what) from None
        return str(answer.get("type")), dict(answer.get("data") or {})


def _refusal(found: Object) -> str:
    """The server's words for what is wrong with an action: fields and messages of pydantic."""
    errors = [one for one in found.get("errors") or () if isinstance(one, dict)]
    said = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in errors]
    return "; ".join(said) or str(found.get("message"))
