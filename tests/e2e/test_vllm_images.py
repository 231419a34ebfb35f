"""A short run on pictures with the real vLLM engine: log-probs of the learner, every promise of the audit kept."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from e2e_run import Run
from exact_run import SETTINGS, assert_exact
from test_vllm_run import OWN, why_not
from vision_models import vision_folder

from asyncrl.config import parse
from asyncrl.demo import shapes
from asyncrl.process_plan.interpreters import find_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def blind() -> str:
    """Why vLLM serves no images here."""
    if why := why_not():
        return why
    text = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[producers]\nengine = "vllm"\n[[reward]]\nfunction = "a:b"\n'
    python = find_interpreter(parse(text, overrides=OWN))
    tried = subprocess.run([python, "-c", "import torchvision.transforms.v2"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else "vLLM needs torchvision for images: make vllm"


@pytest.mark.skipif(bool(blind()), reason=blind())
def test_a_run_on_pictures_is_exact(tmp_path: Path, figure: Any) -> None:
    run = Run(tmp_path, vision_folder("qwen2_5_vl"))
    shapes.write_parquet(tmp_path / "pictures.parquet", shapes.prompt_rows(64, 0))
    try:
        text = run.config.read_text().replace("prompts.jsonl", "pictures.parquet")
        run.config.write_text(text.replace("max_prompt_tokens = 32", "max_prompt_tokens = 64"))
        done = run.launch("producers.engine=vllm", "weightsync.timeout_s=120", *SETTINGS, *OWN, timeout=580)
        found = assert_exact(run, done, gap=1e-3)  # its image processor is another: pixels differ by rounding
        figure(f"vllm, images: engine and learner at lag 0 differ by at most {found.largest:.1g} nats")
    finally:
        run.close()
