"""Scoring in a child that can be killed: every misbehaviour of a function is a failure of the right sample."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from producers.rewards.child import make_failure
from producers.rewards.pipe import FunctionSpec, Result
from producers.rewards.sample import NotFinite, RewardSample
from producers.rewards.scorer import Scorer

MODULE = """
import asyncio, os, sys, time

def behave(sample):
    what = sample.response
    if what == "raise": raise ValueError("no good")
    if what == "exit": os._exit(3)
    if what == "sys_exit": sys.exit(4)
    if what == "hang": time.sleep(60)
    if what == "spin":
        while True: pass
    if what == "nan": return float("nan")
    if what == "memory": raise MemoryError
    if what == "print": print("x" * 200_000); print("y" * 200_000, file=sys.stderr)
    if what == "none": return None
    if what == "half": return {"score": 0.5, "pred": "a\\ud83d", "b\\ud83d": 1}
    if what == "half raises": raise ValueError("a\\ud83d")
    if what == "big": return float(sample.row["big"] == 10**30)
    if what == "grandchild":
        if os.fork() == 0:
            time.sleep(60)
        time.sleep(60)
    return {"score": 1.0, "length": len(what)}

def batch(completions, **_):
    if "raise" in completions: raise ValueError("a bad one")
    if "exit" in completions: os._exit(3)
    return [None if text == "skip" else 2.0 for text in completions]

async def slowly(sample):
    if sample.response == "raise": raise ValueError("async")
    await asyncio.sleep(60 if sample.response == "hang" else 0.3)
    return 0.25

def source_only(solution_str, ground_truth): return 10.0
"""


def samples(*responses: str, source: str = "a", **row: Any) -> list[RewardSample]:
    return [
        RewardSample.from_row(
            {"prompt": "p", "data_source": source, **row},
            prompt="p",
            response=text,
            prompt_ids=[1],
            response_ids=[2],
            finish="stop",
        )
        for text in responses
    ]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "user_rewards.py"
    path.write_text(MODULE)
    old = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), old]))
    return path


@pytest.fixture
def scorers() -> Iterator[list[Scorer]]:
    made: list[Scorer] = []
    yield made
    for scorer in made:
        scorer.close()


def start(scorers: list[Scorer], *names: str | FunctionSpec, timeout_s: float = 20.0) -> Scorer:
    specs = [FunctionSpec(f"user_rewards:{name}", name) if isinstance(name, str) else name for name in names]
    scorer = Scorer(specs, prompt_key="prompt", timeout_s=timeout_s)
    scorers.append(scorer)
    scorer.start()
    return scorer


def score(scorer: Scorer, items: Sequence[RewardSample]) -> list[Result]:
    results: dict[int, Result] = {}

    def take(result: Result) -> None:
        assert result.place not in results, "two results for one sample"
        results[result.place] = result

    scorer.score(items, take)
    assert sorted(results) == list(range(len(items)))
    return [results[place] for place in range(len(items))]


@pytest.mark.parametrize(
    ("response", "reason", "words"),
    [
        ("raise", "raised", "ValueError: no good"),
        ("exit", "died", "exit code 3"),
        ("sys_exit", "died", "exit code 4"),
        ("nan", "not_finite", "nan"),
        ("memory", "memory", "MemoryError"),
        ("none", "raised", "not a number"),
    ],
)
def test_a_bad_call_fails_its_own_sample_alone(scorers: list[Scorer], response: str, reason: str, words: str) -> None:
    results = score(start(scorers, "behave"), samples("ok", response, "fine", "good"))
    assert [item.reason for item in results] == ["", reason, "", ""]
    assert words in results[1].detail and "behave" in results[1].detail and results[1].reward == 0.0
    assert [item.reward for item in results if not item.reason] == [1.0, 1.0, 1.0]
    assert results[2].parts == {"behave": 1.0, "behave/length": 4.0}


@pytest.mark.parametrize("response", ["hang", "spin", "grandchild"])
def test_a_call_that_does_not_return_is_killed(scorers: list[Scorer], response: str) -> None:
    scorer = start(scorers, "behave", timeout_s=0.4)
    group = scorer._child.pid  # type: ignore[union-attr]
    started = time.monotonic()
    results = score(scorer, samples("ok", response, "fine"))
    assert [item.reason for item in results] == ["", "timeout", ""]
    assert "0.4 s" in results[1].detail and time.monotonic() - started < 60
    assert scorer.restarts == 1
    with pytest.raises(ProcessLookupError):  # its whole process group has gone (a zombie grandchild belongs to init)
        for _ in range(100):
            os.killpg(group, 0)
            time.sleep(0.05)


def test_much_output_does_not_block(scorers: list[Scorer], capfd: pytest.CaptureFixture[str]) -> None:
    assert [item.reason for item in score(start(scorers, "behave"), samples("print", "ok"))] == ["", ""]
    assert "xxxx" in capfd.readouterr().out


def test_large_and_unusual_rows_arrive(scorers: list[Scorer]) -> None:
    results = score(start(scorers, "behave"), samples("big", "big", big=10**30, text="z" * 300_000))
    assert [item.reward for item in results] == [1.0, 1.0]


def test_a_batch_function_that_raises_is_tried_sample_by_sample(scorers: list[Scorer]) -> None:
    results = score(start(scorers, "batch"), samples("a", "raise", "b"))
    assert [(item.reason, item.reward) for item in results] == [("", 2.0), ("raised", 0.0), ("", 2.0)]


def test_a_batch_function_that_kills_its_process_fails_one_sample(scorers: list[Scorer]) -> None:
    results = score(start(scorers, "batch"), samples("a", "exit", "b"))
    assert [(item.reason, item.reward) for item in results] == [("", 2.0), ("died", 0.0), ("", 2.0)]


def test_async_functions_run_together_with_their_own_timeouts(scorers: list[Scorer]) -> None:
    scorer = start(scorers, "slowly", timeout_s=5.0)
    started = time.monotonic()
    results = score(scorer, samples(*["ok"] * 20, "raise", "hang"))
    assert time.monotonic() - started < 11  # 20 x 0.3 s one after the other, and then 5 s, would take 11
    assert [item.reason for item in results] == [""] * 20 + ["raised", "timeout"]
    assert scorer.restarts == 0


def test_weights_sources_and_parts(scorers: list[Scorer]) -> None:
    specs = (
        FunctionSpec("user_rewards:behave", "form", 0.5),
        FunctionSpec("user_rewards:batch", "many", 2.0),
        FunctionSpec("user_rewards:source_only", "special", 1.0, ("b",)),
    )
    scorer = start(scorers, *specs)
    first, second, third = score(scorer, samples("ok") + samples("ok", source="b") + samples("skip"))
    assert first.reward == pytest.approx(0.5 * 1.0 + 2.0 * 2.0)
    assert first.parts == {"form": 1.0, "form/length": 2.0, "many": 2.0}
    assert second.reward == pytest.approx(0.5 + 4.0 + 10.0) and second.parts["special"] == 10.0
    assert third.reward == pytest.approx(0.5) and "many" not in third.parts


def test_a_sample_without_any_function_fails(scorers: list[Scorer]) -> None:
    scorer = start(scorers, FunctionSpec("user_rewards:source_only", "s", 1.0, ("b",)))
    results = score(scorer, samples("ok", source="c"))
    assert results[0].reason == "raised" and "'c'" in results[0].detail


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_like_this", "nothing_like_this"),
        ("def behave(x, y): pass", "x, y"),
        ("import os; os._exit(1)", "ended"),
        ("behave = 3", "int"),
    ],
)
def test_unusable_functions_stop_the_start(scorers: list[Scorer], module: Path, text: str, words: str) -> None:
    module.write_text(text + "\n")
    with pytest.raises(ConfigError, match=words) as caught:
        start(scorers, "behave")
    assert caught.value.code == "config.reward" and caught.value.exit_code == 2


def test_the_version_follows_the_file(scorers: list[Scorer], module: Path) -> None:
    first = start(scorers, "behave").version
    assert first == start(scorers, "behave").version != ""
    module.write_text(MODULE + "\n# changed\n")
    assert start(scorers, "behave").version != first


def test_stop_from_another_thread_ends_a_call(scorers: list[Scorer]) -> None:
    import threading

    scorer = start(scorers, "behave", timeout_s=30)
    results: list[Result] = []
    thread = threading.Thread(target=scorer.score, args=(samples("hang", "ok"), results.append))
    thread.start()
    time.sleep(0.3)
    scorer.stop()
    thread.join(60)
    assert not thread.is_alive() and results == [] and scorer.restarts == 0


def test_stop_during_a_restart_does_not_wait_for_it(scorers: list[Scorer], module: Path) -> None:
    """The child is gone and the next one is being made: there is nothing to kill yet."""
    import threading

    scorer = start(scorers, "behave", timeout_s=30)
    module.write_text("import time\ntime.sleep(60)\n" + MODULE)
    results: list[Result] = []
    thread = threading.Thread(target=scorer.score, args=(samples("exit", "ok", "ok"), results.append))
    seen = threading.Event()
    make = scorer.start

    def slow_start() -> None:
        seen.set()
        time.sleep(0.5)
        make()

    scorer.start = slow_start  # type: ignore[method-assign]
    thread.start()
    assert seen.wait(30)
    scorer.stop()
    thread.join(60)
    assert not thread.is_alive() and [result.reason for result in results] == ["died"]


def test_extra_info_that_is_no_object_reaches_the_function(scorers: list[Scorer]) -> None:
    scorer = start(scorers, "behave")
    assert [one.reward for one in score(scorer, samples("ok", extra_info="a text"))] == [1.0]
    assert [one.reward for one in score(scorer, samples("ok", extra_info=[1]))] == [1.0]


def test_half_of_a_surrogate_pair_is_no_death(scorers: list[Scorer]) -> None:
    found, failed = score(start(scorers, "behave"), samples("half", "half raises"))
    assert (found.reason, found.answer, found.parts) == ("", "a?", {"behave": 0.5, "behave/b?": 1.0})
    assert failed.reason == "raised" and "ValueError: a?" in failed.detail


def test_a_timeout_says_what_it_is() -> None:
    assert make_failure("label", TimeoutError()).detail == "label: TimeoutError"
    assert all(
        len(make_failure("label", kind("x" * 9000)).detail) <= 500 for kind in (NotFinite, TimeoutError, KeyError)
    )
