"""A small server that keeps SGLang's HTTP contract (0.5.23), for tests without SGLang: routes, states, refusals.

`python standin_sglang.py --model-path DIR --port N [--older] [--overlap] [--no-salt]`. State: paused (in place,
retracted), session open, group, label, running requests. It refuses weights without a session, and a flush while
requests hold K/V; it holds requests while it is paused; it takes part in a real Gloo group and checks sizes and
alignment. `--older`: a server of before sessions; `--no-salt`: one whose prefix cache knows no salt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from standin_core import Ask, Bad, Core, Faults, Job, serve
from standin_group import GroupMember

GROUP_S = 30.0
SESSIONS = ("/begin_weight_update", "/end_weight_update")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SGLang:
    """The routes."""

    def __init__(self, core: Core, args: argparse.Namespace) -> None:
        self.core = core
        self.args = args
        self.session = args.older  # a server of before has none and needs none
        self.groups: dict[str, GroupMember] = {}
        self.faults = Faults(SESSIONS if args.older else ())

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.faults.middleware(["/generate"])], client_max_size=64 << 20)
        app.router.add_post("/standin/fault", self.faults.order)
        for path, handler in (
            ("/model_info", self.model_info),
            ("/server_info", self.server_info),
            ("/health", self.health),
            ("/standin/calls", self.calls),
            ("/standin/tokens", self.tokens),
        ):
            app.router.add_get(path, handler)
        for path, handler in (
            ("/generate", self.generate),
            ("/abort_request", self.abort),
            ("/pause_generation", self.pause),
            ("/continue_generation", self.resume),
            ("/flush_cache", self.flush),
            (SESSIONS[0], self.begin),
            (SESSIONS[1], self.end),
            ("/init_weights_update_group", self.join),
            ("/destroy_weights_update_group", self.leave),
            ("/update_weights_from_distributed", self.update),
            ("/weights_checker", self.check),
        ):
            app.router.add_post(path, handler)

        async def begin(_app: web.Application) -> None:
            await self.core.start()

        app.on_startup.append(begin)
        return app

    # ------------------------------------------------------------ facts

    async def model_info(self, _request: web.Request) -> web.Response:
        shape = json.loads((Path(self.args.model_path) / "config.json").read_text())
        return web.json_response({"weight_version": self.core.label, "architectures": shape.get("architectures")})

    async def server_info(self, _request: web.Request) -> web.Response:
        core = self.core
        return web.json_response(
            {
                "version": "0.5.23-standin",
                "device": "cpu",
                "dtype": "float32",
                "tp_size": 1,
                "pp_size": 1,
                "dp_size": 1,
                "max_total_num_tokens": core.slots * core.context,
                "max_req_input_len": core.context - 6,
                "page_size": 1,
                "disable_overlap_schedule": not self.args.overlap,
                "disable_radix_cache": False,
                "enable_deterministic_inference": core.deterministic,
                "internal_states": [{"effective_max_running_requests_per_dp": core.slots}],
            }
        )

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.core.paused else 200)

    async def calls(self, _request: web.Request) -> web.Response:
        return web.json_response(self.faults.calls)

    async def tokens(self, _request: web.Request) -> web.Response:
        """How many tokens each sample under way has."""
        return web.json_response({name: len(job.tokens) for name, job in self.core.jobs.items()})

    # ------------------------------------------------------------ samples

    def ask(self, body: dict[str, Any]) -> Ask:
        chosen = body["sampling_params"]
        ids, images = tuple(body["input_ids"]), ()
        if body.get("image_data"):
            ids, images = self.core.expand(list(ids), body["image_data"])
        salt = "" if self.args.no_salt else f"{body.get('extra_key')}/{body.get('cache_salt')}"
        stops = () if chosen.get("ignore_eos") else (*(chosen.get("stop_token_ids") or ()), self.args.eos)
        top_k = chosen.get("top_k", -1)
        return Ask(
            str(body.get("rid") or id(body)),
            ids,
            chosen["max_new_tokens"],
            temperature=chosen.get("temperature", 1.0),
            top_p=chosen.get("top_p", 1.0),
            top_k=max(top_k, 0),
            min_p=chosen.get("min_p", 0.0),
            seed=chosen.get("sampling_seed") or 0,
            stop_ids=stops,
            salt=salt,
            images=images,
        )

    def answer(self, job: Job) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": job.ask.name, "finish_reason": None, "prompt_tokens": len(job.ask.ids),
            "weight_version": self.core.label, "num_retractions": job.retractions, "cached_tokens": job.cached,
            "completion_tokens": len(job.tokens), "output_token_logprobs_length": len(job.tokens),
            "output_token_logprobs": [[*pair, None] for pair in zip(job.logprobs, job.tokens, strict=True)],
        }  # fmt: skip
        if job.finish:
            meta["finish_reason"] = {"type": job.finish}
            if not self.args.older:
                meta["weight_versions"] = self.core.spans(job)
        told = {"prompt_token_ids": list(job.ask.ids)} if job.ask.images else {}
        return {"text": "", "output_ids": list(job.tokens), "meta_info": meta, **told}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ask = self.ask(body)
        if not body.get("stream"):
            if what := self.faults.due("/generate"):
                return await self.faults.strike(what)
            jobs = [job async for job in self.core.run(ask)]
            return web.json_response(self.answer(jobs[-1]))
        return await self.stream(request, ask, int(body["sampling_params"].get("stream_interval") or 1))

    async def stream(self, request: web.Request, ask: Ask, interval: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        try:
            async for job in self.core.run(ask):
                if not job.finish and sent and len(job.tokens) - sent < interval:
                    continue
                sent = len(job.tokens)
                await response.write(b"data: " + json.dumps(self.answer(job)).encode() + b"\n\n")
                if not job.finish and (what := self.faults.due("/generate")):
                    await self.faults.strike(what)
                    await response.write(b"data: \x00{\n\n")
        except Bad as bad:
            refusal = {"error": {"message": bad.words, "type": "invalid_request_error", "code": bad.status}}
            await response.write(b"data: " + json.dumps(refusal).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.core.give_up(None if body.get("abort_all") else body["rid"])
        return web.Response()

    # ------------------------------------------------------------ control

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode not in ("in_place", "retract", "abort"):
            raise Bad(422, f"mode {mode!r}")
        if mode == "retract":
            await self.core.retract()
        elif mode == "in_place":
            await self.core.pause()
        else:
            self.core.paused = True
            self.core.going.clear()
            await self.core.give_up(None)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _request: web.Request) -> web.Response:
        await self.core.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, _request: web.Request) -> web.Response:
        if self.core.running > 0:
            return web.Response(status=400, text="Flush cache failed: requests are running.\n")
        self.core.flush()
        return web.Response(text="Cache flushed.\n")

    async def begin(self, _request: web.Request) -> web.Response:
        if self.session:
            raise Bad(400, "a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return web.json_response({"success": True, "message": "Success"})

    async def end(self, _request: web.Request) -> web.Response:
        if not self.session:
            raise Bad(400, "no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return web.json_response({"success": True, "message": "Success"})

    # ------------------------------------------------------------ weights

    async def join(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["group_name"]
        if name in self.groups:
            raise Bad(400, "Process group name already exists")
        make = lambda: GroupMember(  # noqa: E731
            host=body["master_address"],
            port=body["master_port"],
            rank=body["rank_offset"],
            size=body["world_size"],
            name=name,
            backend=body["backend"],
            timeout_s=GROUP_S,
        )
        try:
            self.groups[name] = await asyncio.to_thread(make)
        except RuntimeError as error:
            raise Bad(400, f"Failed to initialize custom process group: {error}") from None
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def leave(self, request: web.Request) -> web.Response:
        group = self.groups.pop((await request.json())["group_name"], None)
        if group is None:
            raise Bad(400, "The group to be destroyed does not exist.")
        await asyncio.to_thread(group.leave)
        return web.json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.session:
            raise Bad(
                400, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if body["load_format"] != "flattened_bucket":
            raise Bad(400, "this stand-in takes flattened buckets alone")
        parts = [
            (name, DTYPES[dtype], shape)
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        ]
        sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in parts]
        member = self.groups.get(body["group_name"])
        if member is None:
            raise Bad(400, f"Group {body['group_name']} not in the update groups")
        try:
            data = await asyncio.to_thread(member.receive, sum(sizes))
        except RuntimeError as error:
            raise Bad(400, f"Failed to receive weights: {error}") from None
        at = 0
        if self.core.inputs and any(name.startswith(("model.visual.", "model.language_model.")) for name, *_ in parts):
            raise Bad(400, "Failed to load weights: KeyError")  # or, of qwen2_5_vl, it skips them
        for (name, dtype, shape), size in zip(parts, sizes, strict=True):
            if at % dtype.itemsize:
                raise Bad(400, f"Unaligned: {name} at {at}")
            self.core.put(name, data[at : at + size].view(dtype).view(shape).clone())
            at += size
        if body.get("flush_cache", True):
            if self.core.running > 0:
                raise Bad(400, "Weights were updated, but the cache was not flushed")
            self.core.flush()
        if body.get("weight_version") is not None:
            await self.core.swap(body["weight_version"])
        return web.json_response({"success": True, "message": "Succeeded to update parameter online."})

    async def check(self, _request: web.Request) -> web.Response:
        sums = await asyncio.to_thread(self.core.checksums)
        return web.json_response({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--older", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--no-salt", action="store_true")
    args = parser.parse_args()
    shape = json.loads((Path(args.model_path) / "config.json").read_text())
    args.eos = shape.get("eos_token_id", -1)

    async def make() -> web.Application:
        core = Core(Path(args.model_path), context=args.context, slots=args.slots, threads=1, deterministic=True)
        return SGLang(core, args).app()

    serve(make(), host=args.host, port=args.port)


if __name__ == "__main__":
    main()
