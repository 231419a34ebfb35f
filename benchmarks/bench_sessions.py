"""Turns per second of sessions on the hf engine, with and without its prefix cache.

    python benchmarks/bench_sessions.py [--rounds 3]

A small Qwen3 (4 layers of width 256, random weights, float32, one thread) plays sessions in the decode loop of the
engine: a system prompt of 200 tokens that all share, then turns of 32 sampled tokens, each after an observation of 64.
Sessions of a group begin with the same prompt; all are played at once, with and without the cache in turns within each
round. How many turns have equal tokens is reported (two orders of summation may differ in a rounding error). Writes
benchmarks/results/sessions.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from asyncrl.engine import GenRequest  # noqa: E402, RUF100
from producers.engines.hf import attention  # noqa: E402, RUF100
from producers.engines.hf.decoder import Decoder  # noqa: E402, RUF100
from producers.engines.hf.prefix_cache import PrefixCache  # noqa: E402, RUF100
from producers.engines.hf.slot_cache import SlotMemory  # noqa: E402, RUF100
from producers.engines.hf.slots import SlotTable  # noqa: E402, RUF100

RESULTS = ROOT / "benchmarks" / "results" / "sessions.json"
GROUPS, GROUP_SIZE, TURNS = 2, 8, 8
SYSTEM, QUESTION, OBSERVED, SAMPLED = 200, 30, 64, 32
VOCABULARY = 1024
MAX_LEN = SYSTEM + QUESTION + TURNS * (OBSERVED + SAMPLED)


def make_decoder(model: Any, *, cached: bool) -> Decoder:
    """A decoder with a slot for every session."""
    slots, device = GROUPS * GROUP_SIZE, torch.device("cpu")
    memory = SlotMemory(model, slots=slots, max_len=MAX_LEN, device=device, where="")
    prefixes = PrefixCache(memory, most_tokens=slots * MAX_LEN) if cached else None
    table = SlotTable(slots, max_new_tokens=SAMPLED, device=device)
    decoder = Decoder(memory, table, recompute=False, prefixes=prefixes)
    decoder.swap(0, lambda: None)
    return decoder


def play(decoder: Decoder) -> tuple[float, dict[str, list[int]]]:
    """Seconds, and the tokens of every turn."""
    system = np.arange(SYSTEM) * 7 % VOCABULARY
    contexts: dict[str, Any] = {}
    found: dict[str, list[int]] = {}

    def ask(session: int, turn: int, context: Any) -> None:
        name = f"{session}:{turn}"
        contexts[name] = context.astype(np.int32)
        seed = 1000 * session + turn
        decoder.submit(GenRequest(name, contexts[name], (0,), seed, SAMPLED, stop_ids=()))

    began = time.perf_counter()
    for session in range(GROUPS * GROUP_SIZE):
        question = (np.arange(QUESTION) + session // GROUP_SIZE) * 11 % VOCABULARY
        ask(session, 0, np.concatenate([system, question]))
    while not decoder.idle:
        for item in decoder.step():
            found[item.id] = item.token_ids.tolist()
            session, turn = map(int, item.id.split(":"))
            if turn + 1 < TURNS:
                observed = (np.arange(OBSERVED) + 3 * turn + session) * 13 % VOCABULARY
                ask(session, turn + 1, np.concatenate([contexts[item.id], item.token_ids, observed]))
    return time.perf_counter() - began, found


def make_model(longest: int) -> Any:
    """Random weights, for contexts of this many tokens, on one thread."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
    shape = Qwen3Config(
        vocab_size=VOCABULARY, num_key_value_heads=4, head_dim=32, max_position_embeddings=longest, **sizes
    )
    model = Qwen3ForCausalLM._from_config(shape, attn_implementation="sdpa").eval()
    attention.install(model)
    return model


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    model = make_model(2 * MAX_LEN)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    prompts: dict[bool, int] = {}
    same = total = 0
    for _ in range(rounds):
        tokens = {}
        for cached, all_took in seconds.items():
            decoder = make_decoder(model, cached=cached)
            took, tokens[cached] = play(decoder)
            all_took.append(took)
            if decoder.prefixes is not None:
                prompts = {True: decoder.prefixes.computed, False: decoder.prefixes.computed + decoder.prefixes.reused}
        same += sum(tokens[True][name] == ids for name, ids in tokens[False].items())
        total += len(tokens[False])
    turns = GROUPS * GROUP_SIZE * TURNS
    result = {
        "what": "turns per second of sessions on the hf engine, with and without its prefix cache",
        "command": f"python benchmarks/bench_sessions.py --rounds {rounds}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "setting": {"sessions": GROUPS * GROUP_SIZE, "turns": TURNS, "longest": MAX_LEN, "threads": 1},
        "turns_per_s": {str(cached): round(turns / statistics.median(took), 2) for cached, took in seconds.items()},
        "times": round(statistics.median(a / b for a, b in zip(seconds[False], seconds[True], strict=True)), 2),
        "prefilled_tokens": {str(cached): count for cached, count in prompts.items()},
        "equal_turns": f"{same} of {total}",
        "load_1m": os.getloadavg()[0],
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
