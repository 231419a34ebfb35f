"""The control plane of an SGLang server (0.5.23): pause, sessions, groups, checksums, facts. One method per call.

Guarantees:
1. every call has a deadline; a server that refuses (4xx), answers `success: false`, 5xx or garbage, or is gone, raises
   `engine.broken` with its message;
2. servers without weight sessions (404 for `/end_weight_update`) are used without them; `sessions` shows it;
3. `recover` resets a server that an earlier client left in the middle of an update.
It decides nothing: the engine decides when to pause and what to send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.wire import Tensor
from producers.engines.http import HttpClient, Refused, broken_error
from producers.engines.model_files import folder_name

CALL_S = 30.0
LOOK_S = 0.5
NOT_FOUND = 404
#: safetensors names of dtypes as torch calls them.
DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class _State(msgspec.Struct):
    effective_max_running_requests_per_dp: int = 0


class ServerFacts(msgspec.Struct):
    """The used fields of `/server_info`."""

    version: str
    device: str
    dtype: str
    max_total_num_tokens: int
    max_req_input_len: int
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    page_size: int = 1
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    enable_deterministic_inference: bool = False
    internal_states: list[_State] = []

    @property
    def running(self) -> int:
        """Requests that it decodes at once; 0 if unknown."""
        return sum(state.effective_max_running_requests_per_dp for state in self.internal_states)


class _Model(msgspec.Struct):
    weight_version: str
    architectures: list[str] | None = None


class _Done(msgspec.Struct):
    success: bool = True
    message: str = ""


def answer_as(answer: Any, kind: Any, where: str) -> Any:
    """The answer as that type. Raises `engine.broken`."""
    try:
        return msgspec.convert(answer, kind)
    except UNREADABLE as error:
        raise broken_error(f"not an SGLang answer ({error}): {str(answer)[:200]}", where=where) from None


class SGLangServer:
    """One server. `swap_s` bounds each call that moves weights."""

    def __init__(self, client: HttpClient, *, swap_s: float) -> None:
        self.client = client
        self.sessions = True
        self._swap_s = swap_s

    def _is(self, answer: Any, kind: Any, path: str) -> Any:
        return answer_as(answer, kind, self.client.url + path)

    async def _do(self, path: str, body: Any = None, *, timeout_s: float = CALL_S) -> None:
        answer = await self.client.post(path, {} if body is None else body, timeout_s=timeout_s)
        if isinstance(answer, dict):
            done = self._is(answer, _Done, path)
            if not done.success:
                raise broken_error(done.message[:300], where=self.client.url + path)

    # ------------------------------------------------------------ life

    async def ready(self, *, within_s: float) -> None:
        """Wait until it answers and can generate. Raises `engine.broken` with its last error after that time."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                await self.client.get("/model_info", timeout_s=CALL_S)
                await self.recover()
                await self.client.get("/health", timeout_s=CALL_S)
                return
            except AsyncRLError as error:
                if time.monotonic() > deadline:
                    raise broken_error(
                        f"not ready within {within_s:g} s: {error.message}", where=self.client.url
                    ) from None
            await asyncio.sleep(LOOK_S)

    async def recover(self) -> None:
        """End the requests, the open session and the pause of an earlier client."""
        await self._do("/abort_request", {"abort_all": True})
        try:
            await self._do("/end_weight_update")
        except Refused as error:  # 400: no open session
            self.sessions = error.status != NOT_FOUND
        await self.resume()

    async def facts(self) -> ServerFacts:
        """Its settings and sizes. The scheduler answers, between two steps."""
        found: ServerFacts = self._is(
            await self.client.get("/server_info", timeout_s=CALL_S), ServerFacts, "/server_info"
        )
        return found

    async def label(self, *, timeout_s: float = CALL_S) -> str:
        """Its name of its weights."""
        return await self._model(lambda model: model.weight_version, timeout_s=timeout_s)

    async def architecture(self) -> str:
        """Class name of its model; empty if unknown."""
        return await self._model(lambda model: (model.architectures or [""])[0], timeout_s=CALL_S)

    async def _model(self, pick: Any, *, timeout_s: float) -> str:
        answer = await self.client.get("/model_info", timeout_s=timeout_s)
        return str(pick(self._is(answer, _Model, "/model_info")))

    # ------------------------------------------------------------ requests

    async def pause(self, mode: str) -> None:
        """Stop decoding: `in_place` keeps K/V, `retract` drops it. Returns once the current step is done."""
        await self._do("/pause_generation", {"mode": mode})
        await self.facts()  # the pause itself is asynchronous

    async def resume(self) -> None:
        await self._do("/continue_generation", {"torch_empty_cache": False})

    async def flush(self) -> None:
        """Empty the prefix cache; no request may hold K/V."""
        await self.client.post("/flush_cache", timeout_s=CALL_S)

    async def abort(self, rid: str) -> None:
        """Abort the requests whose ids begin with `rid`."""
        with suppress(Refused):
            await self._do("/abort_request", {"rid": rid})

    # ------------------------------------------------------------ weights

    async def checksums(self, *, timeout_s: float) -> str:
        """Its own checksums of its workers' weights; empty if it has no such call."""
        path = "/weights_checker"
        try:
            answer = await self.client.post(path, {"action": "checksum"}, timeout_s=timeout_s)
        except Refused as error:
            if error.status == NOT_FOUND:
                return ""
            raise
        ranks = self._is(answer, dict[str, Any], path).get("ranks")
        return "" if ranks is None else msgspec.json.encode(ranks, order="deterministic").decode()

    async def join_group(self, name: str, *, host: str, port: int, size: int, backend: str) -> None:
        """Its workers become the ranks 1 and above of a group. Rank 0 must be building it meanwhile."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": backend,
        }
        await self._do("/init_weights_update_group", body, timeout_s=self._swap_s)

    async def leave_group(self, name: str) -> None:
        await self._do("/destroy_weights_update_group", {"group_name": name})

    async def begin(self) -> None:
        """Open a weight session, if it has them."""
        if self.sessions:
            await self._do("/begin_weight_update", {"selector": "all"}, timeout_s=self._swap_s)

    async def end(self) -> None:
        """Close the session: the weights are complete."""
        if self.sessions:
            await self._do("/end_weight_update", timeout_s=self._swap_s)

    async def update(
        self, tensors: Sequence[Tensor], *, group: str, label: str | None, sending: Awaitable[None]
    ) -> None:
        """Its workers take these tensors, back to back in one broadcast, sent by `sending`."""
        body = {
            "names": [folder_name(tensor.name) for tensor in tensors],
            "dtypes": [DTYPE_NAMES[tensor.dtype] for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": label,
            "load_format": "flattened_bucket",
        }
        await together(self._do("/update_weights_from_distributed", body, timeout_s=self._swap_s), sending)


async def together(*works: Awaitable[None]) -> None:
    """Run them in parallel; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        # bounded: each has its own deadline
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CALL_S)
