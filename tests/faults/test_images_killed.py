"""A run with images: every role is killed once, images are lost and damaged; the ledger and the replay stay whole."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_run import Run, alive
from vision_models import vision_folder

from asyncrl.demo import shapes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 24


@pytest.fixture
def seeing(tmp_path: Path) -> Iterator[Run]:
    """A run on pictures, with a model of random weights."""
    made = Run(tmp_path, vision_folder("qwen2_5_vl"))
    shapes.write_parquet(tmp_path / "pictures.parquet", shapes.prompt_rows(256, 0))
    text = made.config.read_text().replace("prompts.jsonl", "pictures.parquet")
    text = text.replace("max_prompt_tokens = 32", "max_prompt_tokens = 64").replace(
        "max_new_tokens = 24", "max_new_tokens = 8"
    )
    text = text.replace("steps = 5", f"steps = {STEPS}").replace(
        "tensorboard = false", "tensorboard = false\narchive = true"
    )
    made.config.write_text(text)
    yield made
    made.close()


LOOKING = """
from asyncrl.demo import squares

async def play(chat, row):
    disc, square = squares.start_cells(row["images"][0].getpixel((0, 0))[0])
    turn = await chat.say(max_new_tokens=3)
    for _ in range(2):
        disc = (sum(turn.token_ids) % squares.CELLS, turn.token_ids[-1] % squares.CELLS)
        shown = [{"type": "image", "image": squares.draw(disc, square)}, {"type": "text", "text": "where?"}]
        turn = await chat.say([{"role": "user", "content": shown}], max_new_tokens=3)
"""
REWARD = """
def later_reward(sample):
    assert len(sample.images) == 2 and len(sample.row["images"]) == 1
    return len(set(one.tobytes() for one in sample.images)) + min(len(sample.response), 20) / 20
"""


def show_in_turns(run: Run) -> None:
    """Two more pictures in every sample, where its own words put them."""
    (run.folder / "looking.py").write_text(LOOKING)
    (run.folder / "later.py").write_text(REWARD)
    text = run.config.read_text().replace("my_rewards:length_reward", "later:later_reward")
    text = text.replace("max_new_tokens = 8", "max_new_tokens = 100").replace(
        "micro_batch_tokens = 512", "micro_batch_tokens = 1024"
    )
    run.config.write_text(f'{text}[environment]\nname = "looking:play"\n')


@pytest.mark.chaos
@pytest.mark.parametrize("where", ["prompts", "turns"])
def test_every_role_is_killed_once(seeing: Run, where: str) -> None:
    if where == "turns":
        show_in_turns(seeing)
    launched = seeing.start("launch", "all", str(seeing.config))
    for number, role in enumerate(("producer-0", "reward-0", "weightsync", "buffer", "learner")):
        reached = 2 + 4 * number
        seeing.wait(f"step {reached}", lambda reached=reached: max(seeing.steps(), default=0) >= reached)
        pid = seeing.pid(role)
        os.kill(pid, signal.SIGKILL)
        seeing.wait(f"the end of {role}", lambda pid=pid: not alive(pid))
        seeing.wait(
            f"another {role}", lambda role=role: any(role in (one["role"], one["name"]) for one in seeing.living())
        )
    out, _ = launched.communicate(timeout=200)
    assert launched.returncode == 0, out + seeing.logs()
    audit = seeing.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"]) == (0, 0, 0)
    assert audit["trained"] == 4 * STEPS
    replayed = seeing.command("replay", str(seeing.dir))
    assert replayed.returncode == 0, replayed.stdout


@pytest.mark.chaos
def test_groups_whose_images_are_lost_are_set_aside(seeing: Run) -> None:
    """The images of everything under way vanish: no group is trained as text, and the run ends with others."""
    launched = seeing.start("launch", "all", str(seeing.config), "--set", "producers.checkpoint_tokens=0")
    seeing.wait("step 4", lambda: max(seeing.steps(), default=0) >= 4)
    for path in (seeing.dir / "images").glob("??"):
        shutil.rmtree(path, ignore_errors=True)
    out, _ = launched.communicate(timeout=200)
    assert launched.returncode == 0, out + seeing.logs()
    audit = seeing.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"]) == (0, 0, 0)
    dead = [line for line in seeing.lines("history.jsonl") if line.get("e") == "dead"]
    assert dead and {line["reason"] for line in dead} <= {"poison:image", "reward_failed"}  # learner, reward worker
    assert all("is missing" in line["detail"] for line in dead)
    assert seeing.steps()[-1] == STEPS
