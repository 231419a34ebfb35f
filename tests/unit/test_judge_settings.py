"""`[[judge]]`: what a judge inherits, which judges a row is for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import Config, dump, parse
from asyncrl.config.judges import find_judge, judges_for, list_judges
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.launcher.launch import LaunchOptions, launch_config

BASE = """
model.path = "m"
data.path = "d.jsonl"
[reward_workers]
count = 3
timeout_s = 7
retries = 4
restarts = 6
batch_samples = 5
memory_bytes = 99
"""
ONE = BASE + '[[reward]]\nfunction = "a:b"\n'
TWO = (
    ONE
    + """
[[reward]]
function = "a:deep"
judge = "slow"
data_sources = ["math"]
[[judge]]
name = "slow"
"""
)


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        parse(text)
    return [f"{error.code} {error.where} {error.message}" for error in caught.value.errors]


def test_without_a_table_there_is_the_default_judge_alone() -> None:
    (judge,) = list_judges(parse(ONE))
    assert (judge.name, judge.display_name, judge.count) == ("", "default", 3)
    assert (judge.timeout_s, judge.data_sources) == (7.0, ())


def test_a_judge_inherits_what_its_table_leaves_out() -> None:
    default, slow = list_judges(parse(TWO))
    assert default.rewards[0].function == "a:b" and slow.rewards[0].function == "a:deep"
    for name in ("count", "restarts", "timeout_s", "retries", "batch_samples", "memory_bytes"):
        assert getattr(slow, name) == getattr(default, name)
    own = "count = 1\nrestarts = 0\ntimeout_s = 90\nretries = 0\nbatch_samples = 2\nmemory_bytes = 8\n"
    slow = find_judge(parse(TWO + own), "slow")
    assert slow is not None
    assert (slow.count, slow.restarts, slow.timeout_s, slow.retries, slow.batch_samples, slow.memory_bytes) == (
        1,
        0,
        90.0,
        0,
        2,
        8,
    )


def test_a_judge_without_rewards_of_the_default_one_stands_alone() -> None:
    config = parse(TWO.replace('function = "a:b"', 'function = "a:b"\njudge = "slow"'))
    assert [judge.name for judge in list_judges(config)] == ["slow"]
    assert find_judge(config, "") is None


def test_which_judges_a_row_is_for() -> None:
    rules = [(judge.name, judge.data_sources) for judge in list_judges(parse(TWO))]
    assert judges_for("math", rules) == ("", "slow") and judges_for("code", rules) == ("",)
    only = [("x", ("math",)), ("y", ("math", "code"))]
    assert judges_for("code", only) == ("y",)
    assert judges_for("poetry", only) == ("x",), "somebody must say why nobody can"


def test_sources_of_a_judge_are_those_of_all_of_its_rewards() -> None:
    more = TWO + '\n[[reward]]\nfunction = "a:c"\njudge = "slow"\ndata_sources = ["code", "math"]\n'
    found = find_judge(parse(more), "slow")
    assert found is not None and found.data_sources == ("math", "code")
    everywhere = TWO + '\n[[reward]]\nfunction = "a:c"\njudge = "slow"\n'
    found = find_judge(parse(everywhere), "slow")
    assert found is not None and found.data_sources == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWO.replace('judge = "slow"', 'judge = "slwo"'), "'slwo' is no [[judge]]; did you mean 'slow'?"),
        (TWO.replace('judge = "slow"', 'judge = "zz"'), "add [[judge]] with name = 'zz'"),
        (TWO + '[[judge]]\nname = "slow"\n', "is there twice"),
        (TWO + '[[judge]]\nname = "idle"\n', "judge 'idle' has no reward"),
        (TWO + '[[judge]]\nname = "a b"\n', "begins with a letter"),
        (TWO + '[[judge]]\nname = "default"\n', "is not 'default'"),
        (TWO + "timeout_s = -1\n", ">= 0"),
    ],
)
def test_what_contradicts_itself_is_refused(text: str, words: str) -> None:
    found = refused(text)
    assert any(words in line and "<toml>:" in line for line in found), found


@pytest.mark.parametrize(
    ("target", "judge", "words"),
    [("all", "slow", "goes with the target rewards"), ("rewards", "slwo", "'slwo': this run has default, slow")],
)
def test_launch_takes_judges_of_the_run_alone(tmp_path: Path, target: str, judge: str, words: str) -> None:
    config = parse(TWO, overrides=[f'run.dir="{tmp_path}/run"'])
    with pytest.raises(ConfigError, match=words):
        launch_config(config, LaunchOptions(target=target, judge=judge))
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_the_resolved_form_reads_back() -> None:
    config: Config = parse(TWO)
    assert parse(dump(config)) == config
