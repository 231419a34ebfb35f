"""A whole run with int8 weights: its engine `hf` computes with the decoded weights, and the learner with its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e_run import Run
from transformers import AutoModelForCausalLM

from learners.batch.archive import read_step
from weightsync.encoding.quantised import dequantise, is_matrix, quantise

pytestmark = [pytest.mark.long, pytest.mark.slow]
SETTINGS = (
    "weightsync.dtype=int8",
    "log.archive=true",
    "learner.steps=3",
    "learner.ranks=2",
    "producers.count=1",
    "buffer.max_staleness=0",  # the batch of step 3 is of version 2, which has a checkpoint
)


def models(folder: Path) -> tuple[Any, Any]:
    """The weights of a folder, and what a generator gets of them."""
    full, decoded = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        for name, value in decoded.named_parameters():
            if is_matrix(name, tuple(value.shape)):
                value.copy_(dequantise(*quantise(value, "int8"), value.dtype))
    return full.eval(), decoded.eval()


@torch.inference_mode()
def gaps(model: Any, run: Run, version: int) -> np.ndarray[Any, Any]:
    """Differences of recorded log-probs of a version from those of a plain forward."""
    found = []
    batch, _ = read_step(run.dir / "archive", version + 1)
    for group in batch.groups:
        for sample in group.samples:
            assert sample.runs == ((version, len(sample.response)),)
            ids = torch.tensor(np.concatenate([group.prompt_ids, sample.response]).astype(np.int64))
            logits = model(input_ids=ids[None]).logits[0, len(group.prompt_ids) - 1 : -1]
            own = torch.log_softmax(logits, -1).gather(1, ids[len(group.prompt_ids) :, None])[:, 0]
            found.append(own.numpy() - sample.logprobs)
    return np.concatenate(found)


def test_log_probs_are_those_of_the_decoded_weights(run: Run, tiny_model: Path, figure: Any) -> None:
    done = run.launch(*SETTINGS)
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"]) == (0, 0, 0), audit
    full, decoded = models(tiny_model)
    assert np.abs(gaps(decoded, run, 0)).max() < 1e-5
    gap = np.abs(gaps(full, run, 0))
    assert gap.mean() > 1e-4
    done = run.command("export", str(run.dir), "--step", "2", "--out", str(run.folder / "second"))
    assert done.returncode == 0, done.stdout
    later_full, later = models(run.folder / "second")
    assert np.abs(gaps(later, run, 2)).max() < 1e-5
    assert np.abs(gaps(later_full, run, 2)).mean() > 1e-4
    lines = run.lines("metrics/learner.jsonl")
    assert lines[0]["lag/0/logprob_gap_mean"] == pytest.approx(gap.mean(), rel=1e-3), "the correction sees the gap"
    rounds = [line for line in run.lines("metrics/weightsync.jsonl") if line["state"] == "committed"]
    plain = sum(value.numel() for value in full.parameters()) * 4
    figure(f"gap {gap.mean():.2g} nats per token, {rounds[0]['round_bytes'] / plain:.2f} of the bytes of float32")
    assert rounds[0]["round_bytes"] < 0.6 * plain
    done = run.command("replay", str(run.dir), "--out", str(run.folder / "again"), "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["equal"] == found["checked"] == 3, found
