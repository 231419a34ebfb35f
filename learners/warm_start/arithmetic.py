"""Warm starts for the arithmetic tasks of the demonstration (`asyncrl.demo.tasks`).

First the policy learns the procedure from a correct teacher, with short prompts first. Then a teacher with mistakes
softens the policy, so that reinforcement learning can improve it. Command line::

    python -m learners.warm_start.arithmetic --task running_sum --out DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from asyncrl.demo import tasks
from learners.warm_start.training import Recipe, Rows, Stage, build_on_one_core


def draw_add(stage: Stage, rng: random.Random) -> Rows:
    """One row of `add`."""
    return _row("add", stage, rng, terms=2)


def draw_running_sum(stage: Stage, rng: random.Random) -> Rows:
    """One row of `running_sum`."""
    if stage.terms is None:
        return _row("running_sum", stage, rng, terms=tasks.pareto_terms(rng))
    low, high = stage.terms
    terms = min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))
    return _row("running_sum", stage, rng, terms=terms)


def _row(task: str, stage: Stage, rng: random.Random, *, terms: int) -> Rows:
    first = rng.randint(0, tasks.MAX_TERMS - terms) if stage.any_letter else 0
    values = tasks.draw_operands(task, rng, terms=terms)
    answer = tasks.demonstration(task, values, noise=stage.noise, rng=rng, first=first)
    return [(tasks.prompt_text(task, values, first=first), answer)]


RECIPES: Mapping[str, Recipe] = {
    "add": Recipe(
        task="add",
        stages=(Stage(steps=250, lr=3e-3, noise=0.0), Stage(steps=60, lr=5e-4, noise=0.5, warmup=5)),
        draw=draw_add,
    ),
    "running_sum": Recipe(
        task="running_sum",
        stages=(
            Stage(steps=150, lr=3e-3, noise=0.0, tokens=1024, terms=(2, 4)),
            Stage(steps=180, lr=3e-3, noise=0.0, terms=(2, tasks.MAX_TERMS), any_letter=True, warmup=5),
            Stage(steps=60, lr=5e-4, noise=0.34, tokens=1536, warmup=5),
        ),
        draw=draw_running_sum,
    ),
}
"""Recipe of each task."""


def sampled_accuracy(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    task: str,
    size: int = 256,
    seed: int = 0,
    rows_per_batch: int = 64,
) -> float:
    """Return the share of held-out prompts answered right by one sample each at temperature 1.

    Prompts are grouped by length to save work. The caller's random state is left as it was.

    Args:
        model: a causal language model with `generate`; left in training mode.
        tokenizer: its tokenizer, padding on the left.
        task: `add` or `running_sum`.
        size: number of held-out prompts, positive.
        seed: seed of the prompts and of the samples.
        rows_per_batch: prompts decoded together.
    """
    reward = tasks.add_reward if task == "add" else tasks.running_sum_reward
    rows = sorted(tasks.prompt_rows(task, size, seed, split="heldout"), key=lambda row: len(row["prompt"]))
    total = 0.0
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, size, rows_per_batch):
            part = rows[start : start + rows_per_batch]
            inputs = tokenizer([row["prompt"] for row in part], return_tensors="pt", padding=True)
            made = model.generate(  # type: ignore[operator]
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=tasks.max_answer_tokens(task) + 1,
            )
            texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for row, text in zip(part, texts, strict=True):
                total += reward(row["data_source"], text, row["reward_model"]["ground_truth"])
    model.train()
    return total / size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m learners.warm_start.arithmetic", description="Build a warm start on one core."
    )
    parser.add_argument("--task", choices=sorted(RECIPES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", type=int, default=0, metavar="N", help="sample N held-out prompts at the end")
    options = parser.parse_args(arguments)
    build_on_one_core(RECIPES[options.task], options.out, seed=options.seed)
    if options.measure > 0:
        model = AutoModelForCausalLM.from_pretrained(str(options.out), local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(options.out), local_files_only=True)
        accuracy = sampled_accuracy(model, tokenizer, task=options.task, size=options.measure)
        print(f"{options.task}: sampled accuracy {accuracy:.3f} on {options.measure} held-out prompts", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
