"""sft, dpo, kto and reward models as real processes: rows through the same buffer, by the same command."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_run import Run
from safetensors.numpy import load_file
from vision_models import vision_folder

from asyncrl.demo import shapes

pytestmark = pytest.mark.slow

ROWS = 24


def on_rows(run: Any, mode: str, *settings: str, rows: list[dict[str, Any]] | None = None) -> list[str]:
    """Write rows for the mode; the words of the command."""
    answers = [{"prompt": f"{n + 10}+{n % 7}=", **answer_of(mode, n)} for n in range(ROWS)] if rows is None else rows
    path = run.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in answers))
    return on_file(run, mode, path, *settings)


def on_file(run: Any, mode: str, path: Path, *settings: str) -> list[str]:
    """The words of the command for rows of the mode."""
    every = [
        f"learner.mode={mode}",
        "producers.engine=dataset",
        "producers.count=1",
        f"data.path={path}",
        f"sampling.group_size={1 if mode in ('sft', 'kto') else 2}",
        "sampling.max_new_tokens=8",
        "data.epochs=2",
        "buffer.batch_groups=8",
        "learner.optim.lr=3e-3",
        *settings,
    ]
    text = run.config.read_text()
    run.config.write_text(text.replace('[[reward]]\nfunction = "my_rewards:length_reward"\n', ""))
    return ["launch", "all", str(run.config), *(word for setting in every for word in ("--set", setting))]


def answer_of(mode: str, number: int) -> dict[str, str]:
    right = str(number + 10 + number % 7)
    return {"response": right} if mode == "sft" else {"chosen": right, "rejected": f"{number % 10}-"}


def complete(run: Any, *, steps: int) -> list[dict[str, Any]]:
    """The run's lines of metrics, after its promises."""
    audit = run.audit()
    assert audit["exit"] == 0, audit
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, steps * 8)
    assert audit["spans"] == audit["spans_matched"] > 0, "every row has the digest of the data"
    assert run.living() == []
    lines = {line["step"]: line for line in run.lines("metrics/learner.jsonl")}
    assert sorted(lines) == list(range(1, steps + 1))
    assert all(0 <= line["lag_max"] <= 2 for line in lines.values()), "no further ahead than pipeline_depth"
    return [lines[step] for step in sorted(lines)]


def test_sft_trains_every_row_so_often_and_sets_bad_ones_aside(run: Any) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{n + 10}+{n % 7}=", **answer_of("sft", n)} for n in range(ROWS - 3)]
    rows += [{"prompt": "1+1="}, {"prompt": "1+1=", "response": "x" * 40}, {"prompt": "1+1=", "response": 3}]
    done = run.command(*on_rows(run, "sft", rows=rows))
    assert done.returncode == 0, done.stdout + run.logs()
    lines = complete(run, steps=6)  # ceil(2 * 24 / 8)
    assert {line["role"] for line in run.lines("processes.jsonl")} == {"buffer", "producer", "learner"}
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert not list((run.dir / "weights").glob("*")) if (run.dir / "weights").exists() else True
    dead = [line for line in run.lines("history.jsonl") if line["e"] == "dead"]
    reasons = {line["detail"].split(":")[0] for line in dead}
    assert reasons == {"answer", "too_long"} and len(dead) >= 6, "three bad rows in each of two epochs"
    trained = [g for line in run.lines("history.jsonl") if line["e"] == "commit" for g in line["groups"]]
    assert len(trained) == len(set(trained)) == 48
    assert (run.dir / "export" / "model.safetensors").exists()


@pytest.mark.long
def test_dpo_survives_a_kill_of_its_learner_and_of_its_producer(run: Any) -> None:
    words = on_rows(run, "dpo", "data.epochs=10", "learner.restarts=3", "producers.restarts=3")
    main = run.start(*words)
    run.wait("step 4", lambda: max(run.steps(), default=0) >= 4)
    os.kill(run.pid("learner"), 9)
    os.kill(run.pid("producer"), 9)
    out, _ = main.communicate(timeout=180)
    assert main.returncode == 0, out + run.logs()
    lines = complete(run, steps=30)
    assert lines[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert lines[-1]["pair_accuracy"] > 0.9 and lines[-1]["score_margin"] > 0.05


def test_a_reward_model_learns_and_is_exported_as_a_classifier(run: Any) -> None:
    done = run.command(*on_rows(run, "reward_model", "data.epochs=5"))
    assert done.returncode == 0, done.stdout + run.logs()
    lines = complete(run, steps=15)
    assert lines[-1]["pair_accuracy"] == 1.0 and lines[-1]["loss"] < 0.3
    exported = load_file(run.dir / "export" / "model.safetensors")
    assert exported["score.weight"].shape[0] == 1
    assert "ForSequenceClassification" in (run.dir / "export" / "config.json").read_text()
    right, wrong = (
        judged(run, [answer_of("reward_model", n)[name] for n in range(ROWS)]) for name in ("chosen", "rejected")
    )
    better = [good > bad for good, bad in zip(right, wrong, strict=True)]
    assert all(better), "the export is a judge that tells the answers apart"


def judged(run: Any, answers: list[str]) -> list[float]:
    """What the exported model says of these answers, as `[[judge]]` with kind = "classifier"."""
    from asyncrl.config.sections.reward import JudgeConfig
    from producers.data.tokenizer import Tokenizer
    from producers.rewards.judges.classifier import Classifier
    from producers.rewards.outcome import JudgeSettings, Verdict
    from producers.rewards.sample import RewardSample

    folder = str(run.dir / "export")
    tokenizer = Tokenizer(folder, trust_remote_code=False)
    table = JudgeConfig("j", kind="classifier", model=folder, device="cpu")
    judge = Classifier(JudgeSettings(table, 60.0, folder, "float32", "prompt"))
    samples = []
    for number, text in enumerate(answers):
        prompt = f"{number + 10}+{number % 7}="
        samples.append(
            RewardSample.from_row(
                {},
                prompt=prompt,
                response=text,
                prompt_ids=tokenizer.encode(prompt),
                response_ids=tokenizer.encode_answer(text),
                finish="stop",
            )
        )
    found: dict[int, float] = {}

    def done(place: int, outcome: object) -> None:
        assert isinstance(outcome, Verdict), outcome
        found[place] = outcome.value

    async def whole() -> None:
        await judge.start()
        await judge.score(samples, done)

    asyncio.run(whole())
    return [found[place] for place in range(len(answers))]


LEARNT = {
    "sigmoid": ("dpo", []),
    "smoothed": ("dpo", ["learner.preference.label_smoothing=0.1"]),
    "robust": ("dpo", ["learner.preference.loss=robust", "learner.preference.label_smoothing=0.1"]),
    "ipo": ("dpo", ["learner.preference.loss=ipo", "learner.preference.length_average=true"]),
    "simpo": ("dpo", ["learner.preference.loss=simpo", "learner.preference.beta=2"]),
    "orpo": ("dpo", ["learner.preference.loss=orpo", "learner.preference.beta=0.5"]),
    "kto": ("kto", []),
}


def tastes(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a preference that generalizes: answers of even digits are better than answers of odd ones."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        even, odd = ("".join(map(str, 2 * rng.integers(0, 5, rng.integers(2, 6)) + odd)) for odd in (0, 1))
        found.append({"prompt": f"{rng.integers(10, 99)}+{rng.integers(10, 99)}=", "chosen": even, "rejected": odd})
    return found


def agreement(folder: Path, rows: list[dict[str, Any]]) -> float:
    """Mean difference of the log-probs per token of the two answers of each row, under the weights of a folder."""
    import torch
    from transformers import AutoModelForCausalLM

    from producers.data.tokenizer import Tokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer(str(folder), trust_remote_code=False)
    means: dict[str, list[float]] = {"chosen": [], "rejected": []}
    for row in rows:
        prompt = list(tokenizer.encode(row["prompt"]))
        for name, found in means.items():
            answer = list(tokenizer.encode_answer(row[name]))
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            found.append(float(logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].mean()))
    return float(np.mean(np.array(means["chosen"]) - np.array(means["rejected"])))


@pytest.mark.long
@pytest.mark.chaos_cases("smoothed", "robust", "ipo", "simpo")
@pytest.mark.parametrize("name", LEARNT)
def test_a_preference_is_learnt_and_holds_for_unseen_answers(run: Any, tiny_model: Path, name: str) -> None:
    mode, settings = LEARNT[name]
    rows, unseen = tastes(64, 0), tastes(32, 1)
    if mode == "kto":
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
            for row, good in zip(rows, itertools.cycle((True, False)), strict=False)
        ]
    done = run.command(*on_rows(run, mode, "data.epochs=3", *settings, rows=rows))
    assert done.returncode == 0, done.stdout + run.logs()
    lines = complete(run, steps=24)
    assert lines[-1]["score_margin"] > 0
    before, after = (agreement(folder, unseen) for folder in (tiny_model, run.dir / "export"))
    assert after > before + 0.5, f"{before} to {after} nats per token on held-out rows"


def test_dpo_on_pairs_that_are_generated_and_scored(run: Any) -> None:
    done = run.launch(
        "learner.mode=dpo", "sampling.group_size=2", "learner.steps=4", 'buffer.filters=["zero_variance"]'
    )
    assert done.returncode == 0, done.stdout + run.logs()
    assert run.audit()["trained"] == 16
    lines = run.lines("metrics/learner.jsonl")
    assert len(lines) == 4 and all("score_margin" in line for line in lines)
    assert {line["role"] for line in run.lines("processes.jsonl")} >= {"reward", "weightsync"}


def evens(run: Any) -> list[str]:
    """Settings of a run whose reward is the share of even digits, with 8 held-out prompts before and after it."""
    (run.folder / "my_rewards.py").write_text(
        "def evens(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(one in '02468' for one in solution_str) / max(len(solution_str), 1)\n"
    )
    run.config.write_text(run.config.read_text().replace("length_reward", "evens"))
    rows = [{"prompt": f"{n}+{n}=", "data_source": "held", "reward_model": {"ground_truth": "0"}} for n in range(8)]
    (run.folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"evaluation.path={run.folder}/held.jsonl",
        "evaluation.at_start=true",
        "evaluation.at_end=true",
        "evaluation.samples=8",
        "sampling.max_new_tokens=8",
        "buffer.batch_groups=8",
        "learner.optim.lr=2e-3",
        "log.archive=true",
    ]


def held_out_rewards(run: Any) -> tuple[float, float]:
    """Mean reward of the held-out prompts under the first and under the last weights."""
    first, *_, last = run.lines("metrics/evaluation.jsonl")
    assert (first["evaluation_version"], last["evaluation_version"]) == (0, last["step"])
    return first["val-core/held/reward/mean@8"], last["val-core/held/reward/mean@8"]


def replay(run: Any, *words: str, every: int = 1, also: int = 0) -> None:
    """A replay reaches the weights of the run, bitwise, in every version that was published: every so many, and `also`
    one between."""
    done = run.command("replay", str(run.dir), "--out", str(run.folder / "-".join(("again", *words))), "--json", *words)
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout[done.stdout.index("{") :])
    published = found["last"] // every - found["start"] // every + (found["start"] < also)
    assert found["equal"] == found["checked"] == published, found


@pytest.mark.long
def test_online_dpo_learns_and_is_replayed(run: Any) -> None:
    done = run.launch("learner.algorithm.preset=online_dpo", "learner.steps=16", *evens(run))
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert (audit["exit"], audit["trained"], audit["lost"]) == (0, 128, 0)
    lines = run.lines("metrics/learner.jsonl")
    assert all(0 <= line["lag_max"] <= 2 for line in lines) and lines[-1]["score_margin"] > 0
    before, after = held_out_rewards(run)
    assert after > before + 0.15, f"{before} to {after}"
    replay(run)


@pytest.mark.long
def test_self_play_learns_the_answers_of_rows_and_is_replayed_across_a_restart(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations of 4 versions, a checkpoint within each; the learner is killed in step 7."""
    monkeypatch.setenv("ASYNCRL_FAILPOINT", "learner.after_step:kill:7")
    monkeypatch.setenv("ASYNCRL_FAILPOINT_ONCE", str(run.folder / "once"))
    (run.folder / "once").mkdir()
    settings = evens(run)
    rows = [{"prompt": row["prompt"], "response": row["chosen"]} for row in tastes(64, 0)]
    rows += [{"prompt": "1+1="}, {"prompt": "1+1=", "response": "2" * 40}]
    (run.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings += [
        "learner.algorithm.preset=spin",
        "learner.preference.iteration=4",
        "buffer.max_staleness=3",
        "sampling.group_size=2",
        "sampling.top_p=0.95",  # no log-probs of draws are trained: the rows' answers need no support
        "learner.steps=24",
        "learner.checkpoint_keep=100",
    ]
    done = run.command("launch", "all", str(run.config), *(word for one in settings for word in ("--set", one)))
    assert done.returncode == 0, done.stdout + run.logs()
    assert list((run.folder / "once").iterdir()), "the learner was killed"
    audit = run.audit()
    assert (audit["exit"], audit["trained"], audit["lost"], audit["doubled"]) == (0, 192, 0, 0), audit
    dead = {line["detail"].split(":")[0] for line in run.lines("history.jsonl") if line["e"] == "dead"}
    assert dead == {"answer", "too_long"}
    lines = {line["step"]: line for line in run.lines("metrics/learner.jsonl")}
    new = [step for step in lines if abs(lines[step]["loss"] - np.log(2)) < 1e-6]
    assert sorted(new) == [1, 5, 9, 13, 17, 21], "the reference is the policy at the start of every iteration"
    assert lines[4]["score_margin"] > 0
    # A learner that restarts publishes its version. The bound lets its samples into the next iteration.
    for step in (*range(1, 5), *range(13, 25)):
        assert lines[step]["lag_mean"] == lines[step]["lag_max"] == (step - 1) % 4, "samples of the iteration's start"
    before, after = held_out_rewards(run)
    assert after > before + 0.15, f"{before} to {after}"
    replay(run, every=4, also=6)
    replay(run, "--from", "10", every=4, also=6)


@pytest.fixture
def seeing(tmp_path: Path) -> Iterator[Run]:
    """A run with a model of random weights that takes images."""
    made = Run(tmp_path, vision_folder("qwen2_5_vl"))
    yield made
    made.close()


def colours(mode: str) -> tuple[list[dict[str, Any]], float]:
    """48 rows that ask for the colour in a picture; the loss per token of the best answers without the pictures."""
    asked = (row for row in shapes.prompt_rows(200, 0) if row["extra_info"]["question"] == "what colour?")
    rows = sorted(itertools.islice(asked, 48), key=lambda row: row["reward_model"]["ground_truth"])
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    others = truths[24:] + truths[:24]  # each pair of answers comes in both orders: it says nothing by itself
    assert all(truth != other for truth, other in zip(truths, others, strict=True))
    for row, truth, other in zip(rows, truths, others, strict=True):
        row.update({"response": truth} if mode == "sft" else {"chosen": truth, "rejected": other})
    nats = sum(count * np.log(len(truths) / count) for count in Counter(truths).values())
    return rows, float(nats / sum(len(truth) + 1 for truth in truths))  # a token per letter, and the end


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["sft", "dpo"])
def test_answers_about_pictures_are_learnt_from_the_pictures(seeing: Run, mode: str) -> None:
    rows, blind = colours(mode)
    path = seeing.folder / "pictures.parquet"
    shapes.write_parquet(path, rows)
    done = seeing.command(
        *on_file(seeing, mode, path, "data.epochs=25", "data.max_prompt_tokens=64", "learner.optim.lr=1e-3")
    )
    assert done.returncode == 0, done.stdout + seeing.logs()
    lines = complete(seeing, steps=150)
    losses = [line["loss"] for line in lines]
    assert len(list((seeing.dir / "images").glob("??/*"))) == 48
    if mode == "sft":
        assert losses[0] > 3 and np.mean(losses[-24:]) < 0.5 * blind
    else:
        assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
        assert np.mean([line["pair_accuracy"] for line in lines[-24:]]) > 0.9, "0.5 without the pictures"
