"""A short run on pictures with a server of images, a judge and a teacher that see them: exact, nothing lost."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_run import Run
from exact_run import SETTINGS, assert_exact
from vision_models import vision_folder

from asyncrl.demo import shapes

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import rig_sglang
from served import Served

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    shutil.copytree(vision_folder("qwen2_5_vl"), tmp_path / "model")
    served = rig_sglang.stand_in(tmp_path / "model")
    yield served
    served.end()


def test_a_run_whose_server_judge_and_teacher_see_is_exact(tmp_path: Path, server: Served) -> None:
    model = tmp_path / "model"
    run = Run(tmp_path, model)
    shapes.write_parquet(tmp_path / "pictures.parquet", shapes.prompt_rows(64, 0))
    text = run.config.read_text().replace("prompts.jsonl", "pictures.parquet")
    run.config.write_text(text.replace("max_prompt_tokens = 32", "max_prompt_tokens = 64"))
    prompt = "{images}{response}?"
    settings = (
        "producers.engine=sglang",
        f'producers.url=["{server.url}"]',
        f'judge=[{{name="eye", kind="generative", model="{model}", prompt="{prompt}", answer="yes_no", yes=["1"], '
        'no=["2"], device="cpu"}]',
        'reward=[{judge="eye"}]',
        f'teacher=[{{name="big", model="{model}", device="cpu"}}]',
        "learner.distillation.loss=jsd",
        "learner.distillation.top_k=4",
        "weightsync.timeout_s=60",
    )
    try:
        refused = run.command("check", str(run.config), *[word for one in settings for word in ("--set", one)])
        assert refused.returncode and "keeps the features of an image" in refused.stdout, refused.stdout
        frozen = ("learner.vision.tower=false", "learner.vision.projector=false")
        done = run.launch(*settings, *frozen, *SETTINGS, timeout=500)
        assert_exact(run, done)
        lines = run.lines("metrics/learner.jsonl")
        assert all(0 < line["reward_mean"] < 1 and line["teacher_jsd"] > -1e-6 for line in lines), (
            "0 at first, but for rounding"
        )
        first = next(line for line in lines if line["step"] == 1)
        assert first["teacher_jsd"] < 1e-6 < max(line["teacher_jsd"] for line in lines)  # it is the policy at first
    finally:
        run.close()
