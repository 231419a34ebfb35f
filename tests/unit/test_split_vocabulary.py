"""Log-probs from a vocabulary whose rows lie on several ranks: those of the whole head, with gradients, in threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from learners.models.logprobs import TokenNumbers, chunked_logprobs, split_logprobs, token_numbers
from learners.models.vocabulary import Vocabulary

ROWS, WIDTH, ASKED = 11, 6, 9


class Meeting:
    """Sums over threads in the place of ranks."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.held: list[torch.Tensor] = []
        self.lock = threading.Lock()

    def all_reduce(self, values: torch.Tensor, op: Any, group: Any = None) -> None:
        with self.lock:
            self.held.append(values.clone())
        self.barrier.wait()
        stack = torch.stack(self.held)
        values.copy_(stack.amax(0) if op == dist.ReduceOp.MAX else stack.sum(0))
        if self.barrier.wait() == 0:
            self.held = []
        self.barrier.wait()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ASKED, WIDTH).double(), 2 * torch.randn(ROWS, WIDTH).double()
    return hidden, weight, torch.tensor([0, 10, 5, 5, 4, 9, 3, 7, 1])


def outcome(give: Any, hidden: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs, entropies and both gradients."""
    hidden, rows = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
    logprobs, entropy = give(hidden, rows)
    ((logprobs * torch.linspace(-1, 1, ASKED)).sum() + 0.3 * entropy.square().sum()).backward()
    return [logprobs.detach(), entropy.detach(), hidden.grad, rows.grad]  # type: ignore[list-item]


def on_ranks(size: int, monkeypatch: pytest.MonkeyPatch, give: Any, *, weight: torch.Tensor | None = None) -> list[Any]:
    """`give(rows, split)` of every rank, each in a thread."""
    weight, each = inputs()[1] if weight is None else weight, -(-ROWS // size)
    monkeypatch.setattr(dist, "all_reduce", Meeting(size).all_reduce)
    found: dict[int, Any] = {}

    def rank(place: int) -> None:
        found[place] = give(weight[place * each : (place + 1) * each], Vocabulary(None, place * each))

    threads = [threading.Thread(target=rank, args=(place,), daemon=True) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[place] for place in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("temperature", "chunk", "cap"), [(1.0, 100, None), (0.7, 4, None), (0.7, 4, 1.5)])
def test_every_rank_has_the_numbers_of_the_whole_head(
    monkeypatch: pytest.MonkeyPatch, size: int, temperature: float, chunk: int, cap: float | None
) -> None:
    hidden, weight, targets = inputs()
    options: Any = {"temperature": temperature, "chunk_tokens": chunk, "cap": cap}
    wanted = outcome(lambda h, w: chunked_logprobs(h, w, targets, **options), hidden, weight)
    numbers = token_numbers(hidden, weight, targets, squares=True, **options)

    def both(rows: torch.Tensor, split: Vocabulary) -> Any:
        got = outcome(lambda h, w: split_logprobs(h, w, targets, split, **options), hidden, rows)
        return got, split_logprobs(hidden, rows, targets, split, squares=True, **options)

    found = on_ranks(size, monkeypatch, both)
    for (*alike, _), squares in found:
        for got, value in zip(alike, wanted[:3], strict=True):
            torch.testing.assert_close(got, value, atol=1e-12, rtol=1e-12)
        assert isinstance(squares, TokenNumbers)
        for got, value in zip(squares, numbers, strict=True):
            torch.testing.assert_close(got, value, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.cat([got[3] for got, _ in found]), wanted[3], atol=1e-12, rtol=1e-12)


def test_large_logits_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, _, targets = inputs()
    (left, right) = on_ranks(
        2, monkeypatch, lambda rows, split: split_logprobs(hidden.float(), 300 * rows.float(), targets, split)
    )
    wanted = chunked_logprobs(hidden.float(), 300 * inputs()[1].float(), targets)
    for one in (left, right):
        for got, value in zip(one, wanted, strict=True):
            assert bool(got.isfinite().all())
            torch.testing.assert_close(got, value, atol=1e-3, rtol=1e-4)
