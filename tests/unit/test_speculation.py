"""Drafts of the hf engine: the tokens are those of decoding one by one, and drafts are fed only while they pay."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, MistralConfig, Qwen3Config

from asyncrl.engine import GenDelta, GenRequest, join_deltas
from asyncrl.errors import ConfigError
from producers.engines.hf import attention
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.loading import build_decoder
from producers.engines.hf.prefix_cache import PrefixCache
from producers.engines.hf.slot_cache import SlotMemory
from producers.engines.hf.slots import SlotTable
from producers.engines.ngram import START_RATE, Drafter, Line, find_draft

CPU = torch.device("cpu")
MAX_LEN, MAX_NEW, VOCABULARY = 96, 60, 40
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
}
KINDS: dict[str, tuple[Any, str]] = {
    "all tokens": (Qwen3Config(**SIZES), "sdpa"),
    "a window": (MistralConfig(**SIZES, sliding_window=11), "sdpa"),
    "eager": (Qwen3Config(**SIZES), "eager"),
}


def model_of(kind: str = "all tokens", seed: int = 0) -> Any:
    config, implementation = KINDS[kind]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


class Eager(Drafter):
    """Feeds every draft, and wrong ones too: every third draft has a wrong token somewhere."""

    def __init__(self, most: int, *, wrong: bool = True) -> None:
        super().__init__(most)
        self._wrong = wrong
        self._random = random.Random(0)

    def draft(self, lane: int, text: str, most: int) -> str:
        found = super().draft(lane, text, most)
        if not found and self._wrong:
            found = "".join(chr(self._random.randrange(VOCABULARY)) for _ in range(most))
        if found and self._wrong and self._random.random() < 0.3:
            place = self._random.randrange(len(found))
            found = found[:place] + chr(self._random.randrange(VOCABULARY)) + found[place + 1 :]
        return found

    def decide(self, lines: Sequence[Line]) -> int:
        return max(len(line.draft) for line in lines)


def decoder_of(
    model: Any, most: int = 0, *, slots: int = 5, recompute: bool = False, sessions: bool = False
) -> Decoder:
    memory = SlotMemory(model, slots=slots, max_len=MAX_LEN, device=CPU, where="")
    attention.install(model)
    prefixes = PrefixCache(memory, most_tokens=1000) if sessions else None
    table = SlotTable(slots, max_new_tokens=MAX_NEW, device=CPU)
    drafter = Eager(most) if most else None
    decoder = Decoder(memory, table, recompute=recompute, prefixes=prefixes, drafter=drafter)
    decoder.swap(0, lambda: None)
    return decoder


def request(name: str, prompt: Any, indices: tuple[int, ...] = (0,), *, seed: int = 1, **more: Any) -> GenRequest:
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.4, "stop_ids": ()} | more
    return GenRequest(name, np.asarray(prompt, np.int32), indices, seed, **settings)


PROMPTS: tuple[Any, ...] = (np.arange(12) % 4 + 3, [9], np.arange(30) * 7 % 40, [5, 6, 7, 8, 5, 6])
#: Settings of requests: what ends a sample or restricts its draws.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}] * 4,
    "temperatures": [{"temperature": t} for t in (0.05, 0.4, 1.0, 2.0)],
    "cuts": [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {}],
    "supports": [{"top_k": 3, "support": True}, {"support": True}, {"top_p": 0.7, "support": True}, {"top_k": 2}],
    "stops": [{"stop_ids": tuple(range(first, 40, 5))} for first in range(4)],
    "limits": [{"max_new_tokens": n} for n in (1, 2, 7, 60)],
    "deltas": [{"delta_tokens": n} for n in (1, 2, 7, 0)],
}


def finish(decoder: Decoder) -> dict[tuple[str, int], GenDelta]:
    parts: dict[tuple[str, int], list[GenDelta]] = defaultdict(list)
    for _ in range(3000):
        if decoder.idle:
            return {key: join_deltas(found) for key, found in parts.items()}
        for item in decoder.step():
            parts[item.id, item.index].append(item)
    raise AssertionError("the decoder does not come to an end")


def assert_equal(found: dict[Any, GenDelta], wanted: dict[Any, GenDelta]) -> None:
    assert found.keys() == wanted.keys() and wanted
    for key, item in wanted.items():
        other = found[key]
        np.testing.assert_array_equal(other.token_ids, item.token_ids)
        np.testing.assert_allclose(other.logprobs, item.logprobs, atol=1e-4)
        assert (other.finish, other.runs, other.start) == (item.finish, item.runs, item.start)
        assert (other.support is None) == (item.support is None)
        if item.support is not None and other.support is not None:
            np.testing.assert_array_equal(other.support.counts, item.support.counts)
            np.testing.assert_array_equal(other.support.ids, item.support.ids)


def ask_all(decoder: Decoder, settings: list[dict[str, Any]]) -> dict[tuple[str, int], GenDelta]:
    for number, (prompt, more) in enumerate(zip(PROMPTS, settings, strict=True)):
        decoder.submit(request(f"g{number}", prompt, (0, 1, 2), seed=number, **more))
    return finish(decoder)


# ---------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("settings", SETTINGS)
def test_drafts_change_no_sample(settings: str, most: int) -> None:
    """12 samples in 5 rows, which end, move and accept drafts of different lengths."""
    model = model_of()
    plain = decoder_of(model)
    wanted = ask_all(plain, SETTINGS[settings])
    decoder = decoder_of(model, most)
    assert_equal(ask_all(decoder, SETTINGS[settings]), wanted)
    assert decoder.drafter is not None
    assert 0 < decoder.drafter.accepted < decoder.drafter.drafted
    assert decoder.generated_tokens == plain.generated_tokens and decoder.steps < plain.steps
    assert not decoder.drafter._lines


@pytest.mark.parametrize("kind", KINDS)
def test_windows_masks_and_bands_hide_wrong_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CALL", 0)  # several bands
    monkeypatch.setattr(attention, "COPIED", 1)
    model = model_of(kind)
    wanted = ask_all(decoder_of(model), SETTINGS["plain"])
    assert_equal(ask_all(decoder_of(model, 5), SETTINGS["plain"]), wanted)


def test_a_sample_may_fill_the_cache_to_its_end() -> None:
    model = model_of()
    asked = [request(f"g{n}", np.arange(MAX_LEN - MAX_NEW - n) % 5, max_new_tokens=MAX_NEW, seed=n) for n in range(4)]
    found = []
    for most in (0, 7):
        decoder = decoder_of(model, most)
        for one in asked:
            decoder.submit(one)
        found.append(finish(decoder))
    assert_equal(found[1], found[0])


def test_a_continued_sample_goes_on_in_its_stream() -> None:
    model = model_of()
    (whole,) = [decoder_of(model, 5)]
    whole.submit(request("a", PROMPTS[0]))
    (item,) = finish(whole).values()
    decoder = decoder_of(model, 5)
    prompt = np.concatenate([PROMPTS[0], item.token_ids[:17]])
    decoder.submit(request("a", prompt, begun=17, max_new_tokens=23))
    (rest,) = finish(decoder).values()
    np.testing.assert_array_equal(rest.token_ids, item.token_ids[17:])


def test_sessions_keep_only_what_was_accepted() -> None:
    """A turn that ends within a draft; the next one begins with it."""
    model = model_of()
    found = []
    for most in (0, 5):
        decoder = decoder_of(model, most, sessions=True)
        contexts = {f"{n}:0": np.asarray(prompt) for n, prompt in enumerate(PROMPTS[1:])}
        for name, context in contexts.items():
            decoder.submit(request(name, context, seed=int(name[0]), max_new_tokens=14, stop_ids=(7, 17)))
        turns = {}
        while not decoder.idle:
            for item in decoder.step():
                turns[item.id, 0] = item
                session, turn = map(int, item.id.split(":"))
                if turn < 2:
                    name = f"{session}:{turn + 1}"
                    contexts[name] = np.concatenate([contexts[item.id], item.token_ids, [1 + turn, 2]])
                    decoder.submit(request(name, contexts[name], seed=session, max_new_tokens=14, stop_ids=(7, 17)))
        assert decoder.prefixes is not None and decoder.prefixes.reused > 0
        found.append(turns)
    assert len(found[0]) == 9
    assert_equal(found[1], found[0])


def test_abort_and_priority() -> None:
    model = model_of()
    decoder = decoder_of(model, 5, slots=1)
    decoder.submit(request("gone", PROMPTS[0], (0, 1, 2)))
    for _ in range(3):
        decoder.step()
    decoder.submit(request("late", PROMPTS[3], seed=3, priority=2))
    decoder.submit(request("soon", PROMPTS[2], seed=2, priority=1))
    assert decoder.abort(["gone"]) == 3 and not decoder.table.live
    found = finish(decoder)
    assert list(found) == [("soon", 0), ("late", 0)]
    alone = decoder_of(model)
    for name, number in (("soon", 2), ("late", 3)):
        alone.submit(request(name, PROMPTS[number], seed=number))
    assert_equal(found, finish(alone))


# ---------------------------------------------------------------- new weights


@pytest.mark.parametrize("recompute", [False, True])
def test_every_token_has_the_version_that_made_it(recompute: bool) -> None:
    """Rows of different counts at two swaps. Each sample alone, with the swaps behind just its tokens, is the same."""
    states = [model_of(seed=seed).state_dict() for seed in range(3)]
    model = model_of()
    decoder = decoder_of(model, 5, recompute=recompute)
    asked = [request(f"g{n}", prompt, (0,), seed=n, delta_tokens=9) for n, prompt in enumerate(PROMPTS)]
    for one in asked:
        decoder.submit(one)
    parts: dict[tuple[str, int], list[GenDelta]] = defaultdict(list)
    for version in (1, 2, 3):
        for _ in range(7 if version < 3 else 100):
            for item in decoder.step():
                parts[item.id, item.index].append(item)
        if version < 3:
            decoder.swap(version, partial(model.load_state_dict, states[version]))
    found = {key: join_deltas(deltas) for key, deltas in parts.items()}
    assert len(found) == 4 and all(len(item.runs) == 3 for item in found.values())
    assert len({item.runs for item in found.values()}) > 1
    for one in asked:
        other = model_of()
        alone = decoder_of(other, recompute=recompute)
        alone.submit(one)
        deltas: list[GenDelta] = []
        for version, count in found[one.id, 0].runs:
            if version:
                alone.swap(version, partial(other.load_state_dict, states[version]))
            deltas += [delta for _ in range(count) for delta in alone.step()]
        assert_equal({one.id: join_deltas(deltas)}, {one.id: found[one.id, 0]})


# ---------------------------------------------------------------- which drafts, and when


def test_a_draft_follows_the_longest_match() -> None:
    assert find_draft("xabcd..yabcz..abc", 4) == "z..a"  # the later one of two
    assert find_draft("abcX.bcY.abc", 1) == "X"  # three characters before two
    assert find_draft("aaaa", 3) == "aaa"
    assert find_draft("abab", 5) == "ababa"
    assert find_draft("ab", 3) == find_draft("", 3) == find_draft("abcabc", 0) == ""


def lines_of(*rates: float, draft: int = 7) -> list[Line]:
    lines = []
    for rate in rates:
        line = Line(request("a", [1]), rate)
        line.draft = "x" * draft
        lines.append(line)
    return lines


def test_a_width_pays_by_acceptance_and_cost() -> None:
    drafter = Drafter(7)
    assert drafter.choose_width(lines_of(0.95)) == 7
    assert drafter.choose_width(lines_of(0.05)) == 0
    assert 0 < drafter.choose_width(lines_of(0.5)) < 7
    assert drafter.choose_width([*lines_of(0.95), *lines_of(0.0, draft=0) * 63]) == 0  # 64 rows wait for one
    assert drafter.choose_width(lines_of(0.95, draft=2)) == 2


def test_costs_are_measured_and_forgotten() -> None:
    drafter = Drafter(7)
    lanes, requests = [0], [request("a", [5, 6, 7, 8, 5, 6, 7], max_new_tokens=10**6)]

    def step(width: int, seconds: float, tokens: list[int]) -> None:
        drafter.propose(lanes, requests)
        drafter.learn(lanes, [tokens], width, seconds)

    for seconds in (1.0, 9.0, 1.0):  # the median counts
        step(0, seconds, [8])
    for width in (7, 3, 1, 2, 4, 5, 6):
        step(width, 1.0 + width, [1, 1])  # one more place takes as long as the first
        assert drafter.choose_width(lines_of(0.9)) not in (width, 7)
    assert drafter.choose_width(lines_of(0.9)) == 0
    for _ in range(1000):
        step(0, 1.0, [1])
    assert drafter.choose_width(lines_of(0.9)) > 0


def test_drafts_that_are_not_fed_are_compared() -> None:
    drafter = Drafter(4)
    requests = [request("a", [5, 6, 7, 8, 9, 5, 6], max_new_tokens=100)]
    rates = []
    for token in (7, 8, 9, 5, 6, 7, 1):
        drafter.propose([0], requests)
        drafter.learn([0], [[token]], 0, 1.0)
        rates.append(drafter._lines[0].rate)
    assert rates[:6] == sorted(rates[:6]) and rates[0] > START_RATE and rates[6] < rates[5]
    assert (drafter.drafted, drafter.accepted) == (0, 0)


def test_text_without_repetition_is_decoded_by_plain_steps() -> None:
    """At temperature 2 nothing repeats for long: the drafter gives up, and the next samples begin so."""
    model = model_of()
    decoder = decoder_of(model, 5)
    decoder.drafter = Drafter(5)
    for number in range(40):
        decoder.submit(request(f"g{number}", [number % 40], seed=number, temperature=4.0, max_new_tokens=60))
    finish(decoder)
    assert decoder.drafter.drafted < 0.05 * decoder.generated_tokens


# ---------------------------------------------------------------- the start


def test_the_self_check_tries_right_and_wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    build = partial(build_decoder, slots=4, max_prompt=20, max_new=10, recompute=False, where="m", drafts=3)
    drafter = build(model_of("a window")).decoder.drafter
    assert drafter is not None and drafter.most == 3 and drafter.drafted == 0
    real = SlotMemory._mask

    def leaking(self: Any, places: Any, positions: Any) -> Any:
        if positions.shape[-2] > 1 and places.dim() == 1 and len(places) > positions.shape[-2]:
            positions = positions.amax(-2, keepdim=True).expand_as(positions)  # a draft sees what follows it
        return real(self, places, positions)

    monkeypatch.setattr(SlotMemory, "_mask", leaking)
    with pytest.raises(ConfigError, match=r"speculative_tokens = 3: log-probs .* differ") as caught:
        build(model_of())
    assert caught.value.code == "config.conflict"


def test_a_cache_that_cannot_forget_is_refused() -> None:
    shape = Lfm2Config(**(SIZES | {"layer_types": ["conv", "full_attention"]}))
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()
    with pytest.raises(ConfigError, match="cannot forget a wrong draft") as caught:
        build_decoder(model, slots=2, max_prompt=8, max_new=8, recompute=False, where="m", drafts=3)
    assert (caught.value.code, caught.value.remedy) == ("config.conflict", "set producers.speculative_tokens = 0")
