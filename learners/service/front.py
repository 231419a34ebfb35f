"""The HTTP endpoints of a training service: they store requests in the log, and hand out answers from it.

Guarantees:
1. every request needs the key; a training or sampling request is on disk before its id is answered;
2. `(model or sampling session, seq_id)` names a request: a repeat gets the same id, another body under the same number
   the status 422 (the client would repeat 409 for five minutes);
3. the answer to what is not served is a 4xx status that says so. Errors of an execution are answers of the request.

It imports no torch. `retrieve_future` waits up to `POLL_S` for an answer, then says 408: the client asks again.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.errors import UNREADABLE
from asyncrl.runtime.run_dir import read_object
from learners.service.messages import (
    MODEL_ID,
    AdapterForm,
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    ServicePaths,
    parse_weights_path,
)
from learners.service.protocol import CONTENT_TYPE, BadRequest, read_pass
from learners.service.request_log import PENDING, PROTO, Conflict, RequestLog
from learners.service.sampling_request import SampleRequest

MOST_BYTES = 64 << 20  # of a request's body; the client splits passes at 5 MB
POLL_S = 20.0  # the client gives up a connection after 45
PREFIX = "/api/v1"
Handler = Callable[[web.Request], Awaitable[Any]]
Body = dict[str, Any]


class Front:
    def __init__(self, *, model: str, paths: ServicePaths, key: str) -> None:
        """`model`: name and folder of the base model."""
        self._model = model
        self._paths = paths
        self._key = key.encode()
        self.wake_trainer: Callable[[], None] = lambda: None
        self._log = RequestLog(paths.log)
        self._waiting: dict[str, set[asyncio.Event]] = {}  # by the request that they wait for

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._guard])
        posts: dict[str, Handler] = {
            "client/config": _always({}),
            "client/dynamic_config": _always({}),  # its defaults
            "telemetry": _always({"status": "accepted"}),  # and dropped
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._info,
            "weights_info": self._weights_info,
            "forward_backward": self._pass,
            "optim_step": self._optim_step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
            "load_weights": self._load,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        gets: dict[str, Handler] = {
            "healthz": _always({"status": "ok"}),
            "get_server_capabilities": self._capabilities,
            "samplers/{id}": self._sampler,
        }
        for method, routes in (("POST", posts), ("GET", gets)):
            for path, handler in routes.items():
                app.router.add_route(method, f"{PREFIX}/{path}", handler)
        return app

    def answered(self, request_id: str | None) -> None:
        """Wake those that wait for a request; None: all, because the trainer ended."""
        names = list(self._waiting) if request_id is None else [request_id]
        for event in (one for name in names for one in self._waiting.get(name, ())):
            event.set()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("X-API-Key", "").encode(), self._key):
            return _error(401, "the API key is not that of this service (TINKER_API_KEY)")
        try:
            answer = await handler(request)
        except (BadRequest, Conflict) as error:
            return _error(422, str(error))
        except UNREADABLE as error:
            return _error(422, f"the body is not understood: {error}")
        except web.HTTPNotFound:
            return _error(404, f"{request.method} {request.path} is not served by this training service")
        except web.HTTPException as error:  # for example a body that is too long, or an unknown session
            return _error(error.status, error.text or error.reason)
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    # ------------------------------------------------------------ sessions

    async def _capabilities(self, _request: web.Request) -> Body:
        return {"supported_models": [{"model_name": self._model, "trainable": True, "sampleable": True}]}

    async def _create_session(self, _request: web.Request) -> Body:
        session = f"s-{secrets.token_hex(8)}"
        self._log.add_session(session)
        return {"type": "create_session", "session_id": session}

    async def _heartbeat(self, request: web.Request) -> Body:
        self._check_session(str((await _read(request)).get("session_id")))
        return {"type": "session_heartbeat"}

    async def _finish(self, request: web.Request) -> Body:
        self._check_session(request.match_info["id"])
        self._log.finish_session(request.match_info["id"])
        return {}

    def _check_session(self, session: str) -> None:
        is_finished = self._log.is_finished(session)
        if is_finished is None:
            raise web.HTTPBadRequest(text=f"there is no session {session[:80]!r}")
        if is_finished:
            raise web.HTTPGone(text=f"the session {session} is finished")

    def _check_base(self, name: str | None) -> None:
        if name not in (None, self._model, Path(self._model).name):
            raise BadRequest(f"base_model {name!r} is not served here; there is {self._model!r}")

    # ------------------------------------------------------------ models

    def _add(self, queue: str, seq: int, kind: str, body: bytes) -> Body:
        if not 0 <= seq < 1 << 62:
            raise BadRequest(f"seq_id {seq}")
        if kind != "sample" and MODEL_ID.fullmatch(queue) is None:
            raise BadRequest(f"model_seq_id {queue.rpartition(':')[2]}: a number of at most 9 digits is needed")
        request_id = self._log.add(queue, seq, kind, body)
        self.wake_trainer()
        return {"request_id": request_id}

    def _train(self, model_id: str, seq: int, kind: str, body: bytes) -> Body:
        """Store a request of a model."""
        match = MODEL_ID.fullmatch(model_id)
        if match is None or self._log.first_body(model_id) is None:
            raise BadRequest(f"there is no model {model_id[:80]!r}")
        self._check_session(match[1])
        if seq < 1:
            raise BadRequest(f"seq_id {seq}: the requests of a model begin with 1")
        return {**self._add(model_id, seq, kind, body), "model_id": model_id}

    async def _create_model(self, request: web.Request) -> Body:
        tree = await _read(request)
        asked = msgspec.convert(tree, CreateModel)
        asked.check()
        self._check_base(asked.base_model)
        self._check_session(asked.session_id)
        return self._add(f"{asked.session_id}:train:{asked.model_seq_id}", 0, "create_model", _sorted(tree))

    async def _load(self, request: web.Request) -> Body:
        tree = await _read(request)
        asked = msgspec.convert(tree, LoadWeights)
        parse_weights_path(asked.path)
        if asked.session_id is None:
            return self._train(str(asked.model_id), asked.seq_id or 0, "load_weights", _sorted(tree))
        self._check_base(tree.get("base_model"))
        self._check_session(asked.session_id)
        return self._add(f"{asked.session_id}:train:{asked.model_seq_id}", 0, "load_weights", _sorted(tree))

    async def _pass(self, request: web.Request) -> Body:
        asked = read_pass(await _body(request))
        kind = "forward" if asked.forward_only else "forward_backward"
        return self._train(asked.model_id, asked.seq_id, kind, msgspec.msgpack.encode(asked, order="deterministic"))

    async def _optim_step(self, request: web.Request) -> Body:
        tree = await _read(request)
        asked = msgspec.convert(tree, OptimStep)
        return self._train(asked.model_id, asked.seq_id, "optim_step", _sorted(tree))

    async def _save(self, request: web.Request) -> Body:
        tree, kind = await _read(request), request.path.rpartition("/")[2]
        asked = msgspec.convert(tree, SaveWeights)
        asked.weights_path(asked.model_id, asked.seq_id, trains=True)
        return self._train(asked.model_id, asked.seq_id, kind, _sorted(tree))

    def _form_of_model(self, model_id: str) -> AdapterForm | None:
        kind, body = self._log.first_body(model_id) or ("", b"")
        if kind == "create_model":
            return msgspec.json.decode(body, type=CreateModel).lora_config
        return self._form_of_weights(msgspec.json.decode(body, type=LoadWeights).path) if kind else None

    def _form_of_weights(self, path: str) -> AdapterForm | None:
        folder = self._paths.weights_folder(parse_weights_path(path))
        form = read_object(folder / "service.json").get("form")
        return None if form is None else msgspec.convert(form, AdapterForm)

    async def _info(self, request: web.Request) -> Body:
        model_id = str((await _read(request)).get("model_id"))
        form = self._form_of_model(model_id)
        if form is None:
            raise BadRequest(f"there is no model {model_id[:80]!r}")
        return {
            "type": "get_info",
            "model_data": {"model_name": self._model, "tokenizer_id": self._model},
            "model_id": model_id,
            "is_lora": True,
            "lora_rank": form.rank,
            "model_name": self._model,
        }

    async def _weights_info(self, request: web.Request) -> Body:
        path = str((await _read(request)).get("tinker_path"))
        form = self._form_of_weights(path)
        if form is None:
            raise BadRequest(f"there are no weights {path[:200]!r}")
        kinds = {name: getattr(form, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": self._model, "is_lora": True, "lora_rank": form.rank, **kinds}

    # ------------------------------------------------------------ samples

    async def _create_sampler(self, request: web.Request) -> Body:
        tree = await _read(request)
        session, path = str(tree.get("session_id")), tree.get("model_path") or ""
        self._check_session(session)
        if path and self._form_of_weights(path) is None:
            raise BadRequest(f"there are no weights {path[:200]!r}")
        if not path:
            self._check_base(tree.get("base_model"))
        sampler = f"{session}:sample:{msgspec.convert(tree.get('sampling_session_seq_id', 0), int)}"
        self._log.add_sampler(sampler, path)
        if self._log.find_sampler(sampler) != path:
            raise Conflict(f"the sampling session {sampler} was made with other weights")
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    async def _sampler(self, request: web.Request) -> Body:
        sampler = request.match_info["id"]
        path = self._log.find_sampler(sampler)
        if path is None:
            raise web.HTTPBadRequest(text=f"there is no sampling session {sampler[:80]!r}")
        return {"sampler_id": sampler, "base_model": self._model, "model_path": path or None}

    async def _sample(self, request: web.Request) -> Body:
        tree = await _read(request)
        asked = msgspec.convert(tree, SampleRequest)
        asked.tokens()
        if self._log.find_sampler(asked.sampling_session_id) is None:
            raise BadRequest(f"there is no sampling session {asked.sampling_session_id[:80]!r}")
        self._check_session(asked.sampling_session_id.partition(":")[0])
        answer = self._add(asked.sampling_session_id, asked.seq_id, "sample", _sorted(tree))
        names = [f"{answer['request_id']}:{number}" for number in range(asked.num_samples)]
        return {**answer, "sample_sequence_ids": names}

    # ------------------------------------------------------------ answers

    async def _retrieve(self, request: web.Request) -> web.Response:
        request_id, event = str((await _read(request)).get("request_id")), asyncio.Event()
        waiting = self._waiting.setdefault(request_id, set())
        waiting.add(event)
        try:
            found = self._log.find_answer(request_id)
            if found is not None and found[0] == PENDING:
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), POLL_S)
                found = self._log.find_answer(request_id)
        finally:
            waiting.discard(event)
            if not waiting:
                self._waiting.pop(request_id, None)
        if found is None:
            return _error(404, f"there is no request {request_id[:80]!r}")
        form, answer = found
        if form == PENDING:
            return web.json_response(
                {"type": "try_again", "request_id": request_id, "queue_state": "active"}, status=408
            )
        if answer is None:
            return _error(404, f"the answer of {request_id} is more than a day old and was cleared")
        kind = CONTENT_TYPE if form == PROTO else "application/json"
        return web.Response(body=answer, content_type=kind)


def _always(answer: Body) -> Handler:
    async def handle(_request: web.Request) -> Body:
        return answer

    return handle


def _error(status: int, why: str) -> web.Response:
    return web.json_response({"detail": why}, status=status)


async def _body(request: web.Request) -> bytes:
    return await request.read()  # bounded: the size by the server, the time by the connection


async def _read(request: web.Request) -> Body:
    tree = msgspec.json.decode(await _body(request))
    if not isinstance(tree, dict):
        raise BadRequest("the body is no JSON object")
    return tree


def _sorted(tree: Body) -> bytes:
    """Equal bytes for equal requests."""
    return msgspec.json.encode(tree, order="deterministic")
