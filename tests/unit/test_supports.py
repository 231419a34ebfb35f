"""Supports of draws: their form in payloads, what the buffer refuses, and log-probs over them in the learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from made_batches import a_batch, a_group, a_sample
from msgspec.structs import replace
from test_split_vocabulary import on_ranks
from torch import Tensor, nn

from asyncrl import wire
from asyncrl.config import SamplingConfig, parse
from asyncrl.config.capabilities import refuse_cuts
from asyncrl.config.rules import general
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.engine import GenDelta
from asyncrl.errors import ConfigError, WireError
from asyncrl.wire import Support, join_supports, pack_support, unpack_support
from asyncrl.wire import support as coding
from learners.backends.base import to_device
from learners.batch.assembly import assemble, unusable
from learners.batch.micro_batches import Minibatch, Sample, decode_share, encode_share, packed_row
from learners.models.logprobs import chunked_logprobs, split_logprobs, token_numbers
from learners.models.support import Supports
from producers.rollout import rollout

CPU = torch.device("cpu")
TOML = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[reward]]\nfunction = "r:f"\n'


def support(*ids: tuple[int, ...]) -> Support:
    counts = np.array([len(one) for one in ids], np.int32)
    return Support(counts, np.array([token for one in ids for token in one], np.int32))


def same(one: Support | None, other: Support | None) -> bool:
    return one is not None and other is not None and all(map(np.array_equal, one, other))


# ---------------------------------------------------------------- in payloads


def test_a_support_has_the_bytes_that_the_module_shows() -> None:
    packed = pack_support(support((3, 4, 300), (), (7,)))
    assert [packed[name].tobytes().hex() for name in coding.NAMES] == ["030001", "0300a702"]
    found = unpack_support({"response": np.array([4, 9, 7], np.int32), **packed})
    assert same(found, support((3, 4, 300), (), (7,)))


def test_any_support_comes_back_whole_and_in_parts() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        vocabulary = int(rng.choice([8, 200, 152_000, 1 << 31]))
        tokens = int(rng.integers(1, 12))
        ids = [tuple(sorted(rng.choice(vocabulary, rng.integers(0, 6), replace=False).tolist())) for _ in range(tokens)]
        given = support(*ids)
        response = np.array([one[0] if one else 0 for one in ids], np.int32)
        assert same(unpack_support({"response": response, **pack_support(given)}), given)
        start, stop = sorted(rng.integers(0, tokens + 1, 2).tolist())
        parts = [(given.cut(a, b), b - a) for a, b in ((0, start), (start, stop), (stop, tokens))]
        assert same(join_supports(parts), given)
    assert unpack_support({}) is None and join_supports([(None, 3)]) is None
    assert same(join_supports([(None, 2), (support((5,)), 1)]), support((), (), (5,)))


BYTES = {
    "a number without an end": ([2], [1, 0x83]),
    "a number of six bytes": ([2], [0] + [0x80] * 5 + [1]),
    "an id above 31 bits": ([2], [0] + [0xFF] * 4 + [0x7F]),
    "more ids than counted": ([2], [1, 1, 1]),
    "the only id": ([1], [5]),
    "fewer ids than counted": ([3], [1]),
    "a count of billions": ([0xFF, 0xFF, 0xFF, 0xFF, 0x7F], [1]),
}


@pytest.mark.parametrize("name", BYTES)
def test_damaged_bytes_are_refused(name: str) -> None:
    counts, ids = (np.array(part, np.uint8) for part in BYTES[name])
    tokens = np.array([5], np.int32)
    with pytest.raises(WireError, match="support: "):
        unpack_support({"response": tokens, **dict(zip(coding.NAMES, (counts, ids), strict=True))})
    with pytest.raises(WireError):
        unpack_support({"response": tokens, coding.NAMES[0]: counts})
    good = pack_support(support((1, 5)))
    for response in ({}, {"response": np.zeros(2, np.int32)}):
        with pytest.raises(WireError, match="1 counts for"):
            unpack_support({**response, **good})


def test_the_number_of_ids_is_limited_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "MOST_IDS", 5)
    with pytest.raises(WireError, match="6 ids in one message, 5 are allowed"):
        unpack_support({"response": np.zeros(2, np.int32), **pack_support(support((1, 2, 3), (4, 5, 6)))})


LIMITS = wire.SampleLimits(prompt_tokens=9, sequence_tokens=9, sequences=1, reward=1.0, scores=False, support=True)


def verdict(held: Support | None, *, limits: wire.SampleLimits = LIMITS, mask: Any = None) -> str:
    """What the buffer says about two samples with the tokens 5 6 7 and 8."""
    arrays: dict[str, Any] = {
        "prompt": np.array([3], np.int32),
        "response": np.array([5, 6, 7, 8], np.int32),
        "logprobs": np.full(4, -0.5, np.float32),
    }
    arrays |= {} if mask is None else {"mask": np.array(mask, np.uint8)}
    fields, payload = wire.pack_arrays(arrays | ({} if held is None else pack_support(held)))
    heads = (wire.SampleHead(0, 3, "stop", ((4, 3),)), wire.SampleHead(1, 1, "stop", ((4, 1),)))
    message = wire.Samples("p", 1, 1, heads, {4: "d"}, fields, "{}", 1)
    return wire.validate_samples(message, payload, group_size=4, vocab_size=10, limits=limits)


def test_a_sample_whose_support_cannot_be_is_poison() -> None:
    good = support((5, 9), (), (2, 7), (8,))
    assert verdict(good) == ""
    assert verdict(None) == "support: it is missing"
    assert "no draw of this run is cut" in verdict(good, limits=LIMITS.__class__(9, 9, 1, 1.0, False))
    assert "token 2 is not among the ids" in verdict(support((5, 9), (), (2, 6), (8,)))
    assert "id 10 outside 0..9" in verdict(support((5, 10), (), (7,), (8,)))
    assert "3 counts for 4 tokens" in verdict(support((5,), (), (7,)))
    assert verdict(support((1,), (), (7,), (8,))) == ""  # a single id is not sent: it is the token
    assert "not sampled" in verdict(good, mask=[1, 1, 0, 1])
    assert verdict(good, mask=[1, 0, 1, 1]) == ""


def test_claimed_samples_have_their_own_part() -> None:
    given = support((5, 9), (), (2, 7), (8,))
    arrays = {"prompt": np.array([3], np.int32), "response": np.array([5, 6, 7, 8], np.int32)}
    fields, payload = wire.pack_arrays(arrays | {"logprobs": np.zeros(4, np.float32)} | pack_support(given))
    heads = (wire.SampleHead(0, 3, "stop", ((4, 3),)), wire.SampleHead(1, 1, "stop", ((4, 1),)))
    record = wire.encode_header(wire.Samples("p", 1, 1, heads, {4: "d"}, fields, "{}", 1))
    from asyncrl.wire.batch_arrays import group_data

    group = wire.GroupHead(1, 4, "{}", (record,), {0: 0.0, 1: 1.0}, {})
    first, second = group_data(group, [payload]).samples
    assert same(first.support, given.cut(0, 3)) and same(second.support, support((8,)))


# ---------------------------------------------------------------- log-probs over a support

IDS: list[tuple[int, ...]] = [(0, 3), (), (2,), tuple(range(11)), (1, 5, 9), (4, 7), (), (0, 10), (6, 7, 8)]
TARGETS = torch.tensor([3, 4, 2, 10, 5, 7, 1, 0, 8])
UP = torch.linspace(-1, 1, len(IDS)).double()


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(len(IDS), 6).double(), 2 * torch.randn(11, 6).double()


def on_device(*ids: tuple[int, ...]) -> Supports | None:
    return Supports.from_arrays(*support(*ids), CPU)


def dense(
    hidden: Tensor, weight: Tensor, temperature: float, cap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropies and sums of squares from masked logits."""
    logits = nn.functional.linear(hidden, weight)
    logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
    kept = torch.ones_like(logits, dtype=torch.bool)
    for row, ids in enumerate(IDS):
        if ids:
            kept[row] = False
            kept[row, list(ids)] = True
    logs, full = logits.masked_fill(~kept, -torch.inf).log_softmax(-1), logits.log_softmax(-1)
    return logs.gather(-1, TARGETS[:, None])[:, 0], -(full.exp() * full).sum(-1), logs.exp().square().sum(-1)


def outcome(give: Any, *leaves: Tensor, entropy: bool) -> list[Tensor]:
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    logprobs, entropies = give(*leaves)[:2]
    loss = (logprobs * UP).sum() + (0.3 * entropies.square().sum() if entropy else 0.0)
    return [logprobs.detach(), entropies.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(
    ("temperature", "chunk", "cap"), [(1.0, 100, None), (0.7, 4, None), (0.7, 2, None), (0.7, 2, 1.5), (1.0, 100, 1.5)]
)
def test_values_and_gradients_are_those_of_masked_logits(
    temperature: float, chunk: int, cap: float | None, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from learners.models import logprobs as module

    monkeypatch.setattr(module, "KEPT_BYTES", 0 if chunk == 2 else 1 << 20)
    options: Any = {"temperature": temperature, "chunk_tokens": chunk, "support": on_device(*IDS), "cap": cap}
    wanted = outcome(lambda h, w: dense(h, w, temperature, cap), *inputs(), entropy=entropy)
    got = outcome(lambda h, w: chunked_logprobs(h, w, TARGETS, **options), *inputs(), entropy=entropy)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    numbers = token_numbers(*inputs(), TARGETS, squares=True, **options)
    torch.testing.assert_close(numbers.square_sums, dense(*inputs(), temperature, cap)[2], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("chunk", "cap"), [(100, None), (4, None), (4, 1.5)])
def test_ranks_that_share_the_vocabulary_agree(
    size: int, chunk: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight = inputs()
    options: Any = {"temperature": 0.7, "chunk_tokens": chunk, "support": on_device(*IDS), "cap": cap}
    wanted = outcome(lambda h, w: dense(h, w, 0.7, cap), hidden, weight, entropy=True)

    def both(rows: Tensor, split: Any) -> Any:
        got = outcome(lambda h, w: split_logprobs(h, w, TARGETS, split, **options), hidden, rows, entropy=True)
        return got, split_logprobs(hidden, rows, TARGETS, split, squares=True, **options)

    found = on_ranks(size, monkeypatch, both, weight=weight)
    for (logprobs, entropy, grad, _), numbers in found:
        for one, other in zip((logprobs, entropy, grad), wanted[:3], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(numbers.square_sums, dense(hidden, weight, 0.7, cap)[2], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([got[3] for got, _ in found]), wanted[3], rtol=1e-10, atol=1e-12)


def test_targets_without_a_support_keep_their_bits() -> None:
    hidden, weight = (tensor.float() for tensor in inputs())
    plain = chunked_logprobs(hidden, weight, TARGETS, chunk_tokens=4)
    cut = chunked_logprobs(hidden, weight, TARGETS, chunk_tokens=4, support=on_device(*IDS))
    free = torch.tensor([not ids for ids in IDS])
    assert torch.equal(plain[0][free], cut[0][free]) and torch.equal(plain[1], cut[1])
    assert not torch.equal(plain[0], cut[0])
    assert on_device((), (), ()) is None


def test_a_support_far_below_the_likeliest_token_stays_finite() -> None:
    hidden, weight = torch.eye(2), torch.tensor([[500.0, 0.0], [-400.0, 0.0], [-401.0, 0.0]])
    held = Supports.from_arrays(*support((1, 2), ()), CPU)
    leaf = hidden.clone().requires_grad_()
    logprobs, _ = chunked_logprobs(leaf, weight, torch.tensor([1, 0]), support=held)
    assert float(logprobs[0].detach()) == pytest.approx(-0.3132617, abs=1e-4)
    logprobs.sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all())


def test_ranks_that_split_rows_select_their_part() -> None:
    held = on_device(*IDS)
    assert held is not None
    some = held.select(torch.tensor([0, 2, 4, 8]))
    assert some is not None and some.counts.tolist() == [2, 1, 3, 3] and some.ends.tolist() == [0, 2, 3, 6, 9]
    assert some.ids.tolist() == [0, 3, 2, 1, 5, 9, 6, 7, 8]
    assert held.select(torch.tensor([1, 6])) is None


def test_a_share_brings_supports_to_its_rank() -> None:
    cut = support((1, 4), (6,))
    other = Sample(np.array([0, 4, 6], np.int32), 1, np.zeros(2, np.float32), np.ones(2, np.uint8), 0.0, support=cut)
    plain = Sample(np.arange(4, dtype=np.int32), 2, np.zeros(2, np.float32), np.ones(2, np.uint8), 0.0)
    share = [Minibatch(4, 2, (packed_row([other, plain]), packed_row([plain]), packed_row([other])))]
    [found] = decode_share(encode_share(share))
    assert [one.support_counts.tolist() for one in found.micro] == [[2, 1, 0, 0], [], [2, 1]]
    assert [one.support_ids.tolist() for one in found.micro] == [[1, 4, 6], [], [1, 4, 6]]
    assert to_device(found.micro[1], CPU).support is None


def test_samples_are_sent_apart_if_a_message_cannot_take_their_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert general.MOST_IDS == rollout.MOST_IDS == coding.MOST_IDS
    monkeypatch.setattr(rollout, "MOST_IDS", 4)
    cut = GenDelta(
        "1:1", 0, np.array([4, 6], np.int32), np.zeros(2, np.float32), ((0, 2),), "stop", support=support((1, 4), (6,))
    )
    whole = replace(cut, support=None)
    assert rollout.fits_message([cut]) and rollout.fits_message([whole] * 9)
    assert not rollout.fits_message([cut, cut])


def test_every_sequence_of_a_sample_has_its_part_and_ids_beyond_the_vocabulary_are_quarantined() -> None:
    cut = support((5, 9), (), (), (), (8,), (), (), (3, 4))
    sample = replace(
        a_sample(0, [5, 6, 7, 7, 8, 1, 9, 4], mask=np.array([1, 1, 0, 0, 1, 0, 0, 1], np.uint8)),
        rows=((5, 2),),
        support=cut,
    )
    group = a_group(1, [1, 2], [sample])
    made = assemble(a_batch(1, 0, [group]), algorithm=AlgorithmConfig(), ranks=1, max_tokens=64)
    [row] = made.shares[0][0].micro
    parts = {5: [2, 0, 0, 0, 1], 1: [2]}
    assert row.support_counts.tolist() == [
        count for number in row.samples for count in (parts[5] if number == 0 else parts[1])
    ]
    assert sorted(row.support_ids.tolist()) == [3, 4, 5, 8, 9]
    assert unusable(group, max_tokens=64, vocabulary=10) == ""
    assert unusable(a_group(1, [1, 2], [replace(sample, support=support((5, 12)))]), max_tokens=64, vocabulary=10)


@pytest.mark.parametrize("name", ["learner.backend", "producers.engine"])
def test_parts_of_other_packages_that_record_none_are_refused_at_the_start(name: str) -> None:
    refuse_cuts(parse(TOML), able=False, key=name)
    cut = parse(TOML, overrides=["sampling.top_p=0.9"])
    refuse_cuts(cut, able=True, key=name)
    with pytest.raises(ConfigError) as caught:
        refuse_cuts(cut, able=False, key=name)
    assert caught.value.code == "config.conflict" and name in caught.value.message
    refuse_cuts(parse(TOML, overrides=["sampling.top_p=0.9", "sampling.truncation=biased"]), able=False, key=name)


@pytest.mark.parametrize("settings", [(), ("learner.preference.demonstrations=true",)], ids=["online_dpo", "spin"])
def test_only_mode_rl_records_supports(settings: tuple[str, ...]) -> None:
    cut = parse(TOML, overrides=["sampling.top_p=0.9"])
    pairs = parse(TOML, overrides=["sampling.top_p=0.9", "learner.mode=dpo", "sampling.group_size=2", *settings])
    assert cut.training_sampling.wants_support and not pairs.training_sampling.wants_support
    refuse_cuts(pairs, able=False, key="producers.engine")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ""),
        ({"top_p": 0.9}, "sampling.top_p = 0.9"),
        ({"min_p": 0.1, "top_k": 5}, "sampling.top_k = 5, sampling.min_p = 0.1"),
    ],
)
def test_a_cut_is_named(given: dict[str, Any], wanted: str) -> None:
    assert SamplingConfig(**given).cut == wanted
    assert SamplingConfig(**given).wants_support == bool(wanted)
    assert not SamplingConfig(**given, truncation="biased").wants_support
