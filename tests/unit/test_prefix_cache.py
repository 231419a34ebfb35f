"""K and V that outlive their samples: the next turns of a session get the tokens of a whole prefill, for less work."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from asyncrl.engine import GenRequest
from asyncrl.runtime.device import Device
from producers.engines.hf import attention
from producers.engines.hf.cache_interface import Prompt
from producers.engines.hf.decode_thread import DecodeThread
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.prefix_cache import SHORTEST, PrefixCache
from producers.engines.hf.sleep import HFSleeping, RestingWeights
from producers.engines.hf.slot_cache import SlotMemory
from producers.engines.hf.slots import SlotTable

CPU = torch.device("cpu")
SLOTS, MAX_LEN, TURNS = 3, 96, 4
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
}
KINDS = {
    "all tokens": (Qwen3Config(**SIZES), "sdpa"),
    "a window": (MistralConfig(**SIZES, sliding_window=11), "sdpa"),
    "eager": (Qwen3Config(**SIZES), "eager"),
}


def model_of(kind: str, seed: int = 0) -> Any:
    config, implementation = KINDS[kind]
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def decoder_of(model: Any, *, most_tokens: int = 0, recompute: bool = False, part_tokens: int = MAX_LEN) -> Decoder:
    memory = SlotMemory(model, slots=SLOTS, max_len=MAX_LEN, device=CPU, where="", part_tokens=part_tokens)
    attention.install(model)
    prefixes = PrefixCache(memory, most_tokens=most_tokens) if most_tokens else None
    table = SlotTable(SLOTS, max_new_tokens=20, device=CPU)
    decoder = Decoder(memory, table, recompute=recompute, prefixes=prefixes)
    decoder.swap(0, lambda: None)
    return decoder


def request(session: int, turn: int, prompt: Any, *, tokens: int = 6) -> GenRequest:
    ids = np.asarray(prompt, np.int32)
    return GenRequest(f"{session}:{turn}", ids, (0,), 100 * session + turn, tokens, stop_ids=(7,))


def play(decoder: Decoder, sessions: int = 5) -> dict[str, Any]:
    """Sessions of four turns at once, of different lengths: each turn is the context of the next one."""
    contexts: dict[str, Any] = {}
    for session in range(sessions):
        prompt = np.arange(3, 10 + 2 * (session // 2)) % 40
        contexts[f"{session}:0"] = prompt
        decoder.submit(request(session, 0, prompt))
    found: dict[str, Any] = {}
    for _ in range(2000):
        for item in decoder.step():
            found[item.id] = item
            session, turn = map(int, item.id.split(":"))
            if turn + 1 < TURNS:
                observed = np.arange(1 + session) + turn
                context = np.concatenate([contexts[item.id], item.token_ids, observed])
                contexts[f"{session}:{turn + 1}"] = context
                decoder.submit(request(session, turn + 1, context))
        if decoder.idle:
            return found
    raise AssertionError("the decoder does not come to an end")


@pytest.mark.parametrize("part_tokens", [MAX_LEN, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_turns_are_those_of_a_whole_prefill(kind: str, part_tokens: int) -> None:
    plain = play(decoder_of(model_of(kind)))
    decoder = decoder_of(model_of(kind), most_tokens=1000, part_tokens=part_tokens)
    found = play(decoder)
    assert found.keys() == plain.keys() and len(found) == 5 * TURNS
    for name, item in found.items():
        np.testing.assert_array_equal(item.token_ids, plain[name].token_ids)
        np.testing.assert_allclose(item.logprobs, plain[name].logprobs, atol=1e-5)
    assert decoder.prefixes is not None
    assert decoder.prefixes.reused > 3 * decoder.prefixes.computed


@pytest.mark.parametrize("recompute", [False, True])
def test_a_long_prompt_is_computed_in_parts(recompute: bool) -> None:
    found = []
    for part_tokens in (MAX_LEN, 7):
        model = model_of("all tokens")
        decoder = decoder_of(model, recompute=recompute, part_tokens=part_tokens)
        for session, length in enumerate((50, 3, 20)):
            decoder.submit(request(session, 0, np.arange(length) * 7 % 40, tokens=8))
        decoder.step()
        decoder.swap(1, partial(model.load_state_dict, model_of("all tokens", seed=1).state_dict()))
        found.append({item.id: item for _ in range(20) for item in decoder.step()})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 3
    for name, item in found[0].items():
        np.testing.assert_array_equal(item.token_ids, found[1][name].token_ids)
        np.testing.assert_allclose(item.logprobs, found[1][name].logprobs, atol=1e-5)


def test_of_a_session_only_what_is_new_is_computed() -> None:
    decoder = decoder_of(model_of("all tokens"), most_tokens=1000)
    assert decoder.prefixes is not None
    first = list(range(10, 30))
    decoder.submit(request(0, 0, first))
    (item,) = [delta for _ in range(20) for delta in decoder.step()]
    assert decoder.prefixes.computed == 19  # the last token of a prompt is fed by the first step
    decoder.submit(request(0, 1, [*first, *item.token_ids, 1, 2, 3]))
    decoder.step()
    assert decoder.prefixes.computed == 19 + 3  # the last sampled token, and the observation without its last one
    assert decoder.prefixes.reused == len(first) + len(item.token_ids) - 1


def test_equal_prompts_are_computed_once() -> None:
    decoder = decoder_of(model_of("all tokens"), most_tokens=1000)
    for session in range(8):
        decoder.submit(request(session, 0, range(10, 30)))
    decoder.step()
    assert decoder.prefixes is not None
    assert (decoder.prefixes.computed, decoder.prefixes.reused) == (19, 7 * 19)
    decoder.submit(request(9, 0, [*range(10, 26), 1, 2, 3, 4]))  # the same system prompt, another question
    for _ in range(40):
        decoder.step()
    assert decoder.prefixes.computed == 19 + 3


def test_nothing_is_taken_from_other_weights() -> None:
    """A swap forgets; a sample that lives through it is not kept, unless its K and V are computed again."""
    for recompute in (False, True):
        model = model_of("all tokens")
        decoder = decoder_of(model, most_tokens=1000, recompute=recompute)
        assert decoder.prefixes is not None
        prompt = list(range(10, 30))
        decoder.submit(request(0, 0, prompt))
        decoder.step()
        other = model_of("all tokens", seed=1).state_dict()
        decoder.swap(1, partial(model.load_state_dict, other))
        assert decoder.prefixes.held_tokens == 0
        (item,) = [delta for _ in range(20) for delta in decoder.step()]
        assert (decoder.prefixes.held_tokens > 0) == recompute
        again = request(0, 1, [*prompt, *item.token_ids, 1, 2])
        decoder.submit(again)
        (turn,) = [delta for _ in range(20) for delta in decoder.step()]
        fresh = decoder_of(model)
        fresh.swap(1, lambda: None)
        fresh.submit(again)
        (wanted,) = [delta for _ in range(20) for delta in fresh.step()]
        np.testing.assert_array_equal(turn.token_ids, wanted.token_ids)
        np.testing.assert_allclose(turn.logprobs, wanted.logprobs, atol=1e-5)


def test_an_engine_that_sleeps_holds_no_k_and_v(tmp_path: Path) -> None:
    model = model_of("all tokens")
    decoder = decoder_of(model, most_tokens=400)
    play(decoder, 2)
    assert decoder.prefixes is not None and decoder.prefixes.held_tokens
    weights = RestingWeights(model.parameters(), Device.find("cpu"), tmp_path)

    async def sleep() -> None:
        thread = DecodeThread([decoder], deliver=lambda _: None, on_failure=lambda _: None)
        try:
            await HFSleeping(thread, decoder, weights).sleep()
        finally:
            await thread.close(grace_s=10)

    asyncio.run(asyncio.wait_for(sleep(), 60))
    assert not decoder.prefixes.held_tokens


def test_the_entry_that_was_used_longest_ago_goes_first() -> None:
    memory = SlotMemory(model_of("all tokens"), slots=SLOTS, max_len=MAX_LEN, device=CPU, where="")
    cache = PrefixCache(memory, most_tokens=30)

    def prompt(first: int, count: int) -> Prompt:
        return Prompt(np.arange(first, first + count, dtype=np.int32) % 40)

    with torch.inference_mode():
        cache.prefill([prompt(0, 10), prompt(10, 10), prompt(20, 10)])
        cache.prefill([prompt(0, 12)])  # takes the place of the first one, which it begins with
        assert (cache.held_tokens, cache.reused) == (22, 10)  # the second one had to go
        cache.prefill([prompt(20, 10)])
        cache.prefill([prompt(30, 9)])
        assert cache.held_tokens == 19  # the third one was used after the first
        cache.prefill([prompt(5, 31)])  # longer than everything that may be held
        assert (cache.held_tokens, cache.reused) == (19, 20)
        cache.prefill([prompt(30, SHORTEST - 1)])  # too short to begin with, and an entry begins with it
    assert (cache.held_tokens, cache.reused) == (19, 20)
