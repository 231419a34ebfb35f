"""`[sandbox]`: what contradicts the rest of the file, and what a host without isolation says before a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import parse
from asyncrl.errors import ConfigError
from producers.rewards.pipe import FunctionSpec, SandboxSpec
from producers.rewards.scorer import Scorer

BASE = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[reward]]\nfunction = "builtin:code"\n'


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ('[sandbox]\nkind = "docker"\n', "config.type", "not bubblewrap, none or an http address"),
        ('[sandbox]\npaths = ["lib"]\n', "config.type", "'lib' is not an absolute path"),
        ("[sandbox]\ntimeout_s = 30\n", "config.conflict", "a program may take 30 s and its call 30 s"),
        ("[reward.args]\ntimeout_s = 40\n", "config.conflict", "a program may take 40 s"),
        ("[sandbox]\nmemory_bytes = 0\n", "config.type", "memory_bytes"),
    ],
)
def test_what_is_refused(text: str, code: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(BASE + text)
    assert caught.value.code == code and words in caught.value.message


def test_what_is_allowed() -> None:
    config = parse(BASE + '[reward.args]\ntimeout_s = 5\nprefix = "x"\n[sandbox]\nkind = "http://127.0.0.1:8080"\n')
    assert config.reward[0].args == {"timeout_s": 5, "prefix": "x"} and config.reward[0].label == "code"
    long = BASE.replace("builtin:code", "my:reward") + "[sandbox]\ntimeout_s = 100\n"
    assert parse(long).sandbox.timeout_s == 100


def without_bubblewrap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))


def test_a_worker_ends_before_it_asks_for_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_bubblewrap(tmp_path, monkeypatch)
    scorer = Scorer([FunctionSpec("builtin:code", "code")], prompt_key="prompt", timeout_s=60.0)
    with pytest.raises(ConfigError, match=r"bwrap.*not on the PATH.*apt-get install bubblewrap"):
        scorer.start()
    unprotected = Scorer(
        [FunctionSpec("builtin:code", "code")], prompt_key="prompt", timeout_s=60.0, sandbox=SandboxSpec("none")
    )
    unprotected.start()  # it was spelled out
    unprotected.close()


def test_the_check_says_so_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "producers.rewards.functions", "--validate", "builtin:code", "--sandbox"]
    answers = [
        subprocess.run(
            [*command, kind],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PATH": str(tmp_path)},
        )
        for kind in ("bubblewrap", "none")
    ]
    assert answers[0].returncode == 2 and "apt-get install bubblewrap" in answers[0].stderr
    assert answers[1].returncode == 0 and "form sample" in answers[1].stdout
