"""Rewards of files and scorers in whole runs: verl's data and reward file unchanged, and code graded in the sandbox."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from sandbox_lab import needs_bubblewrap

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
#: In the style of verl's own files.
VERL_REWARD = '''
import re

def extract_solution(solution_str, method="flexible"):
    found = re.findall(r"\\d+", solution_str)
    return found[-1] if found else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.1, score=1.0):
    """The scoring function."""
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train" and ground_truth == "4"
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
'''


def verl_parquet(path: Path) -> None:
    """What verl's preprocessing writes: chat prompts, and ground truths as texts."""
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = []
    for index in range(32):
        code = index % 2 == 1
        tests = json.dumps({"asserts": ["assert True"]})
        rows.append(
            {
                "data_source": "code" if code else "openai/gsm8k",
                "prompt": [
                    {"role": "system", "content": "q:"},
                    {"role": "user", "content": f"{index:02d}+{index:02d}"},
                ],
                "ability": "code" if code else "math",
                "reward_model": {"style": "rule", "ground_truth": tests if code else "4"},
                "extra_info": {"split": "train", "index": index, "answer": "#### 4", "question": "q"},
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.mark.slow
def test_verls_data_and_reward_file_run_as_they_are_beside_code(run: Any, tiny_model: Path) -> None:
    needs_bubblewrap()
    model = run.folder / "chat-model"
    shutil.copytree(tiny_model, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    verl_parquet(run.folder / "train.parquet")
    (run.folder / "verl_score.py").write_text(VERL_REWARD)
    rewards = """reward=[
        {function = "verl_score.py:compute_score", data_sources = ["openai/gsm8k"], args = {format_score = 0.25}},
        {function = "builtin:code", data_sources = ["code"],
         args = {prefix = "'''", suffix = "'''", timeout_s = 5}},
    ]""".replace("\n", " ").replace(", ]", "]")
    done = run.launch(f"model.path={model}", f"data.path={run.folder}/train.parquet", "learner.steps=3", rewards)
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0 and (audit["lost"], audit["doubled"], audit["dead"]) == (0, 0, {})
    lines = run.lines("metrics/learner.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    verl = [line.get("reward/compute_score", 0.0) for line in lines]
    code = [line.get("reward/code", 0.0) for line in lines]
    assert max(verl) > 0.0 and max(code) == 1.0  # each sample passes
    for line in lines:  # a part's mean is over the samples that it applies to: so many groups of four
        of_each = [part for part in ("compute_score", "code") if f"reward/{part}" in line]
        shares = [(n, 4 - n) for n in range(1, 4)] if len(of_each) == 2 else [(4,)]
        means = [sum(n * line[f"reward/{part}"] for n, part in zip(ns, of_each, strict=True)) / 4 for ns in shares]
        assert any(line["reward_mean"] == pytest.approx(mean) for mean in means), line


@pytest.mark.chaos
def test_functions_that_pass_their_tests_become_more(run: Any) -> None:
    needs_bubblewrap()
    model, data = run.folder / "model", run.folder / "code.jsonl"
    warm.run(
        [sys.executable, "-m", "learners.warm_start.code", "--out", str(model), "--data", str(data)],
        cwd=ROOT,
        check=True,
        timeout=600,
    )
    words = [f"run.dir={run.dir}", f"model.path={model}", f"data.path={data}", "learner.steps=14"]
    settings = [word for setting in words for word in ("--set", setting)]
    done = run.command("launch", "all", str(ROOT / "configs" / "code-sandbox.toml"), *settings, timeout=600)
    assert done.returncode == 0, done.stdout + run.logs()
    rewards = [line["reward_mean"] for line in run.lines("metrics/learner.jsonl")]
    assert len(rewards) == 14
    early, late = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert early < 0.6 and late > early + 0.3, rewards
    assert run.audit()["exit"] == 0
