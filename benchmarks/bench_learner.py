"""The learner's training step against a hand-written loop and TRL's, and its publish against a gather by parameter.

Run: `make bench-learner`, or `python benchmarks/bench_learner.py [--trl-python .venv-trl/bin/python]` (`make trl` makes
that environment); three minutes on 2 cores. One random Qwen3 in float32, of whose multiplications the head has as large
a part as in one of 0.5B.

Steps: useful tokens per second (prompts and responses, no padding) of GRPO steps on the same batches, with responses of
lognormal lengths, cut at a cap. Every way has a process of its own (`learner_rounds.py`) and one thread; they take
turns in every round (ours and minimal twice), so that noise hits all of them, and ratios are medians over rounds of
the ratio within a round; `by_cpu` is that of seconds of the processor, which a busy machine disturbs less. In the first
round the norms of the gradients must agree. Memory is the most that was resident during a step beyond what
was there once the model was loaded, so with gradients and optimizer. Ways:

- ours: from the claimed batch to the updated weights (`learners.step.resilient_step`,
`learners.backends.fsdp2.backend`, one rank);
- minimal: by hand, for one process and one loss: packed rows, the same attention, full logits, fused AdamW;
- trl: TRL's GRPOTrainer, from its padded batch to the updated weights; rows per micro-batch: `--trl-rows`. On a CPU it
  also scores the padding; its experimental asynchronous trainer packs, and was not measured.

Publish: two ranks, 311 tensors (`learner_publish.py`): weights into buckets on rank 0, streamed as the learner does it
(parts of some MiB go to rank 0 alone, and are lent to who copies them) against one gather per parameter; turn by turn.
Results go to benchmarks/results/learner.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100
from bench_packing import make_batch, sample_lengths  # noqa: E402, RUF100
from children import Child  # noqa: E402, RUF100

from learners.warm_start.tiny_model import count_parameters, make_tiny_qwen3, make_tokenizer, save_model

WANTED = {"times_minimal": 0.95, "times_trl": 1.5, "publish_float32": 2.5}
SIGMA = 1.0  # of the logarithm of the length
AGREE = 1e-3  # relative, of the norms of the gradients
TWICE = ("ours", "minimal")  # in every round: their ratio is near 1
MIB = 1 << 20


class Setting(msgspec.Struct, frozen=True):
    """What is measured."""

    groups: int = 4
    samples: int = 8  # of a group
    median: int = 128  # response length
    cap: int = 768
    budget: int = 8192  # learner.micro_batch_tokens
    rounds: int = 5
    hidden: int = 256
    layers: int = 4
    vocabulary: int = 4096
    threads: int = 1
    trl_rows: int = 8  # per_device_train_batch_size
    publish_rounds: int = 9


# ---------------------------------------------------------------- steps


def batch_of(setting: Setting, round_: int) -> tuple[list[dict[str, Any]], int, dict[str, Any]]:
    """The groups of a round, their tokens, and their shape."""
    batch: Any = make_batch(setting, sigma=SIGMA, seed=round_, vocabulary=setting.vocabulary)  # type: ignore[arg-type]
    lengths = sample_lengths(batch)
    groups = [
        {
            "prompt": group.prompt_ids.tolist(),
            "responses": [sample.response.tolist() for sample in group.samples],
            "rewards": [sample.reward for sample in group.samples],
        }
        for group in batch.groups
    ]
    shape = {"sequences": len(lengths), "mean": round(float(np.mean(lengths)), 1), "longest": max(lengths)}
    return groups, sum(lengths), shape


def opened(setting: Setting, folder: Path, options: Any) -> dict[str, Child]:
    """The processes by way."""
    pythons = {"ours": sys.executable, "minimal": sys.executable}
    if options.trl_python is not None:
        pythons["trl"] = str(options.trl_python)
    first = msgspec.structs.asdict(setting) | {"model": str(folder), "overrides": options.set}
    script = str(Path(__file__).with_name("learner_rounds.py"))
    env = {
        "OMP_NUM_THREADS": str(setting.threads),
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    return {
        way: Child([python, script], first=first | {"way": way}, log=folder / f"{way}.log", env=env)
        for way, python in pythons.items()
    }


def steps(setting: Setting, ways: dict[str, Child]) -> dict[str, Any]:
    """All ways on the same batches."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    peaks: dict[str, int] = dict.fromkeys(ways, 0)
    useful: list[int] = []
    for round_ in range(setting.rounds + 1):  # the first is a warm-up, and checks that the ways agree
        groups, tokens, shape = batch_of(setting, round_)
        order = [*ways, *(way for way in ways if way in TWICE)]
        found: dict[str, list[Any]] = {way: [] for way in ways}
        for way in order[round_ % len(order) :] + order[: round_ % len(order)]:
            found[way].append(ways[way].ask({"groups": groups}))
        if not round_:
            agree({way: answers[0]["grad_norm"] for way, answers in found.items()})
        else:
            useful.append(tokens)
        for way, answers in found.items():
            peaks[way] = max(peaks[way], *(answer["peak"] for answer in answers))
            if round_:
                seconds[way].append(statistics.mean(answer["seconds"] for answer in answers))
                cpu[way].append(statistics.mean(answer["cpu"] for answer in answers))
        said = {way: [round(answer["seconds"], 2) for answer in answers] for way, answers in found.items()}
        print(f"round {round_}: {shape} {said} s, load {os.getloadavg()[0]:.1f}", flush=True)

    def times(taken: dict[str, list[float]], way: str, other: str) -> float:
        return round(statistics.median(b / a for a, b in zip(taken[way], taken[other], strict=True)), 3)

    def row(way: str) -> dict[str, Any]:
        rates = [tokens / spent for tokens, spent in zip(useful, seconds[way], strict=True)]
        others = [other for other in ways if other != way]
        return {
            "useful_tokens_per_s": round(statistics.median(rates)),
            "range": [round(min(rates)), round(max(rates))],
            "peak_extra_mib": round((peaks[way] - ways[way].ready["ready"]) / MIB, 1),
            "peak_mib": round(peaks[way] / MIB, 1),
            **{f"times_{other}": times(seconds, way, other) for other in others},
            **{f"times_{other}_by_cpu": times(cpu, way, other) for other in others},
            "version": ways[way].ready["version"],
        }

    return {way: row(way) for way in ways}


def agree(norms: dict[str, float]) -> None:
    """Every way computes the same gradient."""
    for way, norm in norms.items():
        assert abs(norm - norms["minimal"]) <= AGREE * norms["minimal"], (way, norms)


# ---------------------------------------------------------------- publish


def publish(setting: Setting, folder: Path) -> dict[str, Any]:
    """Figures of the two ranks, by dtype."""
    out = folder / "publish.json"
    script = str(Path(__file__).with_name("learner_publish.py"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--local-addr",
            "127.0.0.1",
            "--nproc-per-node",
            "2",
            script,
            str(folder),
            str(out),
            str(setting.publish_rounds),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    if not out.exists():
        raise SystemExit(
            f"the ranks of the publish ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


# ---------------------------------------------------------------- the whole


def run_steps(setting: Setting, options: Any) -> tuple[dict[str, Any], int]:
    """Figures by way, and the parameters of the model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(folder)
        model = make_tiny_qwen3(
            setting.vocabulary,
            hidden_size=setting.hidden,
            mlp_size=3 * setting.hidden,
            heads=setting.hidden // 32,
            kv_heads=setting.hidden // 64,
            layers=setting.layers,
            max_positions=setting.cap + 64,
        )
        parameters = count_parameters(model)
        save_model(folder, model)
        ways = opened(setting, folder, options)
        try:
            return steps(setting, ways), parameters
        finally:
            for way in ways.values():
                way.close()


def run_publish(setting: Setting) -> dict[str, Any]:
    """Figures of a model of 28 layers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tokenizer(folder)
        save_model(
            folder,
            make_tiny_qwen3(
                setting.vocabulary,
                hidden_size=256,
                mlp_size=768,
                heads=8,
                kv_heads=4,
                layers=28,
            ),
        )
        return publish(setting, folder)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, default in msgspec.structs.asdict(Setting()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL")
    parser.add_argument("--set", nargs="*", default=[], help="settings of ours, as key=value")
    parser.add_argument(
        "--only",
        choices=("steps", "publish"),
        help="one part; of the publish alone results go to "
        "learner_publish.json beside --results, of the steps alone nowhere",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/learner.json")
    options = parser.parse_args()
    setting = Setting(**{name: getattr(options, name) for name in msgspec.structs.asdict(Setting())})
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    parameters = 0
    if options.only != "publish":
        figures, parameters = run_steps(setting, options)
        for way, found in figures.items():
            print(f"  {way:8} {found}", flush=True)
    if options.only != "steps":
        sent = run_publish(setting)
        for dtype, found in sent.items():
            print(f"  {dtype:8} {found}", flush=True)
    if options.only == "steps":
        return
    if options.only == "publish":
        ratio = sent["float32"]["times_per_parameter"]
        wanted = WANTED["publish_float32"]
        reports.write(
            options.results.with_name("learner_publish.json"),
            "the gather of a publish, two ranks",
            setting={"rounds": setting.publish_rounds},
            reached={"publish_float32": ratio},
            wanted={"publish_float32": wanted},
            met={"publish_float32": ratio >= wanted},
            publish=sent,
        )
        sys.exit(0 if ratio >= wanted else 1)
    reached = {name: figures["ours"][name] for name in ("times_minimal", "times_trl") if name in figures["ours"]}
    reached["publish_float32"] = sent["float32"]["times_per_parameter"]
    met = {name: value >= WANTED[name] for name, value in reached.items()}
    reports.write(
        options.results,
        "useful tokens per second of a GRPO step, memory, and the gather of a publish",
        setting=msgspec.structs.asdict(setting) | {"parameters": parameters, "overrides": options.set},
        reached=reached,
        wanted=WANTED,
        met=met,
        steps=figures,
        publish=sent,
    )
    sys.exit(0 if all(met.values()) else 1)


if __name__ == "__main__":
    main()
