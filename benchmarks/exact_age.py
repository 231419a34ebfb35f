"""One run of the learner on samples of an exact age, without processes or clocks: equal seeds give equal prompts, equal
random numbers, and with equal settings the same bits, however loaded the machine is.

At step s every sample of the batch is drawn from the weights of version max(0, s - 1 - age), `age` steps before those
that it trains: the oldest data that `buffer.max_staleness = age` admits, at every step. A run through the buffer has at
most that, and usually less. The step is the learner's own (`learners.step.resilient_step` on the FSDP2 backend), with
the settings of configs/quickstart.toml and overrides. Held-out figures are those of fixed weights: one sample at
temperature 1 for each of `HELD_OUT` prompts that are never trained, with random numbers that depend on the seed alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from asyncrl import config as configuration  # noqa: E402, RUF100
from asyncrl.demo import tasks  # noqa: E402, RUF100
from asyncrl.demo.demo import task_settings  # noqa: E402, RUF100
from asyncrl.wire.batch_arrays import ClaimedBatch, GroupData, SampleData  # noqa: E402, RUF100
from buffers.groups.failure_budget import load_filters  # noqa: E402, RUF100

HELD_OUT = 1024
SEED_STRIDE = 1_000_003  # between the random numbers of two seeds
AVERAGES = (0.7, 0.8, 0.9)  # decay by step of averages of the weights, from the start weights on
SEEDS_A_STEP = 20  # of random numbers; an attempt beyond them has those of a step 1,000 later, which no run reaches
MOST_ATTEMPTS = 100  # to fill a batch with groups that the filters keep


class Drawn(NamedTuple):
    """A sampled response: ids with the end-of-sequence token, and the log-prob of each."""

    ids: list[int]
    logprobs: list[float]


class Sampler:
    """Batched sampling at temperature 1 with a transformers cache; rows that ended leave the batch."""

    def __init__(self, folder: str, *, max_new: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.max_new = max_new

    def take(self, weights: dict[str, Tensor]) -> None:
        """Sample from these weights from now on."""
        self.model.load_state_dict(weights, strict=False)

    @torch.no_grad()
    def draw(self, prompts: list[list[int]], *, seed: int | None) -> list[Drawn]:
        """One response for every prompt, in order; the most likely tokens without a seed."""
        from transformers import DynamicCache

        generator = torch.Generator().manual_seed(seed or 0)
        width, end = max(map(len, prompts)), self.tokenizer.eos_token_id
        ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        found = [Drawn([], []) for _ in prompts]
        rows, cache, feed = list(range(len(prompts))), DynamicCache(), ids
        position = (seen.cumsum(1) - 1).clamp(min=0)
        for _ in range(self.max_new):
            out = self.model(feed, attention_mask=seen, position_ids=position, past_key_values=cache, use_cache=True)
            logprobs = out.logits[:, -1].float().log_softmax(-1)
            if seed is None:
                chosen = logprobs.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
            taken = logprobs.gather(1, chosen)[:, 0].tolist()
            for row, token, logprob in zip(rows, chosen[:, 0].tolist(), taken, strict=True):
                found[row].ids.append(token)
                found[row].logprobs.append(logprob)
            alive = (chosen[:, 0] != end).nonzero()[:, 0]
            if not len(alive):
                break
            position = position[:, -1:] + 1
            if len(alive) < len(rows):
                cache.batch_select_indices(alive)
                rows = [rows[place] for place in alive.tolist()]
                chosen, seen, position = chosen[alive], seen[alive], position[alive]
            feed, seen = chosen, torch.cat([seen, seen.new_ones(len(rows), 1)], 1)
        return found


class Task:
    """Prompts and rewards of one of the demo's tasks."""

    def __init__(self, name: str, tokenizer: Any, *, seed: int) -> None:
        self.name, self.tokenizer, self.seed = name, tokenizer, seed
        self.reward = getattr(tasks, f"{name}_reward")

    def rows(self, first: int, count: int) -> list[dict[str, Any]]:
        """Training rows `first` and on."""
        made = [tasks.operands(self.name, seed=self.seed, index=index) for index in range(first, first + count)]
        return [self._row(values) for values in made]

    def held_out(self) -> list[dict[str, Any]]:
        """The same rows for every seed."""
        made = [tasks.operands(self.name, seed=0, index=index, split="heldout") for index in range(HELD_OUT)]
        return [self._row(values) for values in made]

    def _row(self, values: Any) -> dict[str, Any]:
        text = tasks.prompt_text(self.name, values)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return {"ids": ids, "truth": tasks.ground_truth(self.name, values)}

    def score(self, row: dict[str, Any], drawn: Drawn) -> float:
        """The reward of a response."""
        return float(self.reward(self.name, self.tokenizer.decode(drawn.ids, skip_special_tokens=True), row["truth"]))


class Trainer:
    """The learner's step on one process, and the weights that it leaves."""

    def __init__(self, config: configuration.Config) -> None:
        from learners.backends.fsdp2.backend import FSDP2Backend
        from learners.gang.gang import Gang
        from learners.step.resilient_step import StepRunner

        self.gang = gang = Gang.join(config)
        self.backend = FSDP2Backend(config, gang)
        self.runner = StepRunner(
            config.learner,
            gang=gang,
            backend=self.backend,
            say=str,
            quarantine=_no_quarantine,
            seed=config.run.seed,
            group_size=config.sampling.group_size if config.sampling.greedy_baseline else 0,
        )

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights by Hugging Face name."""
        shapes = {spec.name: spec.shape for spec in self.backend.weight_specs()}
        return {
            name: torch.from_numpy(np.array(raw)).view(torch.float32).reshape(shapes[name])
            for name, raw in self.backend.iter_hf_weights()
        }

    def train(self, batch: ClaimedBatch) -> dict[str, float]:
        """One step; its metrics."""
        batch, shares = self.runner.cut(batch)
        result, _ = self.runner.train(shares[0], step=batch.step, batch=batch)
        return {**self.runner.stats, **result.metrics}


def _no_quarantine(step: int, group: int, reason: str) -> None:
    raise AssertionError(f"step {step}, group {group}: {reason}")


def load(task: str, overrides: list[str], *, seed: int, steps: int) -> configuration.Config:
    """configs/quickstart.toml for the task, with the overrides."""
    base = [f"run.dir={tempfile.gettempdir()}/exact-age-{os.getpid()}", f"run.seed={seed}", f"learner.steps={steps}"]
    more = ["learner.micro_batch_tokens=4096", "evaluation.every=0"]
    return configuration.load(ROOT / "configs" / "quickstart.toml", [*task_settings(task), *base, *more, *overrides])


def held_out_reward(folder: str, task: str, seed: int) -> float:
    """Mean reward of the held-out prompts on exported weights."""
    torch.set_num_threads(1)
    sampler = Sampler(folder, max_new=load(task, [], seed=seed, steps=1).sampling.max_new_tokens)
    return round(_look(sampler, Task(task, sampler.tokenizer, seed=seed), seed), 4)


def _look(sampler: Sampler, source: Task, seed: int) -> float:
    rows = source.held_out()
    drawn = sampler.draw([row["ids"] for row in rows], seed=SEED_STRIDE * (seed + 1))
    return float(np.mean([source.score(row, one) for row, one in zip(rows, drawn, strict=True)]))


class Prompts:
    """Batches of groups of an exact age, by the filters and the greedy baseline of the configuration."""

    def __init__(self, config: configuration.Config, sampler: Sampler, source: Task, *, age: int) -> None:
        self.config, self.sampler, self.source, self.age = config, sampler, source, age
        self.filters = load_filters(config.buffer.filters)
        self.next = 0  # row
        self.drawn = 0  # tokens, those of rejected groups too

    def batch(self, step: int) -> ClaimedBatch:
        """The batch of a step from the sampler's weights. Raises RuntimeError if filters reject nearly everything."""
        wanted, groups = self.config.buffer.batch_groups, list[GroupData]()
        for attempt in range(MOST_ATTEMPTS):
            more, place = divmod(attempt, SEEDS_A_STEP)
            seed = SEED_STRIDE * (self.source.seed + 1) + (step + 1000 * more) * SEEDS_A_STEP + place
            groups += [group for group in self._groups(step, wanted - len(groups), seed) if not self._rejected(group)]
            if len(groups) == wanted:
                return ClaimedBatch(step, step - 1, False, tuple(groups), {})
        raise RuntimeError(f"step {step}: {len(groups)} of {wanted} groups after {MOST_ATTEMPTS} attempts")

    def _rejected(self, group: GroupData) -> bool:
        judged = group.samples[: self.config.sampling.group_size]
        given = {"rewards": [one.reward for one in judged], "lengths": [one.response.size for one in judged]}
        return any(function(**given, parts=[], group=group.group) for _name, function in self.filters)

    def _groups(self, step: int, count: int, seed: int) -> list[GroupData]:
        rows, self.next = self.source.rows(self.next, count), self.next + count
        size = self.config.sampling.group_size
        drawn = self.sampler.draw([row["ids"] for row in rows for _ in range(size)], seed=seed)
        greedy = (
            self.sampler.draw([row["ids"] for row in rows], seed=None) if self.config.sampling.greedy_baseline else []
        )
        self.drawn += sum(len(one.ids) for one in [*drawn, *greedy])
        version, groups = max(0, step - 1 - self.age), []
        for place, row in enumerate(rows):
            mine = [*drawn[place * size : (place + 1) * size], *greedy[place : place + 1]]
            samples = [_sample(index, one, self.source.score(row, one), version) for index, one in enumerate(mine)]
            prompt, number = np.array(row["ids"], np.int32), self.next - count + place
            groups.append(GroupData(number, self.age, {}, prompt, tuple(samples), {}))
        return groups


def measure(
    task: str,
    overrides: list[str],
    *,
    age: int,
    seed: int,
    steps: int = 40,
    look_every: int = 20,
    decays: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Train `steps` steps on samples of this age: held-out reward of versions 0, look_every, ..., and of averages of
    the weights at the end, with these decays; by step, the mean reward of the batch and all sampled tokens; some
    metrics of every tenth of the run."""
    began = time.monotonic()
    torch.set_num_threads(1)
    config = load(task, overrides, seed=seed, steps=steps)
    trainer = Trainer(config)
    sampler = Sampler(config.model.path, max_new=config.sampling.max_new_tokens)
    source = Task(task, sampler.tokenizer, seed=seed)
    prompts = Prompts(config, sampler, source, age=age)
    history = deque([trainer.weights()], maxlen=age + 1)
    rewards, tokens, looks, log = [], [], {0: _look(sampler, source, seed)}, []
    averages = {decay: {name: value.clone() for name, value in history[0].items()} for decay in decays}
    for step in range(1, steps + 1):
        sampler.take(history[0])
        before = prompts.drawn
        batch = prompts.batch(step)
        metrics = trainer.train(batch)
        history.append(trainer.weights())
        for decay, mean in averages.items():
            for name, value in history[-1].items():
                mean[name].lerp_(value, 1 - decay)
        rewards.append(round(float(np.mean([one.reward for group in batch.groups for one in group.samples])), 4))
        tokens.append(prompts.drawn - before)
        log.append({name: round(metrics[name], 5) for name in LOGGED if name in metrics})
        if step % look_every == 0:
            sampler.take(history[-1])
            looks[step] = _look(sampler, source, seed)
    averaged = {}
    for decay, mean in averages.items():
        sampler.take(mean)
        averaged[str(decay)] = round(_look(sampler, source, seed), 4)
    trainer.gang.leave()
    return {
        "overrides": overrides,
        "held_out": {str(version): round(value, 4) for version, value in looks.items()},
        **({"averaged": averaged} if averaged else {}),
        "rewards": rewards,
        "tokens": tokens,
        "log": log[:: max(1, steps // 10)],
        "seconds": round(time.monotonic() - began, 1),
    }


LOGGED = ("grad_norm", "entropy", "clip_share", "gated_share", "tis_capped_share", "rejected_share", "ess", "lr")


def _sample(index: int, drawn: Drawn, reward: float, version: int) -> SampleData:
    ids = np.array(drawn.ids, np.int32)
    logprobs = np.array(drawn.logprobs, np.float32)
    return SampleData(index, ids, logprobs, None, ((version, ids.size),), "stop", reward, {}, {})
