"""The trainer process: executes the requests of the log, one at a time.

Guarantees:
1. requests of a model run in the order of their numbers; a gap waits for the missing one, at most `GAP_S`;
2. queues take turns: the next request is of the queue that has waited longest;
3. a change of weights is stored with the number of its request before it is answered. After a restart a model is the
   stored one, and the forward_backward requests behind it are computed again, for their gradients alone;
4. an error of a request answers it and changes nothing. A request that ends the process `MOST_TRIES` times fails.

It reads lines of the front on stdin (there is a new request; the end: stop) and writes ids of answered requests.
"""

from __future__ import annotations

import math
import os
import select
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from asyncrl.config import Config, load
from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.runtime import model_folder
from learners.service.adapter_state import STATE, Model, load_weights
from learners.service.base_model import Adapter, BaseModel
from learners.service.messages import (
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    ServicePaths,
    parse_weights_path,
    seed_for,
)
from learners.service.passes import run_pass
from learners.service.protocol import BadRequest, Pass, write_samples
from learners.service.request_log import FAILED, JSON, PROTO, Request, RequestLog
from learners.service.sampling import Sampler
from learners.service.sampling_request import SampleRequest

GAP_S = 600.0
MOST_TRIES = 3
CLEAR_S = 3600.0  # between two removals of old answers
LOOK_S = 1.0  # without a line of the front, look for requests after this time
READY = "ready"
Held = TypeVar("Held")


class Trainer:
    def __init__(self, config: Config, paths: ServicePaths, say: Callable[[str], None]) -> None:
        self._paths = paths
        self._base_path = config.model.path
        self._most = config.service.max_models
        self._say = say
        self._log = RequestLog(paths.log)
        self._cleared = -CLEAR_S  # when old answers were last removed
        self._base = BaseModel(config)
        self._sampler = _make_sampler(config, self._base)
        self._models: OrderedDict[str, Model] = OrderedDict()  # the last used one last
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()  # of saved weights, for sampling
        self._turns: dict[str, float] = {}  # queue -> when its last request ran
        self._complete: dict[str, int] = {}  # queue -> all numbers below are there
        self._started = time.time()

    def run(self, wait: Callable[[float], bool]) -> None:
        """Execute requests until `wait(seconds)` returns False."""
        self._say(READY)
        going = True
        while going:
            if time.monotonic() - self._cleared > CLEAR_S:
                self._cleared = time.monotonic()
                self._log.clear_old_answers()
            request = self._choose()
            going = wait(0.0 if request else LOOK_S)
            if request is not None and going:
                self._turns[request.queue] = time.monotonic()
                self._answer(request)
                self._say(request.id)

    # ------------------------------------------------------------ order

    def _choose(self) -> Request | None:
        first: dict[str, Request] = {}
        for request in self._log.pending():
            first.setdefault(request.queue, request)
        ready = [one for one in first.values() if one.kind == "sample" or self._is_next(one)]
        return min(ready, key=lambda one: (self._turns.get(one.queue, 0.0), one.created), default=None)

    def _is_next(self, request: Request) -> bool:
        """Whether all numbers before this one are there; they are answered, because it is the first without answer."""
        known = self._complete.get(request.queue, 0)
        if self._log.count(request.queue, known, request.seq) == request.seq - known:
            self._complete[request.queue] = request.seq
            return True
        if time.time() - max(request.created, self._started) > GAP_S:
            self._fail(request, f"request {request.seq - 1} did not come within {GAP_S:g} s", "user")
        return False

    # ------------------------------------------------------------ execution

    def _answer(self, request: Request) -> None:
        if request.tries >= MOST_TRIES:
            self._fail(request, f"the trainer ended {request.tries} times during this request", "server")
            return
        self._log.begin(request)
        try:
            form, answer = self._execute(request)
        except (BadRequest, *UNREADABLE) as error:
            self._fail(request, str(error), "user")
        except (OSError, RuntimeError, AsyncRLError) as error:  # memory, disk
            traceback.print_exc()
            self._models.pop(request.queue, None)  # what is in memory may be half of a change
            self._fail(request, f"{type(error).__name__}: {error}"[:500], "server")
        else:
            self._log.answer(request, form, answer)
        if request.kind == "sample":
            self._log.clear_bodies(request.queue, request.seq, request.seq + 1)

    def _fail(self, request: Request, why: str, category: str) -> None:
        print(f"request {request.id} ({request.kind}) failed: {why}", flush=True)
        self._log.answer(request, FAILED, msgspec.json.encode({"error": why, "category": category}))

    def _execute(self, request: Request) -> tuple[int, bytes]:
        body = self._log.body(request)
        if request.kind == "sample":
            return PROTO, self._sample(request, msgspec.json.decode(body, type=SampleRequest))
        model = None if request.seq == 0 else self._model(request)
        if request.seq == 0 and self._state_folder(request.queue).joinpath(STATE).exists():
            model = self._model(request)
        if model is not None and request.seq <= model.applied:
            return JSON, model.answer  # it ended after the state was stored
        if request.kind in ("forward", "forward_backward"):
            assert model is not None
            return PROTO, run_pass(self._base, model, msgspec.msgpack.decode(body, type=Pass))
        change: dict[str, Callable[[Request, Model | None, bytes], dict[str, Any]]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save,
        }
        answer = msgspec.json.encode(change[request.kind](request, model, body))
        if request.kind in ("create_model", "load_weights", "optim_step"):
            model = self._models[request.queue]
            before = model.applied
            model.save_state(self._state_folder(request.queue), request.seq, answer)
            self._log.clear_bodies(request.queue, before, request.seq)
        return JSON, answer

    def _create(self, request: Request, _model: Model | None, body: bytes) -> dict[str, Any]:
        asked = msgspec.json.decode(body, type=CreateModel)
        model = Model(self._base.make_adapter(asked.form(seed_for(request.queue))))
        _hold(self._models, request.queue, model, self._most)
        return {"type": "create_model", "model_id": request.queue}

    def _load(self, request: Request, _model: Model | None, body: bytes) -> dict[str, Any]:
        asked = msgspec.json.decode(body, type=LoadWeights)
        folder = self._paths.weights_folder(parse_weights_path(asked.path))
        model = load_weights(folder, self._base, with_optimizer=asked.optimizer)
        _hold(self._models, request.queue, model, self._most)
        return {"type": "load_weights", "path": asked.path, "model_id": request.queue}

    def _step(self, request: Request, model: Model | None, body: bytes) -> dict[str, Any]:
        assert model is not None
        params = msgspec.json.decode(body, type=OptimStep).adam_params
        if params is None:
            raise BadRequest("adam_params are missing: this service has Adam alone")
        norm = model.step(params)
        if not math.isfinite(norm):
            print(f"request {request.id}: the norm of the gradient is {norm}; the update was skipped", flush=True)
            return {"metrics": {"skipped": 1.0}}
        return {"metrics": {"grad_norm": norm}}

    def _save(self, request: Request, model: Model | None, body: bytes) -> dict[str, Any]:
        assert model is not None
        asked = msgspec.json.decode(body, type=SaveWeights)
        trains = request.kind == "save_weights"
        path = asked.weights_path(request.queue, request.seq, trains=trains)
        model.export(
            self._paths.weights_folder(path),
            base=self._base_path,
            request=request.id,
            with_optimizer=trains,
            overwrite=asked.overwrite,
        )
        self._adapters.pop(path.text, None)  # it may be of weights that were overwritten
        if asked.sampling_session_seq_id is None:
            return {"type": request.kind, "path": path.text}
        sampler = f"{request.queue.partition(':')[0]}:sample:{asked.sampling_session_seq_id}"
        self._log.add_sampler(sampler, path.text)
        return {"type": request.kind, "sampling_session_id": sampler}

    def _sample(self, request: Request, asked: SampleRequest) -> bytes:
        path = self._log.find_sampler(request.queue)
        adapter = self._saved_adapter(path) if path else None
        with self._base.activate(adapter):
            samples, prompt = self._sampler.sample(asked, seed=seed_for(request.id))
        return write_samples([(one.tokens, one.logprobs, one.stopped) for one in samples], prompt)

    # ------------------------------------------------------------ what is held

    def _state_folder(self, queue: str) -> Path:
        return self._paths.models / queue

    def _model(self, request: Request) -> Model:
        """The model of a request, as it was before it."""
        model = self._models.get(request.queue)
        if model is None:
            if not self._state_folder(request.queue).joinpath(STATE).exists():
                raise BadRequest(f"the model {request.queue} was not made")
            model = Model.load_state(self._state_folder(request.queue), self._base)
            for body in self._log.passes(request.queue, model.applied + 1, request.seq):
                run_pass(self._base, model, msgspec.msgpack.decode(body, type=Pass))
        _hold(self._models, request.queue, model, self._most)
        return model

    def _saved_adapter(self, text: str) -> Adapter:
        adapter = self._adapters.get(text)
        if adapter is None:
            folder = self._paths.weights_folder(parse_weights_path(text))
            adapter = load_weights(folder, self._base, with_optimizer=False).adapter
        _hold(self._adapters, text, adapter, self._most)
        return adapter


def _hold(held: OrderedDict[str, Held], name: str, one: Held, most: int) -> None:
    """Keep it as the last used one, and drop those that were not used for longest: they are on disk."""
    held[name] = one
    held.move_to_end(name)
    while len(held) > most:
        held.popitem(last=False)


def _make_sampler(config: Config, base: BaseModel) -> Sampler:
    ends, decode = base.hf.generation_config.eos_token_id, None
    with suppress(OSError, ValueError):  # a folder without a tokenizer
        tokenizer = model_folder.load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        decode = tokenizer.decode
    return Sampler(base, decode, [ends] if isinstance(ends, int) else ends or [])


def main(config_file: str) -> int:
    """Run until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs in the log
    # Equal bits on every execution, also on a GPU (its environment has CUBLAS_WORKSPACE_CONFIG).
    torch.use_deterministic_algorithms(True, warn_only=True)

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    def wait(seconds: float) -> bool:
        if not select.select([0], [], [], seconds)[0]:
            return True
        return bool(os.read(0, 65536))

    try:
        config = load(Path(config_file))
        Trainer(config, ServicePaths(config.run_dir), say).run(wait)
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        return 1  # the front is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
