"""Cost of routing replay: bytes per token on the wire, coding, a decode step of the hf engine, a step of the learner.

Run: `python benchmarks/bench_routing.py`. Bytes are those of the shapes of public models. Times are of one core
(`process_time`: other processes do not count) with a random Qwen3-MoE of 4 layers and 64 experts, of which each token
goes through 8: with recording or replay against without, in turns; figures are medians of the ratio within a round.
Results go to benchmarks/results/routing.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bench_support import compare, timed, write

from asyncrl.engine import GenRequest
from asyncrl.runtime.routers import Routers
from asyncrl.wire import pack_experts, unpack_experts
from learners.batch.micro_batches import Sample, packed_row
from learners.models.policy_model import PolicyModel
from producers.engines.hf.loading import build_decoder

#: Experts of a layer, layers, experts of a token.
MODELS = {
    "Mixtral-8x7B": (8, 32, 2),
    "Qwen3-30B-A3B": (128, 48, 8),
    "DeepSeek-V3": (256, 61, 8),
    "Kimi-K2": (384, 61, 8),
}
TOKENS = 1024


def wire(experts: int, layers: int, chosen: int, rounds: int) -> dict[str, float]:
    """Bytes per token, next to the 8 of its id and log-prob, and the time of both ways per thousand tokens."""
    dtype = np.uint8 if experts <= 256 else np.int16
    given = np.random.default_rng(0).integers(0, experts, (TOKENS - 1, layers, chosen)).astype(dtype)
    packed = pack_experts([given])
    both = sorted(timed(lambda: unpack_experts(pack_experts([given]), [TOKENS])) for _ in range(rounds))
    return {
        "bytes_per_token": round(sum(array.nbytes for array in packed.values()) / TOKENS, 1),
        "code_ms_per_1000": round(1e6 * both[len(both) // 2] / TOKENS, 3),
    }


def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    mixture = {"num_experts": 64, "num_experts_per_tok": 8, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=512, **shape, **heads, **mixture)).eval()


def decode(rounds: int) -> dict[str, float]:
    """64 steps of 16 samples, seated and finished."""

    def run(routers: Any, made: Any) -> Callable[[], None]:
        built = build_decoder(made, slots=16, max_prompt=8, max_new=64, recompute=False, where="m", routers=routers)
        built.decoder.swap(1, lambda: None)

        def steps() -> None:
            ids = np.arange(3, 9, dtype=np.int32)
            built.decoder.submit(GenRequest("a", ids, tuple(range(16)), 1, 64, experts=routers is not None))
            while not built.decoder.idle:
                built.decoder.step()

        return steps

    with_routers = model()
    return compare(run(None, model()), run(Routers(with_routers), with_routers), rounds)


def step(rounds: int) -> dict[str, float]:
    """Log-probs of a packed row of 1024 tokens, forward and backward."""
    policy = PolicyModel(model())
    policy.routers = Routers(policy.model)
    ones = np.ones(TOKENS // 4 - 8)
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(64), (TOKENS // 4 - 1, 4, 1)), axis=2)[..., :8]
    tokens = np.arange(TOKENS // 4, dtype=np.int32) % 500
    row = packed_row(
        [Sample(tokens, 8, ones.astype("f4"), ones.astype("u1"), 1.0, n, experts=experts) for n in range(4)]
    )
    names = ("input_ids", "position_ids", "positions", "targets")
    ids, places, positions, targets = (torch.from_numpy(getattr(row, name).astype(np.int64)) for name in names)
    chosen = torch.tensor(row.experts).view(TOKENS, -1)

    def run(given: torch.Tensor | None) -> None:
        found: Any = policy(ids[None], places[None], positions, targets, experts=given)
        torch.autograd.grad(found[0].sum(), list(policy.parameters()), allow_unused=True)

    return compare(lambda: run(None), lambda: run(chosen), rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    figures = {name: wire(*shape, rounds) for name, shape in MODELS.items()}
    figures |= {"decode": decode(rounds), "step": step(rounds)}
    what = "routing replay: bytes per token, coding, decode step of the hf engine, step of the learner"
    write(
        ROOT / "benchmarks/results/routing.json",
        what,
        {"model": "Qwen3-MoE, 4 layers, 8 of 64 experts", "tokens": TOKENS},
        figures,
    )


if __name__ == "__main__":
    main()
