"""What int8 and fp8 weights cost: the distance of their policy from that of the full weights, and bytes per version.

Run: `python benchmarks/bench_quantised_weights.py` (`python -m asyncrl demo --prepare-only` makes the model). Results
go to benchmarks/results/quantised_weights.json.

For each dtype the weights are sent and decoded as by `weightsync.dtype`, answers to held-out prompts are sampled from
them at temperature 1, and both policies say the log-probs of the same tokens, in float32: the behaviour policy mu with
the decoded weights, pi with the full ones. Means are over tokens; ratios pi / mu are what a correction sees.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100

from learners.backends.base import DTYPES  # noqa: E402, RUF100
from weightsync.encoding.quantised import FORMATS, dequantise, is_matrix, quantise, quantised_specs
from weightsync.plan.buckets import TensorSpec

RESULTS = ROOT / "benchmarks" / "results" / "quantised_weights.json"
QUANTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def decoded(model: Any, kind: str) -> Any:
    """A copy of the model with the weights that a generator gets."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if kind in DTYPES:
                parameter.copy_(parameter.to(DTYPES[kind][1]))
            elif is_matrix(name, tuple(parameter.shape)):
                parameter.copy_(dequantise(*quantise(parameter, kind), parameter.dtype))
    return made


def version_bytes(model: Any, kind: str, held: str) -> int:
    """Bytes of the tensors of a version; `held`: dtype of what is not quantised."""
    specs = [(name, DTYPES[held][0], tuple(value.shape)) for name, value in model.named_parameters()]
    return sum(TensorSpec(*spec).nbytes for spec in (quantised_specs(specs, kind) if kind in FORMATS else specs))


@torch.no_grad()
def compare(full: Any, other: Any, inputs: Any, *, new_tokens: int, seed: int, end: int) -> dict[str, float]:
    """Sample from `other` and compare both policies on its tokens."""
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": new_tokens}
    made = other.generate(**inputs, **sampling)
    prompt = inputs["input_ids"].shape[1]
    tokens = made[:, prompt:]
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    ended = (tokens == end).cumsum(1) - (tokens == end).int() > 0  # after the end of an answer

    def table(model: Any) -> torch.Tensor:
        logits = model(input_ids=made, attention_mask=mask, position_ids=positions).logits[:, prompt - 1 : -1]
        return torch.log_softmax(logits.double(), -1)

    mu, pi = table(other), table(full)
    gap = (pi - mu).gather(2, tokens[..., None])[..., 0]
    kept, whole = gap[~ended], gap.masked_fill(ended, 0.0).sum(1)
    ratios = kept.exp().numpy()
    return {
        "tokens": int(kept.numel()),
        "gap_mean": float(kept.abs().mean()),
        "gap_max": float(kept.abs().max()),
        "kl_mean": float((mu.exp() * (mu - pi)).sum(2)[~ended].mean()),
        "entropy_mean": float(-(mu.exp() * mu).sum(2)[~ended].mean()),
        **{f"ratio_{name}": float(np.quantile(ratios, share)) for name, share in QUANTILES.items()},
        **{f"answer_ratio_{name}": math.exp(float(whole.quantile(share))) for name, share in QUANTILES.items()},
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "models" / "running_sum")
    parser.add_argument("--prompts", type=Path, default=ROOT / "runs" / "data" / "running_sum-heldout.jsonl")
    parser.add_argument("--new-tokens", type=int, default=112)
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    rows = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()]
    inputs = tokenizer([row for row in rows for _ in range(args.samples)], return_tensors="pt", padding=True)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    found: dict[str, Any] = {}
    for kind in ("float32", "bfloat16", *FORMATS):
        settings = {"new_tokens": args.new_tokens, "seed": 0, "end": tokenizer.eos_token_id}
        found[kind] = {
            "bytes": {held: version_bytes(model, kind, held) for held in ("float32", "bfloat16")}
            if kind in FORMATS
            else version_bytes(model, kind, kind),
            **compare(model, decoded(model, kind), inputs, **settings),
        }
        print(kind, json.dumps(found[kind]), flush=True)
    names = [name for name, value in model.named_parameters() if is_matrix(name, tuple(value.shape))]
    held = {"parameters": sum(p.numel() for p in model.parameters()), "matrices": len(names)}
    reports.write(RESULTS, "quantised weights against full ones", model=held, prompts=len(rows), dtypes=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
