"""The recipe of examples/reasoning beside TRL: the same checkpoint, prompts, rewards and hours, on the same machine.

    make trl
    python examples/reasoning/recipe.py prepare --demonstrations 32000
    asyncrl launch all examples/reasoning/sft.toml --set learner.ranks=1 --set run.dir=runs/reasoning/sft-500
    python benchmarks/reasoning_trl.py [--steps 200] [--seed 0] [--bound 2] [--start runs/reasoning/sft-500/export]

First `asyncrl launch all examples/reasoning/rl.toml` makes `--steps` steps; then TRL's GRPOTrainer, in an environment
of its own, trains for as many seconds. The clock of each runs from its first step, without imports. Equal on both
sides: 16 prompts x 8 samples a step, at most 96 tokens, temperature 1, advantages divided by the group's standard
deviation, the mean over all tokens, one update per batch, no KL, AdamW with the recipe's learning rate and warm-up,
float32, all cores. Different: asyncrl drops groups with equal rewards and samples others for them, which TRL has no
setting for.

Afterwards the weights of every 40th step of both answer the held-out prompts, with the same sampler and the same
rewards: `--samples` answers at temperature 1 for each; `--figures` does this once more, without training. Writes
benchmarks/results/reasoning_trl-seed-N.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from children import Answers, Child  # noqa: E402, RUF100

RUNS = ROOT / "runs" / "reasoning"
START = RUNS / "sft-500" / "export"  # a shorter pre-training than that of the recipe
RECIPE = ROOT / "examples" / "reasoning" / "rl.toml"
RESULTS = ROOT / "benchmarks" / "results"
EVERY = 40  # steps between kept weights
GROUPS, SAMPLES, MOST_TOKENS = 16, 8, 96


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- TRL, in its own Python


def train_with_trl() -> None:
    """In: a setting. Out: {"score": [[row, text], ...]} for a batch, answered by rewards; at the end {"kept": ...}."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer, __version__

    answers = Answers()
    given = answers.hear()
    torch.set_num_threads(os.cpu_count() or 1)
    rows = read_lines(RUNS / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(given["start"])
    out = Path(given["out"])
    kept: list[dict[str, Any]] = []
    tokens = [0]
    clock = dict[str, float]()

    def reward(completions: list[str], completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        answers.say({"score": list(zip(index, completions, strict=True))})
        tokens.append(tokens[-1] + sum(map(len, completion_ids)))
        found: list[float] = answers.hear()["rewards"]
        return found

    class Keep(TrainerCallback):
        """Keeps the weights of every 40th step, and of the last one before the time is over."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock["began"] = time.monotonic()

        def on_step_end(self, _: Any, state: Any, control: Any, model: Any = None, **__: Any) -> None:
            seconds = time.monotonic() - clock["began"]
            control.should_training_stop = over = seconds >= given["seconds"]
            if over or state.global_step % EVERY == 0:
                folder = out / f"version-{state.global_step}"
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                kept.append({"version": state.global_step, "seconds": round(seconds, 1), "tokens": tokens[-1],
                             "folder": str(folder)})  # fmt: skip

    trainer = GRPOTrainer(
        given["start"],
        reward_funcs=reward,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict(
            {"prompt": [row["prompt"] for row in rows], "index": [row["extra_info"]["index"] for row in rows]}
        ),
        callbacks=[Keep()],
        args=trl_settings(given),
    )
    trainer.train()
    answers.say({"kept": kept, "version": __version__})


def trl_settings(given: dict[str, Any]) -> Any:
    """TRL's configuration for what the recipe does."""
    from trl import GRPOConfig

    return GRPOConfig(
        str(Path(given["out"]) / "trainer"),
        seed=given["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=given["lr"],
        adam_beta2=given["beta2"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=given["warmup_steps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        per_device_train_batch_size=GROUPS * SAMPLES // 2,
        gradient_accumulation_steps=2,
        num_generations=SAMPLES,
        max_completion_length=MOST_TOKENS,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_steps=10_000,
        model_init_kwargs={"dtype": "float32"},
    )


# ---------------------------------------------------------------- both sides, from here


class Rewards:
    """The recipe's rewards, in the children and the sandbox of reward workers."""

    def __init__(self, config: Any) -> None:
        from asyncrl.config.judges import list_judges
        from producers.rewards.rescore import Bench

        self._rules = [(judge.name, judge.data_sources) for judge in list_judges(config)]
        self._benches = {judge.name: Bench(config, judge) for judge in list_judges(config)}

    def score(self, rows: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[float]:
        """The reward of each text as the answer to its row."""
        from asyncrl.config.judges import judges_for
        from producers.rewards.sample import RewardSample

        asked: dict[str, dict[Any, Any]] = {name: {} for name in self._benches}
        for place, (row, text) in enumerate(zip(rows, texts, strict=True)):
            sample = RewardSample.from_row(
                row, prompt=row["prompt"], response=text, prompt_ids=[], response_ids=[], finish="stop"
            )
            for name in judges_for(row["data_source"], self._rules):
                asked[name][0, place] = sample
        found = [0.0] * len(rows)
        for name, samples in asked.items():
            for (_, place), result in self._benches[name].score(samples, {}).items():
                assert not result.reason, result
                found[place] += result.reward
        return found

    def close(self) -> None:
        for bench in self._benches.values():
            bench.close()


def run_ours(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train, and export every 40th step: version, seconds, trained tokens, folder."""
    settings = (
        f"run.dir={folder}", f"model.path={args.start}", f"run.seed={args.seed}", f"buffer.max_staleness={args.bound}",
        f"learner.steps={args.steps}", f"learner.checkpoint_every={EVERY}", "learner.checkpoint_keep=1000",
        "evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    asyncrl = [sys.executable, "-m", "asyncrl"]
    subprocess.run([*asyncrl, "launch", "all", str(RECIPE), *words], cwd=ROOT, check=True)
    lines = read_lines(folder / "metrics" / "learner.jsonl")
    kept = []
    for version in range(EVERY, args.steps + 1, EVERY):
        out = folder / f"version-{version}"
        export = [*asyncrl, "export", str(folder), "--step", str(version), "--out", str(out)]
        subprocess.run(export, cwd=ROOT, check=True, timeout=300)
        so_far = lines[:version]
        kept.append({"version": version, "seconds": round(sum(line["step_s"] for line in so_far), 1),
                     "tokens": int(sum(line["tokens"] for line in so_far)), "folder": str(out)})  # fmt: skip
    return kept


def run_trl(args: argparse.Namespace, config: Any, rewards: Rewards, folder: Path, seconds: float) -> dict[str, Any]:
    """Train with TRL for as many seconds; what the child said at its end."""
    optim = config.learner.optim
    rows = {row["extra_info"]["index"]: row for row in read_lines(RUNS / "train.jsonl")}
    given = {"out": str(folder), "start": str(args.start), "seconds": seconds, "seed": args.seed, "lr": optim.lr,
             "beta2": optim.beta2, "warmup_steps": optim.warmup_steps}  # fmt: skip
    folder.mkdir(parents=True)
    command = [str(args.trl_python), str(Path(__file__).resolve()), "--trl"]
    child = Child(command, first=given, log=folder / "trl.log", env={"PYTHONUNBUFFERED": "1"})
    said = child.ready
    while "score" in said:
        places, texts = zip(*said["score"], strict=True)
        said = child.ask({"rewards": rewards.score([rows[place] for place in places], texts)})
    child.close()
    return said


def held_out(folder: Path, rewards: Rewards, samples: int) -> dict[str, float]:
    """Mean reward of `samples` answers to each held-out prompt, of all and by kind; the standard error over prompts."""
    from exact_age import Sampler

    rows = read_lines(RUNS / "heldout.jsonl")
    sampler = Sampler(str(folder), max_new=MOST_TOKENS)
    prompts = [sampler.tokenizer.encode(row["prompt"], add_special_tokens=False) for row in rows]
    scores = []
    for draw in range(samples):
        texts = [
            sampler.tokenizer.decode(one.ids, skip_special_tokens=True) for one in sampler.draw(prompts, seed=draw)
        ]
        scores.append(rewards.score(rows, texts))
    means = [statistics.fmean(column) for column in zip(*scores, strict=True)]
    kinds = sorted({row["data_source"] for row in rows})
    by_kind = {
        kind: round(statistics.fmean(m for m, row in zip(means, rows, strict=True) if row["data_source"] == kind), 4)
        for kind in kinds
    }
    error = statistics.stdev(means) / len(means) ** 0.5
    return {"all": round(statistics.fmean(means), 4), "standard_error": round(error, 4), **by_kind}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help=f"of asyncrl; a multiple of {EVERY}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bound", type=int, default=2, help="of staleness")
    parser.add_argument("--start", type=Path, default=START, help="folder of the weights that both sides begin with")
    parser.add_argument("--samples", type=int, default=4, help="for each held-out prompt")
    parser.add_argument("--figures", action="store_true", help="train nothing: evaluate what was kept")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    parser.add_argument("--trl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl:
        train_with_trl()
        return
    args.start = args.start.resolve()
    if not (args.start / "config.json").exists():
        parser.error(f"no model in {args.start}: docs/recipes.md says how to make it")
    from asyncrl.config import load

    folder = RUNS / f"beside-trl-seed{args.seed}"
    kept_file = folder / "kept.json"
    rewards = Rewards(config := load(RECIPE))
    if not args.figures:
        shutil.rmtree(folder, ignore_errors=True)
        ours = run_ours(args, folder / "asyncrl")
        said = run_trl(args, config, rewards, folder / "trl", ours[-1]["seconds"])
        kept_file.write_text(json.dumps({"asyncrl": ours, "trl": said["kept"], "trl_version": said["version"]}))
    sides = json.loads(kept_file.read_text())
    trl_version = sides.pop("trl_version")
    look = functools.partial(held_out, rewards=rewards, samples=args.samples)
    figures = {
        side: [
            {**{name: one[name] for name in ("version", "seconds", "tokens")}, "held_out": look(Path(one["folder"]))}
            for one in kept
        ]
        for side, kept in sides.items()
    }
    start = look(args.start)
    rewards.close()
    for side, found in figures.items():
        for one in found:
            print(f"{side}: version {one['version']}, {one['seconds']} s, {one['tokens']} tokens: {one['held_out']}")
    write_report(args.seed, start, figures, trl_version)


def write_report(seed: int, start: dict[str, float], figures: dict[str, Any], trl_version: str) -> None:
    """`figures`: by side, its kept versions in order."""
    import reports

    reports.write(
        RESULTS / f"reasoning_trl-seed-{seed}.json",
        "held-out reward of the recipe by asyncrl and by TRL, from the same checkpoint, in the same time",
        trl_version=trl_version,
        start=start,
        **figures,
    )


if __name__ == "__main__":
    main()
