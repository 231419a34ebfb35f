"""Environments of engines: which interpreter, which server, and what `asyncrl check` says of them."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, parse
from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.errors import AsyncRLError
from asyncrl.process_plan.interpreters import (
    find_interpreter,
    look,
    own_url,
    python_with,
    settle_interpreter,
    url_problems,
)
from asyncrl.process_plan.plan import plan
from producers.rewards import scorer
from producers.rewards.outcome import JudgeSettings


def config_of(**producers: Any) -> Config:
    lines = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in producers.items())
    return parse(f"""
[model]
path = "nowhere"
[data]
path = "unused.jsonl"
[producers]
{lines}
[[reward]]
function = "unused:unused"
""")


def nothing(_package: str) -> bool:
    return False


def test_the_interpreter_of_a_producer(tmp_path: Path) -> None:
    prefix = str(tmp_path / ".venv")
    vllm = config_of(engine="vllm")
    assert find_interpreter(config_of(), prefix=prefix, has=nothing) == ""
    assert find_interpreter(config_of(engine="vllm", python="/own/python"), prefix=prefix, has=nothing) == "/own/python"
    assert find_interpreter(vllm, prefix=prefix, has=lambda package: package == "vllm") == ""
    with pytest.raises(AsyncRLError, match=r"no .*\.venv-vllm/bin/python") as caught:
        find_interpreter(vllm, prefix=prefix, has=nothing)
    assert caught.value.code == "config.extra" and "make vllm" in caught.value.remedy
    made = tmp_path / ".venv-vllm" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.touch()
    assert find_interpreter(vllm, prefix=prefix, has=nothing) == str(made)


def test_the_interpreter_of_a_judge_with_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process alone is started there; without an environment the setting is named."""
    prefix = str(tmp_path / ".venv")
    assert python_with("hf", where="judge.engine", prefix=prefix, has=nothing) == ""
    with pytest.raises(AsyncRLError, match=r"no .*\.venv-vllm/bin/python") as caught:
        python_with("vllm", where="judge.engine", prefix=prefix, has=nothing)
    assert (caught.value.code, caught.value.where) == ("config.extra", "judge.engine")
    assert "producers" not in caught.value.remedy
    made = tmp_path / "python"
    made.write_text(f"#!/bin/sh\necho $0 $2 > {tmp_path}/started\nexit 3\n")
    made.chmod(0o700)
    asked: list[str] = []
    monkeypatch.setattr(scorer, "python_with", lambda engine, **_: asked.append(engine) or str(made))
    table = JudgeConfig("grader", kind="generative", engine="vllm", model="m", prompt="{response}")
    judging = scorer.Scorer(
        [], prompt_key="prompt", timeout_s=5.0, judge=JudgeSettings(table, 5.0, "p", "float32", "prompt")
    )
    with pytest.raises(AsyncRLError, match="ended while it started"):
        judging.start()
    assert asked == ["vllm"]
    assert (tmp_path / "started").read_text().split() == [str(made), "producers.rewards.judges.child"]


def test_only_producers_are_started_by_it() -> None:
    config = settle_interpreter(config_of(engine="vllm", python="/own/python", count=2))
    started = {item.name: item.argv[0] for item in plan(config, ("buffer", "producer"), config_path=Path("c"))}
    assert started["producer-0"] == started["producer-1"] == "/own/python" != started["buffer"]


def test_one_server_needs_no_list() -> None:
    found = config_of(engine="sglang", url="http://a:1")
    assert found.producers.url == ("http://a:1",) and url_problems(found) == []


def test_each_producer_has_a_server_of_its_own() -> None:
    urls = ["http://a:1", "http://b:1"]
    config = config_of(engine="vllm_http", url=urls, count=2)
    assert url_problems(config) == []
    assert own_url(config, "producer-1").producers.url == ("http://b:1",)
    assert own_url(config, "producer-late-0").producers.url == ("http://a:1",)
    assert own_url(config_of(), "producer-1").producers.url == ()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"engine": "vllm_http"}, "config.missing"),
        ({"engine": "vllm_http", "url": ["http://a:1", "http://b:1"]}, "config.conflict"),
        ({"engine": "hf", "url": ["http://a:1"]}, "config.conflict"),
    ],
)
def test_servers_that_do_not_fit(settings: dict[str, Any], code: str) -> None:
    assert [error.code for error in url_problems(config_of(**settings))] == [code]


def script(folder: Path, text: str) -> str:
    """An interpreter that is none."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_what_the_interpreter_has_is_said(tmp_path: Path) -> None:
    says = '{"package": "vllm 9.9", "asyncrl": "0.1", "python": "3.11.7", "points": ["asyncrl"]}'
    python = script(tmp_path, f"echo noise; echo '{says}'")
    assert look(config_of(engine="vllm", python=python)) == ([], "vllm 9.9, asyncrl 0.1, Python 3.11.7", python)
    assert look(config_of(engine="hf")) == ([], "", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo oh >&2; echo it has no package vllm >&2; exit 1", "it has no package vllm"),
        ("exit 3", "code 3"),
        ('echo \'{"package": "p", "asyncrl": "a", "python": "3", "points": []}\'', "is not installed"),
    ],
)
def test_an_interpreter_that_does_not_fit(tmp_path: Path, text: str, words: str) -> None:
    errors = look(config_of(engine="vllm", python=script(tmp_path, text)))[0]
    assert [error.code for error in errors] == ["config.extra"] and words in errors[0].message


def test_a_missing_interpreter_is_an_error() -> None:
    errors = look(config_of(engine="vllm", python="/nowhere/python"))[0]
    assert len(errors) == 1 and "No such file" in errors[0].message


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is in this environment")
def test_the_real_look_finds_that_this_environment_has_no_vllm() -> None:
    root = str(Path(__file__).parents[2])
    config = config_of(engine="vllm", python=sys.executable)
    errors = look(config, env={**os.environ, "PYTHONPATH": root})[0]
    assert [error.message for error in errors] == [f"{sys.executable}: it has no package vllm"]
