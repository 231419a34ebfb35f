"""The endpoint of a producer for agents: loopback only, one key per session.

Needs the extra `http` (aiohttp). Routes: those of the interfaces (`ANSWERS`), `POST /v1/messages/count_tokens`,
`GET /v1/models`, `GET /v1/responses/{id}`, `POST /v1/reward`; and the same below `/s/KEY/v1`, for agents that cannot
set a key. Guarantees:
1. it listens on 127.0.0.1; a request without the key of a running session gets 401, and a connection without one with
   such a key is closed after `SILENT_S`, earlier if there are more than `MOST_CONNECTIONS`;
2. an agent that disconnects ends its turn, and so does the end of its session: the sample has nothing of it;
3. errors have the form of the interface; no error ends the producer;
4. `POST /v1/reward` takes {"reward": 1.0, "parts": {...}}, or with "turn" the reward of a turn; the last one counts.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import ModuleType
from typing import Any

import msgspec

from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.net.descriptors import SILENT_S
from producers.agents.dialogue import Dialogue
from producers.agents.interface import Answer, ChatRequest, Events, Interface
from producers.agents.messages_api import MESSAGES, list_models, read_request
from producers.agents.openai_api import CHAT, TEXT, models
from producers.agents.responses_api import RESPONSES
from producers.data.openai_items import ApiError, Message
from producers.data.tokenizer import Tokenizer
from producers.environments.conversation import require_number

MOST_BYTES = 32 << 20  # of a request's body
GRACE_S = 1.0  # for answers under way at the end
HOST = "127.0.0.1"
MOST_CONNECTIONS = 512
LOOK_S = 0.25  # between two looks at the connections
PING_S, PING = 10.0, b": ping\n\n"  # a comment in a stream that has been silent for that long
ANSWERS = {"/chat/completions": CHAT, "/completions": TEXT, "/responses": RESPONSES, "/messages": MESSAGES}


class Session:
    """One sample of an agent: its key, its dialogue, and its posted reward."""

    def __init__(self, dialogue: Dialogue) -> None:
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.dialogue = dialogue
        self.asks = 0
        self.reward: float | None = None
        self.parts: dict[str, float] = {}
        self.conversations: dict[str, tuple[Message, ...]] = {}  # by the ids of its answers, with the answers
        self.responses: dict[str, Any] = {}  # answers of the interface Responses by id
        self.changed = asyncio.Event()  # set if the dialogue cannot go on
        self.under_way: set[asyncio.Task[Any]] = set()  # handlers of its requests


class Endpoint:
    def __init__(self, *, model: str, tokenizer: Tokenizer, port: int = 0) -> None:
        self.model = model
        self.port = port
        self._tokenizer = tokenizer
        self._sessions: dict[str, Session] = {}
        self._runner: Any = None
        self._web: Any = None
        self._silent: dict[Any, float] = {}  # connection without a request of a session -> since when, oldest first
        self._known: set[Any] = set()  # connections with one
        self._watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    async def open(self) -> None:
        """Listen. Raises `config.extra` without aiohttp, `net.port_in_use`."""
        self._web = web = _web()
        app = web.Application(client_max_size=MOST_BYTES)
        routes: list[tuple[str, str, Callable[..., Awaitable[Any]], Interface]] = [
            ("POST", path, partial(self._answer, interface), interface) for path, interface in ANSWERS.items()
        ]
        routes += [
            ("POST", "/messages/count_tokens", self._count, MESSAGES),
            ("GET", "/models", self._models, CHAT),
            ("GET", "/responses/{id}", self._response, RESPONSES),
            ("POST", "/reward", self._reward, CHAT),
        ]
        for method, path, handler, interface in routes:
            for prefix in ("/v1", "/s/{key}/v1"):
                app.router.add_route(method, prefix + path, self._guard(handler, interface))
        # A handler is cancelled with its connection: the turn of an agent that disconnects ends.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, self.port).start()
        except OSError as error:
            where = "environment.agent.port"
            raise ConfigError("net.port_in_use", f"{HOST}:{self.port}: {error.strerror}", where=where) from None
        self.port = int(self._runner.addresses[0][1])
        self._watching = asyncio.create_task(self._drop_silent())

    async def _drop_silent(self) -> None:
        """Close connections that only take up descriptors."""
        while True:
            await asyncio.sleep(LOOK_S)
            open_, now = self._runner.server.connections, time.monotonic()
            self._known.intersection_update(open_)
            silent = [one for one in open_ if one not in self._known]
            self._silent = {one: self._silent.get(one, now) for one in silent}
            excess = max(0, len(open_) - MOST_CONNECTIONS)
            for number, (connection, since) in enumerate(sorted(self._silent.items(), key=lambda item: item[1])):
                if (number < excess or now - since > SILENT_S) and connection.transport is not None:
                    connection.transport.abort()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def begin(self, dialogue: Dialogue) -> Session:
        """Open a session for this dialogue; its key is valid until `end`."""
        session = Session(dialogue)
        self._sessions[session.key] = session
        return session

    def end(self, session: Session) -> None:
        """Close the session and cancel its requests."""
        self._sessions.pop(session.key, None)
        for task in session.under_way:
            task.cancel()

    # ------------------------------------------------------------ requests

    def _guard(self, handler: Callable[..., Awaitable[Any]], interface: Interface) -> Callable[[Any], Awaitable[Any]]:
        def refuse(error: ApiError) -> Any:
            return self._json(interface.error(error), error.status)

        async def guard(request: Any) -> Any:
            try:
                session, task = self._find_session(request), asyncio.current_task()
                self._known.add(request.protocol)
                assert task is not None
                session.under_way.add(task)
                try:
                    return await handler(request, session)
                finally:
                    session.under_way.discard(task)
            except ApiError as error:
                return refuse(error)
            except self._web.HTTPException as error:  # for example a body that is too long
                return refuse(ApiError(error.status, error.reason))
            except (ConnectionError, TimeoutError):
                raise  # the client is gone
            except Exception as error:  # the tokenizers package can raise any Exception
                print(f"warning: a request of an agent failed: {type(error).__name__}: {error}"[:500], flush=True)
                return refuse(ApiError(500, f"{type(error).__name__}: {error}"[:200]))

        return guard

    def _find_session(self, request: Any) -> Session:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = request.match_info.get("key") or request.headers.get("x-api-key") or bearer
        session = self._sessions.get(key)
        if session is None:
            raise ApiError(401, "no such session, or it is over", code="invalid_api_key")
        return session

    async def _body(self, request: Any) -> Any:
        try:
            return msgspec.json.decode(await request.read())  # bounded: by the episode; the size by the server
        except UNREADABLE as error:
            raise ApiError(400, f"the body is no JSON: {error}") from None

    def _json(self, body: Any, status: int = 200) -> Any:
        return self._web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")

    async def _models(self, request: Any, _session: Session) -> Any:
        form = list_models if "anthropic-version" in request.headers else models
        return self._json(form(self.model))

    async def _response(self, request: Any, session: Session) -> Any:
        name = request.match_info["id"]
        if name not in session.responses:
            raise ApiError(404, f"no response of this session has the id {name[:80]!r}", code="not_found")
        return self._json(session.responses[name])

    async def _count(self, request: Any, session: Session) -> Any:
        ask = read_request(await self._body(request), limited=False)
        return self._json({"input_tokens": await session.dialogue.count(ask)})

    async def _answer(self, interface: Interface, request: Any, session: Session) -> Any:
        ask = interface.read(await self._body(request), session.conversations)
        name = f"{interface.prefix}{secrets.token_hex(12)}"
        session.asks += 1
        try:
            if ask.stream:
                return await self._stream(request, session, ask, interface, name)
            said = await session.dialogue.answer(ask)
        finally:
            if session.dialogue.fatal is not None:
                session.changed.set()
        return self._json(self._finish(interface, session, ask, said, name))

    def _finish(self, interface: Interface, session: Session, ask: ChatRequest, said: Answer, name: str) -> Any:
        """Note an answer in its session; the body of it."""
        session.conversations[name] = (*ask.conversation, said.message)
        texts = self._texts(said) if ask.logprobs else ()
        body = interface.answer(said, ask, id=name, model=self.model, texts=texts)
        if interface is RESPONSES:
            session.responses[name] = body
        return body

    def _texts(self, said: Answer) -> list[str]:
        return [self._tokenizer.decode([token]) for token in said.token_ids]

    async def _stream(self, request: Any, session: Session, ask: ChatRequest, interface: Interface, name: str) -> Any:
        """Events as the text comes. With tools, or with a parser of reasoning, it comes whole: it may be a call."""
        events = interface.events(ask, id=name, model=self.model)
        news: asyncio.Queue[str | None] = asyncio.Queue()
        whole = session.dialogue.is_read(ask)
        asking = asyncio.create_task(session.dialogue.answer(ask, None if whole else news.put_nowait))
        asking.add_done_callback(lambda _: news.put_nowait(None))
        response: Any = None
        try:
            while True:  # bounded: the end of the turn rings, and the episode has its time
                try:
                    text = await asyncio.wait_for(news.get(), PING_S)
                except TimeoutError:  # clients and proxies end a connection that is silent for long
                    response = response or await self._begin_stream(request, events)
                    await response.write(PING)
                    continue
                if text is None:
                    break
                response = response or await self._begin_stream(request, events)
                await response.write(events.text(text))
            said = asking.result()  # an error before the first event is an answer like any other
            self._finish(interface, session, ask, said, name)
            response = response or await self._begin_stream(request, events)
            if whole and said.text:
                await response.write(events.text(said.text))
            await response.write(events.end(said))
            await response.write_eof()
        except ApiError as error:
            if response is None:
                raise
            await response.write(events.error(error))
            await response.write_eof()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)  # bounded: it was cancelled, or is done
        return response

    async def _begin_stream(self, request: Any, events: Events) -> Any:
        response = self._web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        if first := events.begin():
            await response.write(first)
        return response

    async def _reward(self, request: Any, session: Session) -> Any:
        body = await self._body(request)
        if not isinstance(body, dict):
            raise ApiError(400, "the body is no JSON object")
        turn, turns = body.get("turn"), session.dialogue.session.turns
        try:
            value = require_number(body.get("reward"))
            parts = {str(name): require_number(part) for name, part in (body.get("parts") or {}).items()}
        except (EnvironmentFailure, AttributeError) as error:
            raise ApiError(400, str(error), param="reward") from None
        if turn is None:
            session.reward, session.parts = value, parts
        elif type(turn) is int and -turns <= turn < turns:
            session.dialogue.turn_rewards[turn % turns] = value
        else:
            raise ApiError(400, f"turn {turn!r} of {turns}", param="turn")
        return self._json({"object": "reward", "turns": turns})


def _web() -> ModuleType:
    try:
        from aiohttp import web
    except ImportError:
        raise ConfigError(
            "config.extra", "environment.name = 'agent' needs the extra http (aiohttp)", where="environment.name"
        ) from None
    return web
