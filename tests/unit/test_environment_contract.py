"""`asyncrl test-env` and `asyncrl.testing`: what it finds in environments that keep the contract, and in others."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.testing import check_environment
from producers.environments import contract_test as contract

HERE = Path(__file__).resolve()
ROW = {"prompt": [{"role": "user", "content": "Begin."}]}


class Counter:
    """Says the number of the turn; done at the third."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, row: Any) -> None:
        return None

    async def step(self, action: Any) -> Any:
        self.turns += 1
        return f"turn {self.turns}", 1.0, self.turns == 3, {}


async def by_chance(chat: Any, row: Any) -> float:
    await chat.say()
    await chat.say(f"it is {time.monotonic_ns()}")
    return 0.0


async def stubborn(chat: Any, row: Any) -> float:
    try:
        await chat.say()
        await chat.say("more")
    except asyncio.CancelledError:
        await asyncio.sleep(4)
    return 0.0


async def silent(chat: Any, row: Any) -> float:
    await chat.say()
    await chat.say([{"content": "nobody said it"}])
    return 0.0


async def brittle(chat: Any, row: Any) -> float:
    turn = await chat.say()
    return float(turn.text)


async def now_and_then(chat: Any, row: Any) -> float | None:
    turn = await chat.say()
    return 1.0 if turn.text == "1" else None


def broken(name: str, **how: Any) -> dict[str, str]:
    found = check_environment(f"{__name__}:{name}" if ":" not in name else name, row=ROW, **how)
    return {one.name: one.detail for one in found if not one.kept}


def test_an_environment_that_keeps_the_contract(tmp_path: Path) -> None:
    import env_lab  # brings torch, which the processes of `test_the_command` do without

    env_lab.tokenizer_in(tmp_path)
    found = check_environment(f"{__name__}:Counter", row=ROW, model=str(tmp_path), says=["a", "b"])
    assert all(one.kept for one in found), found
    assert len(found) == 9
    details = {one.name: one.detail for one in found}
    assert details["rewards"] == "3 to 3"
    assert "3 turns" in details["it ends"]
    assert details["the chat template can show them"] == "strictly"


@pytest.mark.parametrize(
    ("name", "finding", "detail"),
    [
        ("by_chance", "the same answers give the same sample", "two plays differ"),
        ("silent", "observations can be encoded", "no message with a role"),
        ("brittle", "it survives what a policy says", "could not convert string to float"),
        ("now_and_then", "rewards", "only 1 of"),
        ("stubborn", "cancellation ends it", "still runs"),
        ("nothing_here", "it can be used", "has no 'nothing_here'"),
    ],
)
def test_what_is_broken_is_named(name: str, finding: str, detail: str) -> None:
    assert detail in broken(name)[finding]


def test_a_template_that_cannot_show_the_observations(tmp_path: Path) -> None:
    import env_lab

    env_lab.tokenizer_in(tmp_path, env_lab.REASONING)
    assert (
        "shows what came before otherwise" in broken("Counter", model=str(tmp_path))["the chat template can show them"]
    )


def test_what_the_tokenizer_cannot_write_is_no_fault_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = contract.ByteTokenizer.encode

    def ascii_only(self: Any, text: str) -> list[int]:
        if not text.isascii():
            raise Exception("Missing [UNK] token from the vocabulary")  # what the package tokenizers raises
        return plain(self, text)

    monkeypatch.setattr(contract.ByteTokenizer, "encode_part", ascii_only)
    found = {one.name: one for one in check_environment(f"{__name__}:Counter", row=ROW)}
    assert all(one.kept for one in found.values()), found
    assert "5 scripts; 1 more that the tokenizer has no tokens for" in found["it survives what a policy says"].detail
    with pytest.raises(ConfigError, match="no tokens for 'é'"):
        check_environment(f"{__name__}:Counter", row=ROW, says=["a", "é"])


def test_the_environments_that_ship_keep_it(tmp_path: Path) -> None:
    assert broken("producers.environments.scripted_chat:play") == {}
    pytest.importorskip("gymnasium")
    seeded = {**ROW, "seed": 3}
    found = check_environment("gymnasium", row=seeded, args={"id": "FrozenLake-v1"}, says=["2", "1", "up", "0"])
    assert all(one.kept for one in found), found


def test_the_command(tmp_path: Path) -> None:
    paths = os.pathsep.join(map(str, (HERE.parents[2], HERE.parent, HERE.parents[1])))

    def command(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "asyncrl", "test-env", f"test_environment_contract:{name}", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    done = command("Counter", "--say", "a")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 of 9 kept" in done.stdout
    assert done.stdout.startswith("  policy  a   [reward 1]\n  shown   <|im_start|>user\n          turn 1\n")
    done = command("by_chance", "--json")
    assert done.returncode == 1
    assert any(not one["kept"] for one in json.loads(done.stdout))
    done = command("by_chance", "--row", "[1]")
    assert done.returncode == 2 and "no JSON object" in done.stderr
