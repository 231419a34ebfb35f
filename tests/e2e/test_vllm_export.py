"""What `asyncrl export` writes, in the real vLLM: the same tokens and log-probs as in transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_vllm_run import why_not

from asyncrl.config import parse
from asyncrl.process_plan.interpreters import find_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = [5, 6, 7, 8]
GAP = 1e-4  # both in float32
ALONE = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",
}


def said_by_vllm(folder: Path) -> dict[str, Any]:
    text = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[producers]\nengine = "vllm"\n[[reward]]\nfunction = "a:b"\n'
    python = os.environ.get("VLLM_PYTHON") or find_interpreter(parse(text))
    words = [python, str(Path(__file__).with_name("vllm_says.py")), str(folder), *map(str, PROMPT)]
    done = subprocess.run(words, env={**os.environ, **ALONE}, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_vllm_loads_an_export_in_several_files(run: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert run.launch("learner.steps=2").returncode == 0, run.logs()
    done = run.command("export", str(run.dir), "--max-shard-size", "400KB", "--out", str(run.folder / "out"))
    assert done.returncode == 0, done.stdout
    assert len(list((run.folder / "out").glob("model-*.safetensors"))) > 3
    found = said_by_vllm(run.folder / "out")
    model = AutoModelForCausalLM.from_pretrained(run.folder / "out")
    ids = torch.tensor([PROMPT + found["ids"]])
    logs = model(ids).logits.detach().log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    assert len(found["ids"]) == 8
    for place, (token, said) in enumerate(zip(found["ids"], found["logprobs"], strict=True)):
        assert abs(float(logs[place, token]) - said) <= GAP and said >= float(logs[place].max()) - GAP
