"""The examples of examples/tools: every configuration is accepted, and real tools answer as their teacher expects."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm
from sandbox_lab import needs_browser, needs_bubblewrap

from asyncrl.config import load
from asyncrl.config.tree import Config
from producers.environments.multi_turn import make_sandbox
from producers.tools.base import Toolbox, make_toolbox
from producers.tools.parsers import hermes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "tools"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(FOLDER))
    import prepare
    import tasks

SAMPLES = 4  # of each tool, played by the real one


@pytest.fixture(params=tasks.TOOLS)
def tool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name in ("python", "shell", "browser"):
        needs_bubblewrap()
    if name == "browser":
        needs_browser()
    if name == "mcp":
        pytest.importorskip("mcp")
    return name


@pytest.fixture
def settings(tool: str, tmp_path: Path) -> list[str]:
    """The files that `prepare.py` makes, in a folder of the test; settings that name it."""
    prepare.write_files(tool, tmp_path, steps=0)
    found = {
        "run.dir": tmp_path / "rl",
        "model.path": tmp_path / "start",
        "data.path": tmp_path / "train.jsonl",
        "evaluation.path": tmp_path / "heldout.jsonl",
    }
    found |= {"environment.tool_args.search.path": tmp_path / "corpus.jsonl"} if tool == "search" else {}
    found |= {"environment.tool_args.browser.pages": tmp_path / "site"} if tool == "browser" else {}
    found |= {"environment.tool_args.mcp.villages.command": sys.executable} if tool == "mcp" else {}
    return [f"{key}={value}" for key, value in found.items()]


@pytest.mark.long
def test_a_configuration_is_accepted(tool: str, settings: list[str]) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "asyncrl", "check", str(FOLDER / "rl.toml"), str(FOLDER / f"{tool}.toml"), *words]
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_real_tool_answers_as_the_teacher_expects(
    tool: str, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load([FOLDER / "rl.toml", FOLDER / f"{tool}.toml"], settings)
    played = asyncio.run(asyncio.wait_for(play(config, tool), 240))
    assert len(played) == 2 * SAMPLES
    assert all(played[:SAMPLES]), "every demonstration without mistakes is rewarded"


async def play(config: Config, tool: str) -> list[float]:
    """Rewards of demonstrations, first without mistakes and then with, whose calls the real tool answers."""
    box = make_toolbox(
        config.environment.tools, config.environment.tool_args, sandbox=lambda: make_sandbox(config.sandbox)
    )
    await box.open()
    try:
        return [await reward_of(box, tool, index, noise) for noise in (0.0, 0.5) for index in range(SAMPLES)]
    finally:
        await box.close()


async def reward_of(box: Toolbox, tool: str, index: int, noise: float) -> float:
    found = tasks.task(tool, seed=1, index=index, split="heldout")
    turns = tasks.demonstration(found, noise=noise, rng=random.Random(index))
    mine = box.begin()
    try:
        for said, expected in turns[:-1]:
            (call,) = hermes(said).calls
            shown = await mine.call(call, timeout_s=60.0)
            assert shown == expected or (expected.startswith("error") and str(shown).startswith("error")), (said, shown)
    finally:
        await mine.end()
    return reward(found, [said for said, _ in turns])


def reward(found: tasks.Task, turns: list[str]) -> float:
    sample: Any = SimpleNamespace(turns=turns, response="", ground_truth=found.answer)
    return float(tasks.reward(sample))


@pytest.mark.parametrize("tool", tasks.TOOLS)
def test_tasks_and_teachers(tool: str) -> None:
    config = load([FOLDER / "rl.toml", FOLDER / f"{tool}.toml"])
    assert config.run.dir == f"runs/tools/{tool}/rl" and config.environment.max_turns >= 4
    one, other = ([tasks.task(tool, seed=0, index=n, split=split) for n in range(300)] for split in tasks.SPLITS[1:])
    assert one == [tasks.task(tool, seed=0, index=n, split="train") for n in range(300)] != other
    if tool in ("search", "mcp", "browser"):
        assert not {found.prompt.split()[-1] for found in one} & {found.prompt.split()[-1] for found in other}
    shares = []
    for noise in (0.0, 0.3, 0.9):
        made = [tasks.demonstration(found, noise=noise, rng=random.Random(n)) for n, found in enumerate(one)]
        shares.append(sum(reward(f, [said for said, _ in turns]) for f, turns in zip(one, made, strict=True)) / 300)
    assert shares[0] == 1.0 and 0.2 < shares[1] < 0.8 and shares[2] < 0.2, shares
    words = re.compile("|".join(map(re.escape, tasks.WORDS)) + r"|[\s\S]")
    for row in tasks.demonstration_rows(tool, 200, 0, noise=0.3):
        text = "".join(message["content"] + "  assistant  " for message in row["prompt"]) + row["response"]
        assert len(words.findall(text)) < config.data.max_prompt_tokens + config.sampling.max_new_tokens
    with pytest.raises(ValueError, match="unknown tool 'saw'"):
        tasks.task("saw", seed=0, index=0, split="train")


def test_a_village_has_a_name_of_its_own() -> None:
    assert len(tasks.NAMES) == tasks.VILLAGES
