"""Useful tokens per second of a training step over long-tailed lengths: packed rows against padded ones.

Run: `python benchmarks/bench_packing.py`. The real path on one rank: `learners.batch.assembly.assemble` cuts a
claimed batch,
`encode_share` and `decode_share` carry it, `learners.step.update.train_step` runs forward, backward and AdamW on
`learners.backends.fsdp2.backend`; the model is a Qwen3 from `learners.warm_start.tiny_model`. Useful tokens are those
of prompts and
responses, without padding: equal in every way, as are the token budget of a micro-batch, the weights at the start and
the order of the batches. Response lengths are lognormal, cut at a cap. Ways:

- padded: one sequence per row, padded to the longest of the whole batch, in the order of the batch;
- padded_by_length: `learner.packing = false` as it is: sequences of like length share a micro-batch, each padded to its
  longest (a step of many micro-batches hides much of the tail);
- packed_dense: packed rows with transformers' own "sdpa", whose mask is dense over the row;
- packed: the default, packed rows with attention by sequence.

Ways take turns; the figure of each is the median over rounds. Results go to benchmarks/results/packing.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100

from asyncrl import config as configuration  # noqa: E402, RUF100
from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData, SampleData
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.batch import assembly
from learners.batch.micro_batches import MicroBatch, Minibatch, Sample, decode_share, encode_share
from learners.gang.gang import Gang
from learners.step.update import train_step
from learners.warm_start.tiny_model import count_parameters, make_tiny_qwen3, make_tokenizer, save_model

WAYS = {
    "padded": ["learner.packing=false"],
    "padded_by_length": ["learner.packing=false"],
    "packed_dense": ["model.attn_implementation=sdpa"],
    "packed": [],
}
SIGMAS = (0.5, 1.0)  # of the logarithm of the length
HEADLINE = 1.0
WANTED = 2.0


class Setting(msgspec.Struct, frozen=True):
    """What is measured."""

    groups: int = 8
    samples: int = 8  # of a group
    median: int = 128  # response length
    cap: int = 1024
    budget: int = 8192  # learner.micro_batch_tokens
    rounds: int = 5
    hidden: int = 128
    layers: int = 3


def make_batch(setting: Setting, *, sigma: float, seed: int, vocabulary: int) -> ClaimedBatch:
    """Groups whose responses have lognormal lengths of 1..cap; prompts of 16..64 tokens."""
    rng = np.random.default_rng(seed)

    def sample(index: int) -> SampleData:
        length = int(np.clip(rng.lognormal(np.log(setting.median), sigma), 1, setting.cap))
        logprobs = (0.1 * rng.normal(size=length) - np.log(vocabulary)).astype("f4")
        response, reward = rng.integers(3, vocabulary, length).astype("i4"), float(rng.integers(0, 2))
        return SampleData(index, response, logprobs, None, ((0, length),), "stop", reward, {}, {})

    def group(number: int) -> GroupData:
        prompt = rng.integers(3, vocabulary, int(rng.integers(16, 65))).astype("i4")
        return GroupData(number, 4, {}, prompt, tuple(sample(index) for index in range(setting.samples)), {})

    return ClaimedBatch(1, 0, False, tuple(group(number) for number in range(setting.groups)), {})


def sample_lengths(batch: ClaimedBatch) -> list[int]:
    """Tokens of every sequence."""
    return [group.prompt_ids.size + sample.response.size for group in batch.groups for sample in group.samples]


def assemble(way: str, batch: Any, config: configuration.Config) -> tuple[Minibatch, ...]:
    """The share of the one rank, over the wire between ranks."""
    learner, longest = config.learner, max(sample_lengths(batch))
    rows, build = max(1, learner.micro_batch_tokens // longest), assembly.padded_rows

    def in_order(lengths: list[int], *, limit: int) -> list[list[int]]:
        return [list(range(low, min(low + rows, len(lengths)))) for low in range(0, len(lengths), rows)]

    def to_longest(sequences: list[Sample]) -> MicroBatch:
        return widened(build(sequences), longest)

    patched = {"pad": in_order, "padded_rows": to_longest} if way == "padded" else {"pad": assembly.pad}
    with mock.patch.multiple(assembly, **patched):
        step = assembly.assemble(
            batch, algorithm=learner.algorithm, ranks=1, max_tokens=learner.micro_batch_tokens, packing=learner.packing
        )
    return decode_share(encode_share(step.shares[0]))


def widened(micro: MicroBatch, width: int) -> MicroBatch:
    """Padded rows with more padding."""
    rows = micro.input_ids.size // micro.width

    def wide(array: Any) -> Any:
        return np.pad(array.reshape(rows, micro.width), ((0, 0), (0, width - micro.width))).reshape(-1)

    def moved(flat: Any) -> Any:
        return (flat // micro.width * width + flat % micro.width).astype(np.int32)

    return msgspec.structs.replace(
        micro,
        width=width,
        input_ids=wide(micro.input_ids),
        positions=moved(micro.positions),
        position_ids=np.tile(np.arange(width, dtype=np.int32), rows),
        cu_seqlens=moved(micro.cu_seqlens),
    )


def make_config(folder: Path, setting: Setting, overrides: list[str]) -> configuration.Config:
    """Settings of a way."""
    return configuration.parse(
        f"""
model.path = "{folder}"
model.dtype = "float32"
data.source = "a:b"
data.max_prompt_tokens = 64
sampling.max_new_tokens = {setting.cap}
learner.device = "cpu"
learner.micro_batch_tokens = {setting.budget}
learner.optim.lr = 1e-6
[[reward]]
function = "a:b"
""",
        overrides=overrides,
    )


def measure(setting: Setting, sigma: float, folder: Path, gang: Gang, vocabulary: int) -> dict[str, Any]:
    """All ways on the same batches."""
    configs = {way: make_config(folder, setting, extra) for way, extra in WAYS.items()}
    backends = {way: FSDP2Backend(config, gang) for way, config in configs.items()}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    first: dict[str, dict[str, float]] = {}
    micro: dict[str, dict[str, int]] = {}
    useful, shape = [], {}
    for round_ in range(setting.rounds + 1):  # the first is a warm-up, and checks that the ways agree
        batch = make_batch(setting, sigma=sigma, seed=round_, vocabulary=vocabulary)
        lengths = sample_lengths(batch)
        for way in WAYS:
            started = time.perf_counter()
            share = assemble(way, batch, configs[way])
            result = train_step(share, backend=backends[way], gang=gang, config=configs[way].learner, step=round_ + 1)
            spent = time.perf_counter() - started
            assert not result.broken and not result.skipped, result
            if round_ == 0:
                first[way] = {name: result.metrics[name] for name in ("loss", "grad_norm", "entropy")}
            else:
                seconds[way].append(spent)
                pieces = [piece for part in share for piece in part.micro]
                micro[way] = {
                    "micro_batches": len(pieces),
                    "widest": max(piece.width for piece in pieces),
                    "tokens_computed": sum(piece.input_ids.size for piece in pieces),
                }
        if round_:
            useful.append(sum(lengths))
            shape = {"sequences": len(lengths), "mean": round(float(np.mean(lengths)), 1), "longest": max(lengths)}
    agree(first)
    return {"sigma": sigma, "last_batch": shape, "figures": figures_of(seconds, useful, micro)}


def agree(first: dict[str, dict[str, float]]) -> None:
    """Every way computes the same step."""
    for way, metrics in first.items():
        for name, value in metrics.items():
            wanted = first["padded"][name]
            assert abs(value - wanted) <= 1e-5 + 1e-4 * abs(wanted), (way, name, value, wanted)


def figures_of(seconds: dict[str, list[float]], useful: list[int], micro: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second and how many times the padded ways, by way."""
    rates = {
        way: [tokens / spent for tokens, spent in zip(useful, taken, strict=True)] for way, taken in seconds.items()
    }

    def times(way: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[way], rates[other], strict=True)), 2)

    return {
        way: {
            "useful_tokens_per_s": round(statistics.median(rate)),
            "range": [round(min(rate)), round(max(rate))],
            "step_s": round(statistics.median(seconds[way]), 3),
            "times_padded": times(way, "padded"),
            "times_padded_by_length": times(way, "padded_by_length"),
            "last_batch": micro[way],
        }
        for way, rate in rates.items()
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, default in msgspec.structs.asdict(Setting()).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/packing.json")
    given = vars(parser.parse_args())
    results = given.pop("results")
    setting = Setting(**given)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = len(make_tokenizer(folder))
        model = make_tiny_qwen3(
            vocabulary,
            hidden_size=setting.hidden,
            mlp_size=3 * setting.hidden,
            layers=setting.layers,
            max_positions=setting.cap + 64,
        )
        parameters = count_parameters(model)
        save_model(folder, model)
        config = make_config(folder, setting, [])
        torch.set_num_threads(config.learner.torch_threads)  # as the learner's process does on a CPU
        gang = Gang.join(config)
        for sigma in SIGMAS:
            rows.append(found := measure(setting, sigma, folder, gang, vocabulary))
            print(f"sigma {sigma}: {found['last_batch']}")
            for way, figures in found["figures"].items():
                print(f"  {way:18} {figures}", flush=True)
        gang.leave()
    times = next(row["figures"]["packed"]["times_padded"] for row in rows if row["sigma"] == HEADLINE)
    reports.write(
        results,
        "useful tokens per second of a training step, packed against padded rows, one rank, float32",
        setting=msgspec.structs.asdict(setting) | {"parameters": parameters, "vocabulary": vocabulary},
        times=times,
        wanted=WANTED,
        met=times >= WANTED,
        by_sigma=rows,
    )
    sys.exit(0 if times >= WANTED else 1)


if __name__ == "__main__":
    main()
