"""The parts of the slot sampler: drawing, rows and lanes, version runs, prefill sharing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from asyncrl.engine import GenRequest
from asyncrl.versions import expand, runs_of
from producers.engines import decoder as decoder_module
from producers.engines.decoder import Decoder
from producers.engines.kv import KVStore
from producers.engines.loading import probe
from producers.engines.sampling import sample
from producers.engines.slots import COUNT, LANE, LAST, POSITION, SlotTable, runs_between, uniforms_of

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, uniforms: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    rows = len(uniforms)
    temperature = more.pop("temperature", torch.ones(rows))
    numbers = torch.as_tensor(uniforms, dtype=torch.float64)
    tokens, logprobs = sample(logits.expand(rows, -1), numbers, temperature, **more)
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


def test_top_k_and_top_p_are_per_row() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    count = 4000
    uniforms = np.random.default_rng(1).random(count)
    top_k = torch.tensor([0, 1, 2, 0] * (count // 4))
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.75] * (count // 4))
    tokens, logprobs = draw(probs.log(), uniforms, top_k=top_k, top_p=top_p)
    seen = [sorted(set(tokens[at::4].tolist())) for at in range(4)]
    assert seen == [[0, 1, 2, 3], [0], [0, 1], [0, 1, 2]]  # 0.4 + 0.3 < 0.75: the third one crosses the border
    assert np.allclose(logprobs, np.log(probs.numpy()[0])[tokens], atol=1e-6)  # of the full softmax
    share = np.bincount(tokens[2::4], minlength=4) / len(tokens[2::4])
    assert abs(share[0] - 0.4 / 0.7) < 0.05


def test_random_numbers_are_a_function_of_seed_and_index() -> None:
    assert np.array_equal(uniforms_of(3, 1, 10), uniforms_of(3, 1, 20)[:10])
    streams = {tuple(uniforms_of(seed, index, 4)) for seed in (0, 1, 2**63, -1) for index in range(8)}
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
    ids = np.arange(3, 3 + prompt, dtype=np.int32)
    return GenRequest(name, ids, indices, 1, tokens, **({"stop_ids": (2,)} | more))


def test_rows_stay_packed_and_lanes_follow() -> None:
    """Random arrivals and ends against a plain model: which sample sits in which row, with which position and count."""
    rng = random.Random(5)
    table = SlotTable(6, max_new_tokens=30, device=CPU, stops=1)
    rows: list[list[Any]] = []  # name, index, position, count, last
    made = 0
    for step in range(400):
        if table.free and rng.random() < 0.6:
            count = rng.randint(1, min(3, table.free))
            prompt, limit = rng.randint(1, 5), rng.randint(1, 8)
            stops = tuple(range(100, 100 + rng.randint(1, 7)))  # wider than the table was made for
            first = table.add(request(f"r{made}", prompt, tuple(range(count)), tokens=limit, stop_ids=stops),
                              list(range(count)), step=step)  # fmt: skip
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
        for item, at in zip(table.collect(ended, [(0, 0)]), ended, strict=True):
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
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM._from_config(shape, attn_implementation="sdpa").eval()


def make(model: Qwen3ForCausalLM, slots: int, *, recompute: bool = False) -> Decoder:
    keys, values = probe(model, device=CPU, where="")
    store = KVStore(keys, values, slots=slots, max_len=64)
    decoder = Decoder(model, store, SlotTable(slots, max_new_tokens=30, device=CPU), recompute=recompute)
    decoder.swap(0, lambda: None)
    return decoder


class Forwards:
    """Counts forwards with more than one token per row: prefills, with the number of prompts in each."""

    def __init__(self, model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prefills: list[int] = []
        self.widest = 0
        inner = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if type(kwargs["past_key_values"]).__name__ == "CaptureCache":
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


def test_the_step_shrinks_with_the_live_rows(model: Qwen3ForCausalLM) -> None:
    decoder = make(model, slots=4)
    for number in range(4):
        decoder.submit(request(f"g{number}", 3, tokens=1 + 5 * number, stop_ids=()))
    live = []
    while not decoder.idle:
        decoder.step()
        live.append(decoder.table.live)
    assert live == [3] * 5 + [2] * 5 + [1] * 5 + [0]
    assert decoder.generated_tokens == 1 + 6 + 11 + 16


def test_a_prefix_of_an_older_version_is_not_used(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make(model, slots=1)
    forwards = Forwards(model, monkeypatch)
    decoder.submit(request("a", 4, (0, 1), tokens=3, stop_ids=()))
    decoder.step()
    decoder.swap(7, lambda: None)
    samples = finish(decoder)
    assert forwards.prefills == [1, 1]
    assert samples["a", 0].runs == ((0, 1), (7, 2)) and samples["a", 1].runs == ((7, 3),)
    assert expand(samples["a", 0].runs).tolist() == [0, 7, 7]


def test_recompute_in_small_pieces_gives_the_same(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(limit: int, *, swap: bool) -> dict[tuple[str, int], list[int]]:
        monkeypatch.setattr(decoder_module, "PREFILL_TOKENS", limit)
        decoder = make(model, slots=5, recompute=True)
        for number in range(3):
            decoder.submit(request(f"g{number}", 2 + 3 * number, (0, 1, 2), tokens=20))
        for _ in range(6):
            decoder.step()
        early = {}
        if swap:  # the same weights again: recomputing must change nothing
            decoder.store.keys.fill_(9.0)
            decoder.store.values.fill_(9.0)
            decoder.swap(1, lambda: None)
        return early | {key: item.token_ids.tolist() for key, item in finish(decoder).items()}

    plain = tokens(8192, swap=False)
    assert tokens(8192, swap=True) == plain
    assert tokens(12, swap=True) == plain


def test_abort_forgets_waiting_and_live_samples(model: Qwen3ForCausalLM) -> None:
    decoder = make(model, slots=3)
    decoder.submit(request("a", 3, tuple(range(5)), stop_ids=()))
    decoder.submit(request("b", 3, (0, 1), tokens=4, stop_ids=()))
    decoder.step()
    assert decoder.abort(["a"]) == 5
    samples = finish(decoder)
    assert sorted(samples) == [("b", 0), ("b", 1)]
    assert decoder.abort(None) == 0 and decoder.table.free == 3
