"""Where evaluations show: report, status, the learner's words, curves, the wait at the end, the watch for hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from bare_config import BARE
from synthetic_run import START, check_names, write_run

from asyncrl.audit.evaluation import VERSIONS
from asyncrl.config import Config, parse
from asyncrl.errors import StateLost, Unavailable
from asyncrl.launcher.hang_watch import HangWatch
from asyncrl.metrics.pages import metric_tag
from asyncrl.monitor.status import render
from asyncrl.process_plan.plan import Outcome
from asyncrl.report import write_report
from asyncrl.report.data import load_run, summary
from asyncrl.report.learning import evaluations
from asyncrl.runtime.run_dir import RunDir
from learners.evaluations import LastEvaluations, describe, numbers

LINE = {
    "t": START, "step": 20, "round": 7, "digest": "d", "why": "", "failed": {"reward_failed": 1},
    "missing": {"is being generated": 2}, "sources": {"<b>": 3, "add": 2}, "evaluation_prompts": 8,
    "evaluation_scored": 5, "evaluation_failed": 1, "evaluation_missing": 2, "evaluation_samples": 4,
    "evaluation_s": 4.25, "evaluation_version": 21, "evaluation_version_min": 21, "evaluation_version_max": 21,
    "evaluation_length_mean": 30.0,
    "evaluation_truncated_share": 0.0, "val-core/add/reward/mean@4": 0.5, "val-aux/add/reward/mean@4/se": 0.125,
    "val-core/all/reward/mean@4": 0.4, "val-aux/all/reward/mean@4/se": 0.1, "val-core/<b>/reward/mean@4": 0.3,
    "val-core/add/acc/pass@4/mean": 0.75,
}  # fmt: skip


def config(*overrides: str) -> Config:
    return parse(f"{BARE}\n[evaluation]\npath = 'h.jsonl'\nevery = 2\n", overrides=overrides)


# ---------------------------------------------------------------- report and status


def test_the_report_has_curves_and_accounts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert evaluations(load_run(run)) == "", "no evaluation, no section"
    again = {**LINE, "round": 9, "val-core/all/reward/mean@4": 0.9}
    lines = [LINE, {**LINE, "step": 40, "round": 8}, again]
    (run.metrics / "evaluation.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    check_names(run)
    text = write_report(run).read_text()
    assert "<h3>Evaluation</h3>" in text and "<h3>Evaluations</h3>" in text
    assert "&lt;b&gt;" in text and "<b>&lt;b&gt;" not in text
    shown = evaluations(load_run(run))
    assert "0.900 ± 0.100" in shown and shown.count("<td") == 10 * 6, "2 steps x 3 sources; the last of step 20"
    assert ">21</td>" in shown and "5 of 8 x 4" in shown and "is being generated 2, reward_failed 1" in shown


def test_the_summary_tells_the_first_and_the_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    outcome = Outcome(code=0, reason="done", wall_s=1.0, restarts={})
    assert not any(line.startswith("held out") for line in summary(load_run(run), outcome))
    last = {"step": 40, "round": 8, **dict.fromkeys(VERSIONS, 40)}
    lines = [LINE, {**LINE, **last, "val-core/all/reward/mean@4": 0.9}]
    (run.metrics / "evaluation.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    with (run.metrics / "evaluation.jsonl").open("ab") as file:  # the last ones were made again after a kill
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    told = [line for line in summary(load_run(run), outcome) if line.startswith("held out")]
    assert told == [
        "held out  mean@4 0.400 (version 21) -> 0.900 (version 40), 2 evaluations; 6 prompts failed or missing"
    ]


def test_status_says_what_runs() -> None:
    answer = {
        "ledger": {"issued": 2},
        "store": "sqlite",
        "version": 20,
        "total_groups": 8,
        "evaluation": {
            "running": "of step 20: 5 of 8 prompts are over, 4 s of 600 s",
            "failed": 1,
            "left": {"is being generated": 2},
            "last": {},
        },
    }
    text = render({"buffer": answer})
    assert "evaluation of step 20: 5 of 8 prompts are over, 4 s of 600 s (failed 1; left: is being generated 2)" in text
    assert "evaluation" not in render({"buffer": {**answer, "evaluation": {"running": "", "last": {}}}})


def test_names_in_tensorboard() -> None:
    assert metric_tag("val-core/add/reward/mean@4") == "val-core/add/reward/mean@4"
    assert metric_tag("evaluation_missing") == "faults/evaluation_missing"


# ---------------------------------------------------------------- the learner


class Buffer:
    """Evaluations that end when the test says so."""

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []
        self.running = ""
        self.error: Exception | None = None

    def evaluations(self, *, seen: int) -> tuple[list[dict[str, Any]], str]:
        if self.error is not None:
            raise self.error
        return [line for line in self.ended if line["round"] > seen], self.running


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def watch(buffer: Buffer, *overrides: str) -> tuple[LastEvaluations, list[tuple[int, dict[str, float]]], Clock]:
    seen: list[tuple[int, dict[str, float]]] = []
    clock = Clock()
    found = LastEvaluations(
        config(*overrides),
        ask=buffer.evaluations,
        clock=clock,
        sleep=clock.sleep,
        track=lambda values, step: seen.append((step, values)),
    )
    return found, seen, clock


def test_each_is_told_once_at_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    buffer = Buffer()
    last, seen, _ = watch(buffer)
    last.poll()
    assert seen == []
    buffer.ended.append(LINE)
    last.poll()
    last.poll()
    assert [step for step, _ in seen] == [21] and seen[0][1]["val-core/add/reward/mean@4"] == 0.5
    assert "round" not in seen[0][1]
    assert capsys.readouterr().out.count("evaluation of step 20") == 1


def test_a_buffer_that_is_away_costs_no_step() -> None:
    buffer = Buffer()
    last, _, _ = watch(buffer)
    for error in (Unavailable("net.unreachable", "away"), StateLost("buffer.lost_state", "forgot")):
        buffer.error = error
        last.poll()
        with pytest.raises(type(error)):
            last.describe_pending()


def test_the_end_waits_for_the_last_one_and_not_for_ever() -> None:
    buffer = Buffer()
    buffer.running = "of step 4: 0 of 8 prompts are over"
    last, _, clock = watch(buffer, "evaluation.timeout_s=50")
    assert last.describe_pending() == "the evaluation of step 4: 0 of 8 prompts are over" and clock.now == 0.5
    buffer.running = ""
    assert last.describe_pending() == ""
    buffer.running = "of step 4: hangs"
    while last.describe_pending():
        assert clock.now < 200
    assert 130 <= clock.now < 132, "two evaluations and 30 s"


def test_without_evaluations_nothing_is_asked() -> None:
    buffer = Buffer()
    buffer.error = AssertionError("asked")
    last, _, _ = watch(buffer, "evaluation.every=0", "evaluation.at_end=false")
    last.poll()
    assert last.describe_pending() == ""


def test_its_words() -> None:
    text = describe(LINE)
    assert text.startswith("evaluation of step 20: add mean@4 0.500 (se 0.125), all mean@4 0.400 (se 0.100)")
    assert text.endswith("5 of 8 prompts, version 21, 4.2 s; failed: reward_failed 1; missing: is being generated 2")
    assert describe({**LINE, "why": "time"}).endswith("(ended early: time)")
    assert "digest" not in numbers(LINE) and numbers(LINE)["evaluation_missing"] == 2.0


# ---------------------------------------------------------------- hangs


def test_waiting_for_the_last_evaluation_is_no_hang(tmp_path: Path) -> None:
    now = [0.0]
    status = {"version": 4, "evaluation": {"running": "of step 4: 1 of 8"}, "waiting_for": "nobody"}
    limits = config("run.hang_timeout_s=10", "run.start_timeout_s=10")
    hang = HangWatch(RunDir(tmp_path).create(), limits, clock=lambda: now[0], ask=lambda _: status)
    now[0] = 11
    assert hang.look() == "" and hang.look() == ""
    now[0] = 22
    status["version"] = 3  # a step is still to come: an evaluation is no excuse
    assert hang.look().startswith("no step for 11 s")
    status.update(version=4, evaluation={"running": ""})
    now[0] = 23
    assert hang.look().startswith("no step for 12 s")
