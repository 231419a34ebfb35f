"""What it would save to send prompts to the engine that holds their prefix, against any engine with a free slot.

    python benchmarks/bench_prefix_routing.py [--rounds 3]

Questions about documents: each prompt is one of `DOCUMENTS` documents and a question. `ENGINES` hf engines, each with
its prefix cache, answer groups of each question under one version of the weights, one engine after the other on one
thread. By "free slots" an engine gets every `ENGINES`-th question in the order of the data, which the documents
follow in turn; by "prefix" it gets all questions about its documents. For documents of each length: tokens of prompts
that were computed, and tokens per second of the slowest engine. Writes benchmarks/results/prefix_routing.json.
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
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bench_sessions import VOCABULARY, make_model  # noqa: E402, RUF100

from asyncrl.engine import GenRequest  # noqa: E402, RUF100
from producers.engines.hf.decoder import Decoder  # noqa: E402, RUF100
from producers.engines.hf.prefix_cache import PrefixCache  # noqa: E402, RUF100
from producers.engines.hf.slot_cache import SlotMemory  # noqa: E402, RUF100
from producers.engines.hf.slots import SlotTable  # noqa: E402, RUF100

RESULTS = ROOT / "benchmarks" / "results" / "prefix_routing.json"
ENGINES, DOCUMENTS, QUESTIONS, GROUP_SIZE = 4, 8, 8, 4
LENGTHS = (64, 256, 1024)
QUESTION, SAMPLED, SLOTS = 24, 64, 16
WAYS = ("free slots", "prefix")


def shares(way: str) -> list[list[tuple[int, int]]]:
    """(document, question) of each engine."""
    data = [(document, question) for question in range(QUESTIONS) for document in range(DOCUMENTS)]
    if way == "prefix":
        return [[row for row in data if row[0] % ENGINES == engine] for engine in range(ENGINES)]
    # Documents in turn would give each engine the same ones by chance: every round begins one engine later.
    placed = [(row, (number + number // DOCUMENTS) % ENGINES) for number, row in enumerate(data)]
    return [[row for row, place in placed if place == engine] for engine in range(ENGINES)]


def answer(model: Any, rows: list[tuple[int, int]], length: int) -> tuple[float, int]:
    """Seconds of an engine for its rows, and the tokens of prompts that it computed."""
    most, device = length + QUESTION + SAMPLED, torch.device("cpu")
    memory = SlotMemory(model, slots=2 * SLOTS, max_len=most, device=device, where="")
    prefixes = PrefixCache(memory, most_tokens=SLOTS * most)
    decoder = Decoder(
        memory, SlotTable(SLOTS, max_new_tokens=SAMPLED, device=device), recompute=False, prefixes=prefixes
    )
    decoder.swap(0, lambda: None)
    waiting = list(rows)
    began = time.perf_counter()
    busy = 0
    while waiting or busy:
        while waiting and busy + GROUP_SIZE <= SLOTS:
            document, question = waiting.pop(0)
            text = (np.arange(length) * (2 * document + 3)) % VOCABULARY
            asked = (np.arange(QUESTION) * 11 + 131 * question) % VOCABULARY
            prompt = np.concatenate([text, asked]).astype(np.int32)
            draws = tuple(range(GROUP_SIZE))
            decoder.submit(GenRequest(f"{document}:{question}", prompt, draws, question, SAMPLED, stop_ids=()))
            busy += GROUP_SIZE
        busy -= len(decoder.step())
    return time.perf_counter() - began, prefixes.computed


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    model = make_model(4096)
    sampled = DOCUMENTS * QUESTIONS * GROUP_SIZE * SAMPLED
    found: dict[str, Any] = {}
    for length in LENGTHS:
        speed: dict[str, list[float]] = {way: [] for way in WAYS}
        computed: dict[str, int] = {}
        for _ in range(rounds):  # in turn, so that a slow spell of the machine hits both
            for way in WAYS:
                each = [answer(model, rows, length) for rows in shares(way)]
                speed[way].append(sampled / max(took for took, _ in each))
                computed[way] = sum(count for _, count in each)
        ratio = statistics.median(b / a for a, b in zip(speed[WAYS[0]], speed[WAYS[1]], strict=True))
        found[str(length)] = {
            "computed_prompt_tokens": computed,
            "tokens_per_s": {way: round(statistics.median(all_found)) for way, all_found in speed.items()},
            "ratio": round(ratio, 3),
        }
        print(length, found[str(length)], flush=True)
    result = {
        "what": "prompts to the engine that holds their prefix, against any engine with a free slot",
        "command": f"python benchmarks/bench_prefix_routing.py --rounds {rounds}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "setting": {
            "engines": ENGINES, "documents": DOCUMENTS, "questions": QUESTIONS, "group_size": GROUP_SIZE,
            "question_tokens": QUESTION, "sampled_tokens": SAMPLED, "slots": SLOTS,
        },
        "by_document_tokens": found,
        "load_1m": os.getloadavg()[0],
    }  # fmt: skip
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
