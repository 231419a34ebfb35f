"""A whole training step without a model: `learners.step.resilient_step` over a table of logits, on ranks that are
threads.

Used by `test_step_invariance`. The policy is a bigram table plus a table of positions, so that a wrong row, a wrong
position or a token of the neighbouring sequence changes the result; the critic is two tables of numbers. Both compute
in the dtype that is asked for, so that two cuts of one batch can be compared far below float32's rounding.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from made_batches import a_batch, a_group, a_sample
from torch import Tensor

from asyncrl.config import Config, parse
from asyncrl.config.sections.algorithm_catalogue import ADVANTAGES
from asyncrl.wire.batch_arrays import ClaimedBatch
from learners.algorithms.registry import option_table
from learners.backends.base import Micro, UpdateInfo, Values, to_device
from learners.gang.gang import Gang
from learners.models.logprobs import TokenNumbers
from learners.step.resilient_step import StepRunner

VOCABULARY, PLACES = 12, 32
STEPS = 2
WAIT_S = 60.0


# ---------------------------------------------------------------- a batch


def lab_batch(
    step: int, *, groups: int = 6, size: int = 4, greedy: bool = False, seed: int = 0, rows: bool = False
) -> ClaimedBatch:
    """Samples of 1 to 9 tokens with holes in the mask, of two versions, two parts of the reward, some cut short.

    Every fifth response has no trained token. `greedy`: sample `size` of each group is its baseline. `rows`: a response
    begins another row, after a prompt of one token, at every third token.
    """
    rng = np.random.default_rng((seed, step))
    made = []
    for number in range(groups):
        samples = []
        for index in range(size + greedy):
            length = int(rng.integers(1, 10))
            mask = (rng.random(length) < (0.0 if rng.random() < 0.2 else 0.8)).astype(np.uint8)
            starts = range(3, length - 1, 3) if rows else ()
            mask[list(starts)] = 0
            parts = {"exact": float(rng.integers(0, 3)) / 2, "form": float(rng.random())}
            old = int(rng.integers(0, length + 1))
            samples.append(
                a_sample(
                    index,
                    rng.integers(0, VOCABULARY, length),
                    -2.5 + rng.normal(size=length).astype(np.float32) / 2,
                    sum(parts.values()),
                    mask=mask,
                    parts=parts,
                    rows=tuple((start, 1) for start in starts),
                    runs=tuple((version, n) for version, n in ((step + 1, old), (step + 3, length - old)) if n),
                    finish="length" if rng.random() < 0.3 else "stop",
                )
            )
        made.append(a_group(10 * step + number, rng.integers(0, VOCABULARY, int(rng.integers(1, 6))), samples))
    return a_batch(step, step + 3, made)


def shuffled(batch: ClaimedBatch, *, seed: int, parts: int = 1) -> ClaimedBatch:
    """The rows of every group, and the groups of each of `parts` slices (the mini-batches), in another order."""
    rng = np.random.default_rng(seed)
    groups = []
    marks = [len(batch.groups) * part // parts for part in range(parts + 1)]
    for low, high in itertools.pairwise(marks):
        for number in (low + rng.permutation(high - low)).tolist():
            samples = batch.groups[number].samples
            order = rng.permutation(len(samples)).tolist()
            groups.append(msgspec.structs.replace(batch.groups[number], samples=tuple(samples[n] for n in order)))
    return msgspec.structs.replace(batch, groups=tuple(groups))


# ---------------------------------------------------------------- ranks


class Table:
    """Where the ranks of one gang meet: everything that one of them says is seen by all."""

    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self.door = threading.Barrier(size, timeout=WAIT_S)


class ThreadGang(Gang):
    """`learners.gang.gang.Gang` over threads of this process."""

    def __init__(self, rank: int, size: int, table: Table) -> None:
        super().__init__(rank, size, None)  # type: ignore[arg-type]
        self._table = table

    def meet(self, word: Any) -> list[Any]:
        """What every rank says, by rank."""
        self._table.said[self.rank] = word
        self._table.door.wait(WAIT_S)
        found = list(self._table.said)
        self._table.door.wait(WAIT_S)
        return found

    def barrier(self) -> None:
        self.meet(None)

    def share(self, data: bytes | None) -> bytes:
        return self.meet(data)[0] or b""

    def scatter(self, shares: Sequence[bytes] | None) -> bytes:
        found: bytes = self.meet(shares)[0][self.rank]
        return found

    def gather(self, data: bytes) -> list[bytes]:
        return self.meet(data)

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        every = self.meet(dict(sums))
        assert len({tuple(sorted(one)) for one in every}) == 1, "the ranks pass different names"
        return {name: (max if name.endswith("_max") else sum)(one[name] for one in every) for name in sums}


# ---------------------------------------------------------------- a policy and a critic


class Tables:
    """Parameters as leaves; forward, backward and plain gradient descent, summed over the ranks."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], *, gang: ThreadGang, dtype: torch.dtype, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.leaves = [
            torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
        ]
        self.seen: list[list[Tensor]] = []  # the gradients of every update
        self._gang = gang

    def train(self, micro: Sequence[Any], forward: Any, loss: Any) -> dict[str, float]:
        sums: dict[str, float] = {}
        for number, piece in enumerate(micro):
            first, second, made = forward(piece)
            value, more = loss(first, second, made, number)
            value.backward()
            for name, part in {"loss": value.detach(), **more}.items():
                before = sums.get(name, 0.0)
                sums[name] = max(before, float(part)) if name.endswith("_max") else before + float(part)
        return sums

    def gradients(self) -> list[Tensor]:
        every = self._gang.meet([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves])
        return [sum(of[place] for of in every[1:]) + every[0][place] for place in range(len(self.leaves))]

    def apply(self, lr: float) -> None:
        found = self.gradients()
        self.seen.append(found)
        with torch.no_grad():
            for leaf, gradient in zip(self.leaves, found, strict=True):
                leaf.sub_(lr * gradient)
        self.forget()

    def forget(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def norm(self) -> float:
        return float(torch.stack([gradient.norm() for gradient in self.gradients()]).norm())


class LabCritic(Tables):
    """Values `V[token before] + Q[its position]`."""

    def _of(self, t: Micro, places: Tensor) -> Tensor:
        return self.leaves[0][t.input_ids.flatten()[places]] + self.leaves[1][t.position_ids.flatten()[places]]

    @torch.no_grad()
    def values(self, micro: Sequence[Any]) -> list[Values]:
        found = []
        for piece in micro:
            t = to_device(piece, torch.device("cpu"))
            ends = t.positions.new_zeros(t.scales.numel()).scatter_reduce(0, t.sequences, t.positions + 1, "amax")
            found.append(Values(self._of(t, t.positions), self._of(t, ends)))
        return found

    def train(self, micro: Sequence[Any], loss: Any) -> dict[str, float]:  # type: ignore[override]
        def forward(piece: Any) -> tuple[Tensor, Tensor, Micro]:
            t = to_device(piece, torch.device("cpu"))
            values = self._of(t, t.positions)
            return values, torch.zeros_like(values), t

        return super().train(micro, forward, loss)

    def clip(self, max_norm: float) -> float:
        return self.norm()

    def discard(self) -> None:
        self.forget()


class LabBackend(Tables):
    """Logits `W[token before] + P[its position]`; the frozen reference has tables of its own."""

    def __init__(self, gang: ThreadGang, *, dtype: torch.dtype, critic: bool) -> None:
        shapes = [(VOCABULARY, VOCABULARY), (PLACES, VOCABULARY)]
        super().__init__(shapes, gang=gang, dtype=dtype, seed=1)
        self._frozen = Tables(shapes, gang=gang, dtype=dtype, seed=2).leaves
        self.process_reward = None
        self.critic = LabCritic([(VOCABULARY,), (PLACES,)], gang=gang, dtype=dtype, seed=3) if critic else None

    def _logs(self, piece: Any, leaves: Sequence[Tensor]) -> tuple[Tensor, Micro]:
        """Log-probs of the whole vocabulary, `[N, V]`."""
        t = to_device(piece, torch.device("cpu"))
        table, places = leaves
        before, at = t.input_ids.flatten()[t.positions], t.position_ids.flatten()[t.positions]
        return (table[before] + places[at]).log_softmax(-1), t

    def _forward(self, piece: Any, leaves: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Micro]:
        logs, t = self._logs(piece, leaves or self.leaves)
        return logs.gather(-1, t.targets[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1), t

    @torch.no_grad()
    def forward_logprobs(self, micro: Sequence[Any]) -> list[Tensor]:
        return [self._forward(piece)[0] for piece in micro]

    @torch.no_grad()
    def forward_numbers(self, micro: Sequence[Any], *, squares: bool = False) -> list[TokenNumbers]:
        found = []
        for piece in micro:
            logs, t = self._logs(piece, self.leaves)
            of_targets = logs.gather(-1, t.targets[:, None]).squeeze(-1)
            sums = logs.exp().square().sum(-1) if squares else None
            found.append(TokenNumbers(of_targets, -(logs.exp() * logs).sum(-1), sums))
        return found

    @torch.no_grad()
    def reference_logprobs(self, micro: Sequence[Any]) -> list[Tensor]:
        return [self._forward(piece, self._frozen)[0] for piece in micro]

    def train(self, micro: Sequence[Any], loss: Any) -> dict[str, float]:  # type: ignore[override]
        return super().train(micro, self._forward, loss)

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        norm = self.norm()
        if not np.isfinite(norm):
            self.forget()
            return UpdateInfo(norm, True)
        self.apply(lr)
        return UpdateInfo(norm, False)

    def discard(self) -> float:
        norm = self.norm()
        self.forget()
        return norm


# ---------------------------------------------------------------- a step


class Ended(NamedTuple):
    """Of every step: metrics and importance weights by (group, index); of every update: gradients; the end."""

    metrics: list[dict[str, float]]
    weights: list[dict[tuple[int, int], float]]
    gradients: list[Tensor]
    parameters: list[Tensor]


@functools.cache  # parsing looks at the entry points of every installed package
def lab_config(*overrides: str, on_rows: bool = False) -> Config:
    """Two mini-batches, so that the policy of the second is not the proximal one, at a rate that moves it far.
    `on_rows`: for the modes that train answers as they are."""
    source = 'producers.engine = "dataset"' if on_rows else '[[reward]]\nfunction = "a:b"'
    return parse(
        f"""
model.path = "m"
data.path = "d"
data.max_prompt_tokens = 6
sampling.group_size = {2 if on_rows else 4}
sampling.max_new_tokens = 10
learner.optim.lr = 0.5
learner.critic.lr = 0.1
learner.algorithm.minibatches = 2
{source}
""",
        overrides=overrides,
    )


def run_steps(
    config: Config, batches: Sequence[ClaimedBatch], *, ranks: int = 1, dtype: torch.dtype = torch.float64
) -> Ended:
    """The steps of these batches, on so many ranks; every rank must come to the same parameters."""
    table, found, errors = Table(ranks), [None] * ranks, list[BaseException]()

    def work(rank: int) -> None:
        try:
            found[rank] = _rank(config, batches, ThreadGang(rank, ranks, table), dtype)  # type: ignore[call-overload]
        except BaseException as error:
            errors.append(error)
            table.door.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    ended: Any = found
    for other in ended[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ended[0].parameters, other.parameters, strict=True))
    result: Ended = ended[0]
    return result


def _rank(config: Config, batches: Sequence[ClaimedBatch], gang: ThreadGang, dtype: torch.dtype) -> Ended:
    algorithm = config.learner.algorithm
    known = ADVANTAGES.get(algorithm.advantage)
    backend = LabBackend(gang, dtype=dtype, critic=known is not None and "critic" in known.needs)
    group_size = config.sampling.group_size if config.sampling.greedy_baseline else 0
    buried: list[str] = []
    trial = StepRunner(
        config.learner,
        gang=gang,
        backend=backend,
        say=str,
        group_size=group_size,
        quarantine=lambda step, group, why: buried.append(why),
    )  # type: ignore[arg-type]
    metrics, weights = [], []
    for given in batches:
        batch: Any = given
        if gang.lead:
            batch, shares = trial.cut(batch)
        result, _ = trial.train(
            gang.scatter(shares if gang.lead else None), step=given.step, batch=batch if gang.lead else None
        )
        assert not result.broken and not result.skipped and not buried, (result.broken, buried)
        metrics.append(dict(result.metrics))
        names = [(g.group, s.index) for g in given.groups for s in g.samples if not group_size or s.index < group_size]
        if gang.lead:
            weights.append({names[place]: weight for place, weight in trial._sample_weights(result).items()})
    tables: list[Tables] = [backend, *([backend.critic] if backend.critic else [])]
    gradients = [gradient for one in tables for update in one.seen for gradient in update]
    return Ended(metrics, weights, gradients, [leaf.detach() for one in tables for leaf in one.leaves])


# ---------------------------------------------------------------- the registry


def required_options(kind: str, name: str) -> dict[str, Any]:
    """A value for every option of a registered function that has no default."""
    values = {"float": 0.7, "int": 2, "bool": True, "str": "a", "list": []}
    table = _options()[kind][name]
    return {
        key: known["types"][0][0] if isinstance(known["types"][0], list) else values[known["types"][0]]
        for key, known in table.items()
        if known["default"] == "required"
    }


@functools.cache
def _options() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    return option_table()
