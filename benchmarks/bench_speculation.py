"""Tokens per second of the hf engine with drafts of earlier text (`producers.speculative_tokens`), relative to none.

    python benchmarks/bench_speculation.py [--rounds 5] [--drafts 7] [--steps 150]

A small Qwen3 (4 layers of width 256, float32, one thread). "repetitive": it is trained for some steps on 32 phrases of
16 tokens, each repeated until another one follows (once in 100 tokens), and asked for 64 tokens after a prompt of 48 of
the same kind. "ordinary": random weights, prompts of random tokens. "misleading": the same with a vocabulary of 12, so
that the last tokens always occurred before and say nothing of the next one. Temperature 1, with 1, 8 and 64 slots and
twice as many samples, in the decode loop of the engine, with and without drafts in turns within each round. Times are
of one core (`process_time`: other processes do not count); ratios are medians over rounds. How many samples have equal
tokens is reported (two orders of summation may differ in a rounding error). Writes benchmarks/results/speculation.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100

from asyncrl.engine import GenRequest  # noqa: E402, RUF100
from producers.engines.hf import attention  # noqa: E402, RUF100
from producers.engines.hf.decoder import Decoder  # noqa: E402, RUF100
from producers.engines.hf.slot_cache import SlotMemory  # noqa: E402, RUF100
from producers.engines.hf.slots import SlotTable  # noqa: E402, RUF100
from producers.engines.ngram import Drafter  # noqa: E402, RUF100

RESULTS = ROOT / "benchmarks" / "results" / "speculation.json"
VOCABULARY, PROMPT, ANSWER = 512, 48, 64
PHRASE, CHANGES = 16, 0.01  # tokens of a phrase; how often another one follows
ROWS = (1, 8, 64)
GOAL = 1.3  # on repetitive answers


def make_model(vocabulary: int = VOCABULARY) -> Any:
    """With random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8}
    shape = Qwen3Config(
        vocab_size=vocabulary, num_key_value_heads=4, head_dim=32, max_position_embeddings=1024, **sizes
    )
    return Qwen3ForCausalLM._from_config(shape, attn_implementation="sdpa")


def repeat_phrases(rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens `[rows, length]` of phrases that repeat themselves."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    changes = torch.rand((rows, length), generator=generator) < CHANGES
    for place in range(1, length):
        before = ids[:, place - 1]
        following = before - before % PHRASE + (before + 1) % PHRASE
        ids[:, place] = torch.where(changes[:, place], ids[:, place], following)
    return ids


def train(model: Any, steps: int, *, rows: int = 8, length: int = 32, rate: float = 3e-3) -> float:
    """Teach the model the phrases; the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(1)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * (1 - step / steps)
        ids = repeat_phrases(rows, length, generator)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return loss.item()


def make_decoder(model: Any, rows: int, drafts: int) -> Decoder:
    """A decoder with this many rows."""
    device = torch.device("cpu")
    memory = SlotMemory(model, slots=rows, max_len=PROMPT + ANSWER, device=device, where="")
    table = SlotTable(rows, max_new_tokens=ANSWER, device=device)
    drafter = Drafter(drafts, clock=time.thread_time) if drafts else None  # as the engine's on a CPU
    decoder = Decoder(memory, table, recompute=False, drafter=drafter)
    decoder.swap(0, lambda: None)
    return decoder


def play(decoder: Decoder, prompts: Any, seed: int) -> tuple[float, list[list[int]]]:
    """Tokens per second, and the tokens of every sample."""
    for row, prompt in enumerate(prompts):
        decoder.submit(GenRequest(f"r{row}", prompt, (0,), 1000 * seed + row, ANSWER))
    found: dict[str, list[int]] = {}
    began = time.process_time()
    while not decoder.idle:
        found |= {item.id: item.token_ids.tolist() for item in decoder.step()}
    return len(prompts) * ANSWER / (time.process_time() - began), [found[f"r{row}"] for row in range(len(prompts))]


def compare(model: Any, kind: str, rows: int, *, rounds: int, drafts: int) -> dict[str, Any]:
    """Both ways in turns, `rounds` times after a warm-up."""
    ways = {"without": make_decoder(model, rows, 0), "with": make_decoder(model, rows, drafts)}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    same = drafted = accepted = 0
    for turn in range(rounds + 1):
        generator = torch.Generator().manual_seed(100 + turn)
        ids = torch.randint(0, model.config.vocab_size, (2 * rows, PROMPT), generator=generator)
        if kind == "repetitive":
            ids = repeat_phrases(2 * rows, PROMPT, generator)
        prompts, tokens = ids.int().numpy().astype(np.int32), {}
        drafter: Any = ways["with"].drafter
        if turn == 1:
            drafted, accepted = -drafter.drafted, -drafter.accepted
        for way in sorted(ways, reverse=turn % 2 == 0):
            rate, tokens[way] = play(ways[way], prompts, turn)
            if turn:
                rates[way].append(rate)
        same += (turn > 0) * sum(a == b for a, b in zip(tokens["with"], tokens["without"], strict=True))
    drafted, accepted = drafted + drafter.drafted, accepted + drafter.accepted
    ratios = [new / old for new, old in zip(rates["with"], rates["without"], strict=True)]
    return {
        **{f"{way}_tokens_per_s": round(statistics.median(found), 1) for way, found in rates.items()},
        "times": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
        "drafted_per_token": round(drafted / (rounds * 2 * rows * ANSWER), 2),
        "accepted_share": round(accepted / drafted, 2) if drafted else None,
        "equal_samples": f"{same} of {rounds * 2 * rows}",
    }


def main() -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("drafts", 7), ("steps", 150)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random, small, trained = make_model(), make_model(12), make_model()
    loss = train(trained, given.steps)
    figures: dict[str, dict[str, Any]] = {}
    for kind, model in (("repetitive", trained), ("ordinary", random), ("misleading", small)):
        attention.install(model.eval().requires_grad_(False))
        for rows in ROWS:
            found = compare(model, kind, rows, rounds=given.rounds, drafts=given.drafts)
            figures.setdefault(kind, {})[str(rows)] = found
            print(f"{kind}, {rows} slots: {found}", flush=True)
    reports.write(
        RESULTS,
        "tokens per second of the hf engine with drafts of earlier text, relative to none, by slots",
        setting={"drafts": given.drafts, "prompt": PROMPT, "answer": ANSWER, "loss": round(loss, 3), "threads": 1},
        figures=figures,
        goal=GOAL,
        met={rows: figures["repetitive"][rows]["times"] >= GOAL for rows in figures["repetitive"]},
    )


if __name__ == "__main__":
    main()
