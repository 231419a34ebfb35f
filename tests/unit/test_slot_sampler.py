"""The parts of the hf engine: drawing, rows and lanes, version runs, prefill sharing, K/V, bands, caches."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config, Qwen3ForCausalLM

from asyncrl.engine import GenRequest
from asyncrl.versions import expand, runs_of
from producers.engines.hf import attention
from producers.engines.hf import cache_interface as memory
from producers.engines.hf.attention import Band, plan
from producers.engines.hf.cache_interface import pieces
from producers.engines.hf.cohort_cache import CohortMemory
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.kv_cache import FIRST_LENGTH, KVStore
from producers.engines.hf.sampling import Cut, sample, uniform_dtype
from producers.engines.hf.slot_cache import SlotMemory
from producers.engines.hf.slots import COUNT, LANE, LAST, POSITION, SlotTable, runs_between, sample_uniforms

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, uniforms: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    rows = len(uniforms)
    temperature = more.pop("temperature", torch.ones(rows))
    numbers = torch.as_tensor(uniforms, dtype=torch.float64)
    tokens, logprobs, _ = sample(logits.expand(rows, -1), numbers, temperature, **more)
    # Without float64, as on NPUs: other tokens only at a border.
    whole, others, _ = sample(logits.expand(rows, -1), (numbers * 2.0**31).long(), temperature, **more)
    same = whole == tokens
    assert same.float().mean() > 0.999 and torch.allclose(others[same], logprobs[same], atol=1e-6)
    return tokens.numpy(), logprobs.numpy()


# ---------------------------------------------------------------- drawing


def test_frequencies_follow_the_softmax_with_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    count = 20_000
    tokens, logprobs = draw(logits, np.random.default_rng(0).random(count), temperature=torch.full((count,), 0.7))
    wanted = torch.softmax(logits[0] / 0.7, -1).numpy()
    assert np.abs(np.bincount(tokens, minlength=5) / count - wanted).max() < 0.015
    assert np.abs(logprobs - np.log(wanted)[tokens]).max() < 1e-5


def test_the_uniform_number_is_a_place_in_the_cumulative_distribution() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.25, 0.5]]))
    tokens, _ = draw(logits, [0.0, 0.24, 0.26, 0.49, 0.51, 0.999999, 1.0 - 2.0**-53])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 2]


def test_a_token_without_weight_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, _ = draw(logits, [0.0, 0.4999, 0.5001, 1.0 - 2.0**-53])
    assert tokens.tolist() == [1, 1, 3, 3]


def test_whole_numbers_have_the_borders_of_float64_in_a_large_vocabulary() -> None:
    logits = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0)) * 3
    one = torch.ones(1)
    uniforms = torch.rand(200, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = [int(sample(logits, number, one).tokens) for number in uniforms]
    whole = [int(sample(logits, (number * 2.0**31).long(), one).tokens) for number in uniforms]
    assert sum(left == right for left, right in zip(exact, whole, strict=True)) >= 199


def test_devices_without_float64_get_whole_random_numbers() -> None:
    assert uniform_dtype("cpu") == uniform_dtype("cuda") == torch.float64
    assert uniform_dtype("npu") == torch.int64


def test_top_k_top_p_and_min_p_are_per_row() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    count = 4000
    uniforms = np.random.default_rng(1).random(count)
    settings = [
        (1.0, 0, 0.0),
        (1.0, 1, 0.0),
        (1.0, 2, 0.0),
        (0.75, 0, 0.0),
        (1.0, 0, 0.6),
        (0.5, 0, 0.6),
        (1.0, 0, 0.0),
        (1.0, 0, 0.0),
    ]
    top_p, top_k, min_p = (torch.tensor([row[at] for row in settings] * (count // 8)) for at in range(3))
    tokens, logprobs = draw(probs.log(), uniforms, cut=Cut(top_p, top_k, min_p))
    seen = [sorted(set(tokens[at::8].tolist())) for at in range(6)]
    # 0.4 + 0.3 < 0.75: the third one crosses the border; 0.3 >= 0.6 * 0.4 > 0.2; the nucleus is of 0.4 / 0.7
    assert seen == [[0, 1, 2, 3], [0], [0, 1], [0, 1, 2], [0, 1], [0]]
    assert np.allclose(logprobs, np.log(probs.numpy()[0])[tokens], atol=1e-6)  # of the full softmax
    share = np.bincount(tokens[2::8], minlength=4) / len(tokens[2::8])
    assert abs(share[0] - 0.4 / 0.7) < 0.05


def test_random_numbers_are_a_function_of_seed_and_index() -> None:
    assert np.array_equal(sample_uniforms(3, 1, 10), sample_uniforms(3, 1, 20)[:10])
    streams = {tuple(sample_uniforms(seed, index, 4)) for seed in (0, 1, 2**63, -1) for index in range(8)}
    assert len(streams) == 32
    assert all(0.0 <= number < 1.0 for stream in streams for number in stream)


# ---------------------------------------------------------------- runs


def test_runs_between_steps_equal_a_record_per_token() -> None:
    rng = random.Random(0)
    for _ in range(300):
        eras, step = [], 0
        for version in range(rng.randint(1, 6)):
            eras.append((step, version))
            step += rng.randint(0, 4)  # 0: two swaps between the same two steps
        start = rng.randint(0, step + 3)
        stop = start + rng.randint(1, 12)
        versions = [max(version for first, version in eras if first <= at) for at in range(start, stop)]
        assert runs_between(eras, start, stop) == runs_of(versions)


# ---------------------------------------------------------------- rows and lanes


def request(name: str, prompt: int, indices: tuple[int, ...] = (0,), *, tokens: int = 30, **more: Any) -> GenRequest:
    ids = 3 + np.arange(prompt, dtype=np.int32) % 37
    return GenRequest(name, ids, indices, 1, tokens, **({"stop_ids": (2,)} | more))


def test_rows_stay_packed_and_lanes_follow() -> None:
    """Random arrivals and ends against a plain model: which sample sits in which row, with which position and count."""
    rng = random.Random(5)
    table = SlotTable(6, max_new_tokens=30, device=CPU, stops=1)
    rows: list[list[Any]] = []  # name, index, position, count, last
    made = 0
    for _ in range(400):
        if table.free and rng.random() < 0.6:
            count = rng.randint(1, min(3, table.free))
            prompt, limit = rng.randint(1, 5), rng.randint(1, 8)
            stops = tuple(range(100, 100 + rng.randint(1, 7)))  # wider than the table was made for
            first = table.add(
                request(f"r{made}", prompt, tuple(range(count)), tokens=limit, stop_ids=stops),
                list(range(count)),
                version=0,
            )
            assert first == len(rows)
            rows += [[f"r{made}", index, prompt - 1, 0, prompt + 2, limit, set(stops)] for index in range(count)]
            made += 1
        if not rows:
            continue
        tokens = [rng.randint(90, 107) for _ in rows]
        ended = table.record(table.state[: table.live], torch.tensor(tokens), torch.zeros(len(rows)))
        for row, token in zip(rows, tokens, strict=True):
            row[2:5] = [row[2] + 1, row[3] + 1, token]
        expected = [at for at, row in enumerate(rows) if row[4] in row[6] or row[3] >= row[5]]
        assert ended == expected
        for item, at in zip(table.collect(ended), ended, strict=True):
            assert (item.id, item.index, len(item.token_ids)) == (rows[at][0], rows[at][1], rows[at][3])
            assert item.finish == ("stop" if rows[at][4] in rows[at][6] else "length")
        moves = table.release(ended)
        for source, hole in zip(moves.sources, moves.holes, strict=True):
            rows[hole] = rows[source]
            assert moves.tokens >= rows[hole][2]
        del rows[len(rows) - len(ended) :]
        assert table.live == len(rows) == len(table.occupants)
        state = table.state[: table.live]
        for at, row in enumerate(rows):
            occupant = table.occupants[table.lanes[at]]
            assert (occupant.request.id, occupant.sample) == (row[0], row[1])
            assert [int(state[at, column]) for column in (POSITION, COUNT, LAST)] == row[2:5]
            assert int(state[at, LANE]) == table.lanes[at] and int(table.positions[at]) == row[2]
    assert made > 50 and len(set(table.lanes)) == table.live


# ---------------------------------------------------------------- the decode loop


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM._from_config(shape, attn_implementation="sdpa").eval()


def make(model: Any, slots: int, *, recompute: bool = False, way: str = "slots", max_len: int = 64) -> Decoder:
    held: Any
    if way == "slots":
        held = SlotMemory(model, slots=slots, max_len=max_len, device=CPU, where="")
    else:
        held = CohortMemory(model, max_len=max_len, device=CPU, where="")
    table = SlotTable(slots, max_new_tokens=max_len - 10, device=CPU)
    decoder = Decoder(held, table, recompute=recompute)
    decoder.swap(0, lambda: None)
    return decoder


WAYS = pytest.mark.parametrize("way", ["slots", "caches"])


class Forwards:
    """Counts forwards with more than one token per row: prefills, with the number of prompts in each."""

    def __init__(self, model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefills: list[int] = []
        self.widest = 0
        inner = model.forward

        @functools.wraps(inner)  # the engine looks at its parameters
        def forward(*args: Any, **kwargs: Any) -> Any:
            if kwargs["input_ids"].shape[1] > 1:
                self.prefills.append(kwargs["input_ids"].shape[0])
            else:
                self.widest = max(self.widest, kwargs["input_ids"].shape[0])
            return inner(*args, **kwargs)

        monkeypatch.setattr(model, "forward", forward)


def finish(decoder: Decoder) -> dict[tuple[str, int], Any]:
    samples = {}
    for _ in range(2000):
        if decoder.idle:
            return samples
        samples |= {(item.id, item.index): item for item in decoder.step()}
    raise AssertionError("the decoder does not come to an end")


def test_a_prompt_is_prefilled_once_however_its_samples_are_seated(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make(model, slots=3)
    forwards = Forwards(model, monkeypatch)
    for number in range(4):
        decoder.submit(request(f"g{number}", 4 + number, tuple(range(8)), tokens=5 + number, stop_ids=()))
    samples = finish(decoder)
    assert len(samples) == 32 and all(len(item.token_ids) == 5 + int(item.id[1]) for item in samples.values())
    assert forwards.prefills == [4]  # four prompts of unequal length, one forward, for 32 samples in 3 rows
    assert forwards.widest == 3


def test_one_token_prompts_need_no_prefill(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make(model, slots=2)
    forwards = Forwards(model, monkeypatch)
    decoder.submit(request("a", 1, (0, 1), tokens=3, stop_ids=()))
    assert len(finish(decoder)) == 2 and forwards.prefills == []


@WAYS
def test_the_step_shrinks_with_the_live_rows(model: Qwen3ForCausalLM, way: str) -> None:
    decoder = make(model, slots=4, way=way)
    for number in range(4):
        decoder.submit(request(f"g{number}", 3, tokens=1 + 5 * number, stop_ids=()))
    live = []
    while not decoder.idle:
        decoder.step()
        live.append(decoder.table.live)
    assert live == [3] * 5 + [2] * 5 + [1] * 5 + [0]
    assert decoder.generated_tokens == 1 + 6 + 11 + 16


@WAYS
def test_a_prefix_of_an_older_version_is_not_used(
    model: Qwen3ForCausalLM, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make(model, slots=1, way=way)
    forwards = Forwards(model, monkeypatch)
    decoder.submit(request("a", 4, (0, 1), tokens=3, stop_ids=()))
    decoder.step()
    decoder.swap(7, lambda: None)
    samples = finish(decoder)
    assert forwards.prefills == [1, 1]
    assert samples["a", 0].runs == ((0, 1), (7, 2)) and samples["a", 1].runs == ((7, 3),)
    assert expand(samples["a", 0].runs).tolist() == [0, 7, 7]


@WAYS
def test_recompute_in_small_pieces_gives_the_same(
    model: Qwen3ForCausalLM, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(decoder: Decoder) -> None:
        held: Any = decoder.memory
        layers = (
            held.store.layers
            if way == "slots"
            else [(layer.keys, layer.values) for cohort in held.cohorts for layer in cohort.cache.layers]
        )
        assert layers
        for keys, values in layers:
            keys.fill_(9.0)
            values.fill_(9.0)

    def tokens(limit: int, *, swap: bool) -> dict[tuple[str, int], list[int]]:
        monkeypatch.setattr(memory, "PREFILL_TOKENS", limit)
        decoder = make(model, slots=5, recompute=True, way=way)
        for number in range(3):
            decoder.submit(request(f"g{number}", 2 + 3 * number, (0, 1, 2), tokens=20))
        for _ in range(6):
            decoder.step()
        if swap:  # the same weights again: recomputing must change nothing
            with torch.inference_mode():
                spoil(decoder)
            decoder.swap(1, lambda: None)
        return {key: item.token_ids.tolist() for key, item in finish(decoder).items()}

    plain = tokens(8192, swap=False)
    assert tokens(8192, swap=True) == plain
    assert tokens(12, swap=True) == plain


def test_a_group_of_caches_shares_its_prefill_and_nothing_else(
    model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make(model, slots=3, way="caches")
    forwards = Forwards(model, monkeypatch)
    decoder.submit(request("a", 5, tuple(range(8)), tokens=6, stop_ids=()))
    decoder.submit(request("b", 5, (0,), tokens=6, stop_ids=()))
    samples = finish(decoder)
    assert forwards.prefills == [1, 1] and forwards.widest == 3
    alone = finish_one(make(model, slots=1, way="caches"), request("a", 5, (6,), tokens=6, stop_ids=()))
    assert samples["a", 6].token_ids.tolist() == alone.token_ids.tolist()


def finish_one(decoder: Decoder, wanted: GenRequest) -> Any:
    decoder.submit(wanted)
    (item,) = finish(decoder).values()
    return item


def test_pieces_of_a_prefill_cover_all_rows_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PREFILL_TOKENS", 50)
    rng = random.Random(2)
    for _ in range(200):
        lengths = [rng.randint(0, 80) for _ in range(rng.randint(0, 12))]
        found = pieces(lengths)
        assert [place for piece in found for place in range(piece.start, piece.stop)] == list(range(len(lengths)))
        for piece in found:
            rows = lengths[piece]
            assert len(rows) == 1 or max(rows) * len(rows) <= 50


# ---------------------------------------------------------------- K/V and bands


def test_the_store_grows_with_the_longest_sample_and_keeps_what_it_holds(model: Qwen3ForCausalLM) -> None:
    like = [(torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 1, 6)), (torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4))]
    store = KVStore(like, slots=3, max_len=3 * FIRST_LENGTH)
    assert sum(part.numel() for pair in store.layers for part in pair) == 0  # nothing before the first sample
    part = [(torch.rand(1, k.shape[1], 5, k.shape[3]), torch.rand(1, v.shape[1], 5, v.shape[3])) for k, v in like]
    store.write(1, 2, part)
    lengths = [store.length]
    for wanted in (FIRST_LENGTH, FIRST_LENGTH + 1, 2 * FIRST_LENGTH + 1, 3 * FIRST_LENGTH):
        store.reach(wanted)
        lengths.append(store.length)
    assert lengths == [FIRST_LENGTH, FIRST_LENGTH, 2 * FIRST_LENGTH, 3 * FIRST_LENGTH, 3 * FIRST_LENGTH]
    for (keys, values), (new_keys, new_values) in zip(store.layers, part, strict=True):
        assert keys.shape[:3] == (3, new_keys.shape[1], 3 * FIRST_LENGTH) and values.shape[3] == new_values.shape[3]
        assert torch.equal(keys[1:, :, :5], new_keys.expand(2, -1, -1, -1)) and not keys[1:, :, 5:].any()
        assert torch.equal(values[2, :, :5], new_values[0]) and not values[0].any()
    held = sum(part.numel() * 4 for pair in store.layers for part in pair)
    assert KVStore.nbytes(like, slots=3, max_len=3 * FIRST_LENGTH) == held


def test_bands_cover_every_row_and_read_less() -> None:
    rng = np.random.default_rng(0)
    splits = 0
    for _ in range(300):
        lengths = np.clip(rng.lognormal(rng.uniform(3, 7), rng.uniform(0.1, 1.5), rng.integers(1, 65)), 1, 8000)
        lengths = lengths.astype(np.int64)
        bands = plan(lengths, device=CPU)
        assert bands[0].rows is None and len(bands) <= attention.MOST
        reach = np.full(len(lengths), bands[0].visible)
        for rows, visible in bands[1:]:
            assert rows is not None and (reach[rows.numpy()] < visible).all()
            reach[rows.numpy()] = visible
        assert (reach >= lengths).all() and reach.max() < lengths.max() + attention.STEP
        splits += len(bands) > 1
    assert 100 < splits < 300
    assert plan(np.array([60] * 63 + [7000]), device=CPU)[0].visible == 64
    assert plan(np.array([60] * 64), device=CPU) == [Band(None, 64)]


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_bands_change_no_log_prob(model: Qwen3ForCausalLM, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long and short samples together, in one band and in several: the same tokens; and several bands there are."""
    shape = (
        model.config
        if kind == "qwen3"
        else MistralConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.2,
            sliding_window=20,
        )
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        other: Any = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()
    calls: list[int] = []
    real = attention.attend

    def attend(module: Any, query: Any, key: Any, *rest: Any, **given: Any) -> Any:
        calls.append(len(getattr(key, "bands", ())))
        return real(module, query, key, *rest, **given)

    monkeypatch.setattr(attention, "attend", attend)
    assert attention.install(other)

    def tokens(call: int) -> dict[tuple[str, int], Any]:
        monkeypatch.setattr(attention, "CALL", call)
        monkeypatch.setattr(attention, "COPIED", 1)
        decoder = make(other, slots=12, max_len=128)
        for number, prompt in enumerate((3, 40, 4, 5, 90, 2, 40, 3, 3, 40, 3, 3)):
            decoder.submit(request(f"g{number}", prompt, tokens=20, stop_ids=()))
        return finish(decoder)

    one = tokens(10**9)
    assert set(calls) == {0}
    several = tokens(0)
    assert max(calls) >= 3
    for key, item in one.items():
        assert item.token_ids.tolist() == several[key].token_ids.tolist()
        assert np.abs(item.logprobs - several[key].logprobs).max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
@WAYS
def test_tokens_on_an_accelerator_are_those_of_the_cpu(model: Qwen3ForCausalLM, way: str) -> None:
    import copy

    device = torch.device("cuda:0")
    moved: Any = copy.deepcopy(model).to(device)
    held: Any = (
        SlotMemory(moved, slots=3, max_len=64, device=device, where="")
        if way == "slots"
        else CohortMemory(moved, max_len=64, device=device, where="")
    )
    there = Decoder(held, SlotTable(3, max_new_tokens=54, device=device), recompute=True)
    there.swap(0, lambda: None)
    here = make(model, slots=3, recompute=True, way=way)
    for decoder in (here, there):
        for number in range(3):
            decoder.submit(request(f"g{number}", 2 + 3 * number, (0, 1, 2), tokens=20))
        for _ in range(6):
            decoder.step()
        decoder.swap(1, lambda: None)
    found = finish(there)
    for key, item in finish(here).items():
        assert found[key].token_ids.tolist() == item.token_ids.tolist()
        assert np.abs(found[key].logprobs - item.logprobs).max() < 1e-3


@WAYS
def test_abort_forgets_waiting_and_live_samples(model: Qwen3ForCausalLM, way: str) -> None:
    decoder = make(model, slots=3, way=way)
    decoder.submit(request("a", 3, tuple(range(5)), stop_ids=()))
    decoder.submit(request("b", 3, (0, 1), tokens=4, stop_ids=()))
    decoder.step()
    assert decoder.abort(["a"]) == 5
    samples = finish(decoder)
    assert sorted(samples) == [("b", 0), ("b", 1)]
    assert decoder.abort(None) == 0 and decoder.table.free == 3
