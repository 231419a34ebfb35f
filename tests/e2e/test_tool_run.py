"""Samples of several turns in whole runs of real processes, and a policy that learns to use a tool."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm

from asyncrl.runtime import batch_file
from asyncrl.wire.batch_arrays import decode_batch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
#: Two turns; every other sample begins a second conversation; one in eight breaks in its environment the first time.
#: The producer is killed once when the buffer has turns of unfinished samples.
ENVIRONMENT = """
import pathlib

async def play(chat, row, *, folder):
    first = await chat.say(max_new_tokens=5)
    chat.reward(0.25)
    await chat.say("+1+", max_new_tokens=5)
    if len(first.text) % 2:
        chat.restart("12+34=")
        await chat.say(max_new_tokens=4)
    mark = pathlib.Path(folder) / f"broke-{row['number'] % 8}"
    if row["number"] % 8 == 3 and not mark.exists():
        mark.write_text("")
        raise RuntimeError("the environment broke")
    return {"reward": len(first.text) / 10, "length": float(len(first.text))}
"""


def test_samples_of_several_turns_and_rows_pass_the_whole_pipeline(run, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("ASYNCRL_FAILPOINT", "producer.after_piece:kill:6")
    (run.folder / "once").mkdir()
    monkeypatch.setenv("ASYNCRL_FAILPOINT_ONCE", str(run.folder / "once"))
    (run.folder / "my_envs.py").write_text(ENVIRONMENT)
    rows = [{"prompt": f"{n % 90 + 10}+{n % 7 + 10}=", "number": n} for n in range(64)]
    (run.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "environment.name": "my_envs:play",
        "environment.args": f'{{folder="{run.folder}"}}',
        "learner.steps": 3,
        "log.archive": "true",
        "data.shuffle": "false",
        "producers.checkpoint_tokens": 3,
    }
    done = run.launch(*(f"{key}={value}" for key, value in settings.items()))
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 0, 12)
    history = run.lines("history.jsonl")
    failed = [line for line in history if line["e"] == "lost" and line["why"].startswith("environment.")]
    assert len(failed) == 1
    assert failed[0]["why"].startswith("environment.raised: RuntimeError: the environment broke (my_envs.py:")
    assert list((run.folder / "once").iterdir())
    assert [line for line in history if line["e"] == "continue"]  # turns of the killed producer
    assert {line["why"] for line in history if line["e"] == "discard"} <= {"failed"}  # nothing had to start anew
    assert all(0 < line["observed_share"] < 0.8 for line in run.lines("metrics/learner.jsonl"))
    several = check_archive(run)
    assert several > 0
    assert any(line["rows_mean"] > 1 for line in run.lines("metrics/learner.jsonl"))


def check_archive(run) -> int:  # type: ignore[no-untyped-def]
    """What was trained, token by token; how many samples had two conversations."""
    shown = [int(token) for token in ids_of(run, "+1+")]
    several = 0
    for step in (1, 2, 3):
        found = batch_file.read(batch_file.batch_path(run.dir / "archive", step))
        batch = decode_batch(found.batch, found.payloads)
        assert not batch.invalid
        for sample in (sample for group in batch.groups for sample in group.samples):
            several += bool(sample.rows)
            observed = sample.response[sample.mask == 0].tolist()
            assert observed == shown + (ids_of(run, "12+34=") if sample.rows else [])
            assert (sample.logprobs[sample.mask == 0] == 0).all()
            assert (sample.logprobs[sample.mask == 1] < 0).all()
            ((place, credit),) = sample.turns
            assert credit == 0.25 and sample.mask[place] == 1 and sample.mask[place + 1] == 0
            assert sample.reward == pytest.approx(0.25 + sample.parts["final"])
            assert sample.parts["final"] == pytest.approx(sample.parts["length"] / 10)
            assert np.isfinite(sample.reward)
    return several


def ids_of(run, text: str) -> list[int]:  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer

    path = next(line.split('"')[1] for line in run.config.read_text().splitlines() if line.startswith("path = "))
    return list(Tokenizer.from_file(f"{path}/tokenizer.json").encode(text, add_special_tokens=False).ids)


@pytest.mark.chaos
def test_a_policy_learns_to_call_a_calculator(run) -> None:  # type: ignore[no-untyped-def]
    model, data = run.folder / "model", run.folder / "calculator.jsonl"
    warm.run(
        [sys.executable, "-m", "learners.warm_start.calculator", "--out", str(model), "--data", str(data)],
        cwd=ROOT,
        check=True,
        timeout=900,
    )
    done = run.command(
        "launch",
        "all",
        str(ROOT / "configs" / "tool-calculator.toml"),
        "--plain",
        *words(
            {
                "run.dir": run.dir,
                "model.path": model,
                "data.path": data,
                "learner.steps": 12,
                "log.archive": "true",
                "log.tensorboard": "false",
            }
        ),
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + run.logs()
    assert run.audit()["exit"] == 0
    lines = run.lines("metrics/learner.jsonl")
    rewards = [line["reward_mean"] for line in lines]
    assert len(rewards) == 12
    assert statistics.fmean(rewards[-3:]) >= statistics.fmean(rewards[:2]) + 0.2, rewards
    assert all(line["observed_share"] > 0 for line in lines)
    found = batch_file.read(batch_file.batch_path(run.dir / "archive", 12))
    samples = [sample for group in decode_batch(found.batch, found.payloads).groups for sample in group.samples]
    calling = [sample for sample in samples if sample.mask is not None and not sample.mask.all()]
    assert len(calling) > len(samples) / 2
    assert all((sample.logprobs[sample.mask == 0] == 0).all() for sample in calling)


def words(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
