"""A small server that keeps the HTTP contract of vLLM's (0.32, development routes on), for tests without vLLM.

`python standin_vllm.py --model-path DIR --port N`. State: paused mode, update begun, group, label, running requests.
Updates are those of the backend that this project puts into vLLM's workers: tensors from a mapped file, or from a real
Gloo group. It refuses weights without a begun update (500, as vLLM does where its engine raises) and dies where it is
to decode between the start and the end of an update, for there vLLM's layers have no memory.
`pause` with `clear_cache` makes the K/V of what runs again, without it stays; `keep`, `abort` and `wait` as vLLM's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from standin_core import Ask, Bad, Core, Faults, Job, serve
from standin_group import GroupMember

from weightsync.copy_digest import digest_all
from weightsync.plan.buckets import bucket_starts

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FINISH = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLM:
    """The routes."""

    def __init__(self, core: Core, args: argparse.Namespace) -> None:
        self.core = core
        self.args = args
        self.updating = False
        self.transfer = False  # the weight transfer engine was made
        self.group: GroupMember | None = None
        self.digests: list[str] = []
        self.faults = Faults()

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[self.faults.middleware(["/inference/v1/generate"])], client_max_size=64 << 20
        )
        app.router.add_post("/standin/fault", self.faults.order)
        for path, handler in (
            ("/health", self.health),
            ("/version", self.version),
            ("/v1/models", self.models),
            ("/server_info", self.server_info),
            ("/metrics", self.metrics),
            ("/is_paused", self.is_paused),
            ("/weight_info", self.weight_info),
            ("/get_world_size", self.world_size),
        ):
            app.router.add_get(path, handler)
        for path, handler in (
            ("/inference/v1/generate", self.generate),
            ("/abort_requests", self.abort),
            ("/inference/v1/abort_requests", self.abort),
            ("/pause", self.pause),
            ("/resume", self.resume),
            ("/init_weight_transfer_engine", self.init),
            ("/shutdown_weight_transfer_engine", self.shutdown),
            ("/start_weight_update", self.begin),
            ("/update_weights", self.update),
            ("/finish_weight_update", self.finish),
            ("/update_weight_version", self.rename),
            ("/weight_checker", self.check),
            ("/collective_rpc", self.rpc),
            ("/reset_prefix_cache", self.reset),
        ):
            app.router.add_post(path, handler)

        async def begin(_app: web.Application) -> None:
            await self.core.start()

        app.on_startup.append(begin)
        return app

    # ------------------------------------------------------------ facts

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+standin"})

    async def models(self, _request: web.Request) -> web.Response:
        card = {"id": self.args.model_path, "object": "model", "max_model_len": self.core.context}
        return web.json_response({"object": "list", "data": [card]})

    async def server_info(self, _request: web.Request) -> web.Response:
        core = self.core
        return web.json_response(
            {
                "vllm_config": {
                    "model_config": {"max_model_len": core.context},
                    "parallel_config": {"data_parallel_size": 1},
                    "cache_config": {"kv_cache_size_tokens": core.slots * core.context},
                    "scheduler_config": {"max_num_seqs": core.slots, "policy": "fcfs"},
                    "weight_transfer_config": {"backend": "asyncrl"},
                }
            }
        )

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=f"vllm:num_requests_running {len(self.core.jobs)}\n")

    async def is_paused(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.core.paused})

    async def weight_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.core.label})

    async def world_size(self, _request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    # ------------------------------------------------------------ samples

    def ask(self, body: dict[str, Any]) -> Ask:
        chosen = body.get("sampling_params") or {}
        ids, images, features = tuple(body["token_ids"]), (), ()
        if parts := body.get("content_parts"):
            if any(part["type"] != "image_url" for part in parts):
                raise Bad(400, f"content_parts: {parts}"[:200])
            ids, images = self.core.expand(list(ids), [part["url"] for part in parts])
            features = tuple(part["uuid"] for part in parts)
        if not ids or min(ids) < 0:
            raise Bad(400, "token_ids must not be empty or negative")
        stops = list(chosen.get("stop_token_ids") or ())
        stops += [] if chosen.get("ignore_eos") else [self.args.eos]
        return Ask(
            body.get("request_id") or f"standin-{id(body)}",
            ids,
            chosen.get("max_tokens") or 16,
            temperature=chosen.get("temperature", 1.0),
            top_p=chosen.get("top_p", 1.0),
            top_k=max(chosen.get("top_k", 0), 0),
            min_p=chosen.get("min_p", 0.0),
            seed=chosen.get("seed") or 0,
            stop_ids=tuple(stops),
            salt=body.get("cache_salt") or "",
            images=images,
            features=features,
        )

    def choice(self, job: Job, sent: int) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": value, "rank": None, "top_logprobs": []}
            for value, token in zip(job.logprobs[sent:], job.tokens[sent:], strict=True)
        ]
        return {
            "index": 0,
            "token_ids": job.tokens[sent:],
            "logprobs": {"content": content},
            "stop_reason": None,
            "finish_reason": FINISH[job.finish] if job.finish else None,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": self.core.spans(job) if job.finish else None,
        }

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ask = self.ask(body)
        if not body.get("stream"):
            if what := self.faults.due(request.path):
                return await self.faults.strike(what)
            jobs = [job async for job in self.core.run(ask)]
            return web.json_response({"request_id": ask.name, "choices": [self.choice(jobs[-1], 0)]})
        jobs = self.core.run(ask)
        try:
            first = await anext(jobs)  # a refusal is an answer of its own, not a part of the stream
        except Bad as bad:
            error = {"message": bad.words, "type": "BadRequestError", "param": None, "code": bad.status}
            return web.json_response({"error": error}, status=bad.status)
        return await self.stream(request, ask, first, jobs)

    async def stream(self, request: web.Request, ask: Ask, first: Job, jobs: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent, job = 0, first
        while True:
            chunk = {"request_id": ask.name, "choices": [self.choice(job, sent)]}
            if ask.images and not sent:
                chunk["prompt_token_ids"] = list(ask.ids)
            sent = len(job.tokens)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if job.finish:
                break
            if what := self.faults.due(request.path):
                await self.faults.strike(what)
                await response.write(b"data: \x00{\n\n")
            job = await anext(jobs)
        await jobs.aclose()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, request: web.Request) -> web.Response:
        names = (await request.json()).get("request_ids")
        wanted = names or list(self.core.jobs)
        for name in wanted:
            await self.core.give_up(name, exact=True)
        return web.json_response({"status": "aborted", "aborted": len(wanted)})

    # ------------------------------------------------------------ control

    async def pause(self, request: web.Request) -> web.Response:
        mode, clear = request.query.get("mode", "abort"), request.query.get("clear_cache", "true").lower() == "true"
        if mode not in ("keep", "abort", "wait"):
            raise Bad(422, f"mode {mode!r}")
        if mode == "abort":
            await self.core.give_up(None)
        while mode == "wait" and self.core.jobs:
            await asyncio.sleep(0.01)
        if clear:
            await self.core.retract()
            self.core.flush()
        else:
            await self.core.pause()
        return web.json_response({"status": "paused"})

    async def resume(self, _request: web.Request) -> web.Response:
        if self.updating:
            os._exit(13)  # EngineDeadError: the layers have no memory
        await self.core.resume()
        return web.json_response({"status": "resumed"})

    async def reset(self, request: web.Request) -> web.Response:
        if self.core.running <= 0 or request.query.get("reset_running_requests") == "true":
            self.core.flush()
        return web.Response()

    # ------------------------------------------------------------ weights

    async def init(self, request: web.Request) -> web.Response:
        info = (await request.json())["init_info"]
        await self._leave()
        if info.get("group"):
            self.group = await asyncio.to_thread(self._join, info)
        self.transfer = True
        return web.json_response({"message": "Weight transfer initialized"})

    def _join(self, info: dict[str, Any]) -> GroupMember:
        return GroupMember(
            host=info["master_address"],
            port=info["master_port"],
            rank=info.get("rank_offset", 1),
            size=info["world_size"],
            name=info["group"],
            backend=info.get("backend", "gloo"),
            timeout_s=info.get("timeout_s", 60.0),
        )

    async def _leave(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            await asyncio.to_thread(group.leave)

    async def shutdown(self, _request: web.Request) -> web.Response:
        await self._leave()
        self.transfer = False
        return web.json_response({"message": "Weight transfer shut down"})

    async def begin(self, _request: web.Request) -> web.Response:
        if not self.transfer or self.updating:
            raise Bad(500, "weight transfer is not initialized, or an update is under way")
        if not self.core.paused and self.core.jobs:
            os._exit(13)
        self.updating = True
        return web.json_response({"message": "Weight update started"})

    async def update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        if not self.updating:
            raise Bad(500, "no weight update was started")
        sizes, digests = info["bucket_bytes"], []
        starts, whole = bucket_starts(sizes)
        for number, size in enumerate(sizes):
            memory = await self._bucket(info.get("path", ""), starts[number], size, whole)
            parts = []
            for name, dtype, shape, bucket, offset, nbytes in info["tensors"]:
                if bucket != number:
                    continue
                part = memory[offset : offset + nbytes]
                if offset % DTYPES[dtype].itemsize or len(part) != nbytes:
                    raise Bad(500, f"{name} does not lie in its bucket as it should")
                parts.append(part.numpy())
                self.core.put(name, part.clone().view(DTYPES[dtype]).view(shape))
            digests.append(digest_all(parts))
        self.digests = digests
        return web.json_response({"message": "Weights updated"})

    async def _bucket(self, path: str, start: int, size: int, whole: int) -> torch.Tensor:
        if path:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                mapping = mmap.mmap(descriptor, whole, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
            return torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
        if self.group is None:
            raise Bad(500, "the update is to come through a group, and there is none")
        return await asyncio.to_thread(self.group.receive, size)

    async def finish(self, request: web.Request) -> web.Response:
        if not self.updating:
            raise Bad(500, "no weight update was started")
        label = (await request.json()).get("weight_version") if request.can_read_body else None
        await self.core.swap(label or self.core.label)
        self.updating = False
        return web.json_response({"message": "Weight update finished"})

    async def rename(self, request: web.Request) -> web.Response:
        name = (await request.json())["new_version"]
        await self.core.swap(name)
        return web.json_response({"success": True, "new_version": name})

    async def check(self, _request: web.Request) -> web.Response:
        return web.json_response({"checksums": await asyncio.to_thread(self.core.checksums)})

    async def rpc(self, request: web.Request) -> web.Response:
        """What the worker extension of this project answers."""
        body = await request.json()
        method, args = body.get("method"), body.get("args") or []
        if method == "asyncrl_held":
            digests = {str(number): digest for number, digest in enumerate(self.digests)}
            return web.json_response({"results": [{"digests": digests, "shares": 1, "seconds": {}}]})
        if method == "asyncrl_full_softmax":
            return web.json_response({"results": ["True"]})
        if method == "asyncrl_model":
            shape = json.loads((Path(self.args.model_path) / "config.json").read_text())
            shape = shape.get("text_config", shape)
            plain = {key: value for key, value in shape.items() if isinstance(value, int | str)}
            return web.json_response({"results": [{"shape": plain, "dtype": "float32", "device": "cpu"}]})
        if method == "asyncrl_token" and self.args.no_files:
            return web.json_response({"results": [""]})
        if method == "asyncrl_token":
            path = Path(args[0])
            return web.json_response({"results": [path.read_text()[:100] if path.exists() else ""]})
        raise Bad(500, f"no worker method {method!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--no-files", action="store_true")  # as on another host: files of the producer are not seen
    args = parser.parse_args()
    shape = json.loads((Path(args.model_path) / "config.json").read_text())
    args.eos = shape.get("eos_token_id", -1)

    async def make() -> web.Application:
        core = Core(Path(args.model_path), context=args.context, slots=args.slots, threads=1, deterministic=True)
        return VLLM(core, args).app()

    serve(make(), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
