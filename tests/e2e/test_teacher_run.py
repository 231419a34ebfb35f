"""Distillation from teachers in whole runs: two teachers by data source that are killed, the audit, the same numbers
again, the same weights again; and a student that comes ten times nearer to its teacher.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import demo_model
import pytest
import torch
import warm
from e2e_run import ROOT, Run
from transformers import AutoModelForCausalLM

from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import TeacherLogprobs, decode_record
from asyncrl.wire.batch_arrays import decode_batch

TWO = (
    'teacher=[{{name="maths", model="{0}", data_sources=["math"]}}, {{name="rest", model="{1}", data_sources=["add"]}}]'
)
MAKE = """
import sys
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model
tokenizer = make_tokenizer(sys.argv[1])
save_model(sys.argv[1], make_tiny_qwen3(len(tokenizer), seed=int(sys.argv[2]), layers=2))
"""


def make_teacher(folder: Path, seed: int) -> Path:
    words = [sys.executable, "-c", MAKE, str(folder), str(seed)]
    warm.run(words, cwd=ROOT, check=True, timeout=120)
    return folder


def plain_logprobs(folder: Path, prompt: Any, response: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    with torch.no_grad():
        logs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logs.gather(-1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_teachers_that_are_killed_lose_nothing(run: Run) -> None:
    folders = {"maths": make_teacher(run.folder / "maths", 5), "rest": make_teacher(run.folder / "rest", 6)}
    path = run.folder / "prompts.jsonl"
    lines = path.read_text().splitlines()
    path.write_text(
        "".join(line.replace('"add"', '"math"' if n % 2 else '"add"') + "\n" for n, line in enumerate(lines))
    )
    settings = (
        TWO.format(*folders.values()),
        "learner.steps=16",
        "log.archive=true",
        "log.heartbeat_s=0.3",
        "producers.count=1",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    main = run.start("launch", "all", str(run.config), *words)
    for step, name in ((2, "teacher-maths-0"), (5, "teacher-rest-0"), (8, "teacher-maths-0")):
        run.wait(f"step {step}", lambda step=step: max(run.steps(), default=0) >= step)  # type: ignore[misc]
        os.kill(run.pid(name), signal.SIGKILL)
    out, _ = main.communicate(timeout=200)
    assert main.returncode == 0, out + run.logs()
    assert "1 teacher (maths), 1 teacher (rest)" in out and "teacher " in out
    audit = run.audit()
    assert (audit["exit"], audit["lost"], audit["doubled"], audit["dead"]) == (0, 0, 0, {}), audit

    archive = RunDir(run.dir).archive
    checked = 0
    for step in (1, 9, 16):
        file = batch_file.read(batch_file.batch_path(archive, step))
        for group in decode_batch(file.batch, file.payloads).groups:
            teacher = "maths" if group.row["data_source"] == "math" else "rest"
            for sample in group.samples[:1]:
                assert sample.teaching is not None and sample.teaching.teacher == teacher
                told = torch.tensor(sample.teaching.logprobs.copy())
                expected = plain_logprobs(folders[teacher], group.prompt_ids, sample.response)
                assert float((told - expected).abs().max()) < 1e-5
                checked += 1
    assert checked == 12

    again = json.loads(run.command("rescore", str(run.dir), "--teacher", "maths", "--json", timeout=120).stdout)
    assert (again["changed_samples"], again["failed"]) == (0, {}) and again["samples"] > 0
    assert again["largest_difference"] < 1e-4 and set(again["versions"].values()) <= again["recorded"].keys()
    shutil.copy(folders["rest"] / "model.safetensors", folders["maths"] / "model.safetensors")
    other = json.loads(run.command("rescore", str(run.dir), "--teacher", "maths", "--json", timeout=120).stdout)
    assert other["changed_samples"] == other["samples"] == again["samples"]
    assert other["versions"] != again["versions"]
    unknown = run.command("rescore", str(run.dir), "--teacher", "none", timeout=60)
    assert unknown.returncode == 2 and "maths, rest" in unknown.stdout
    replayed = run.command("replay", str(run.dir), timeout=200)
    assert replayed.returncode == 0, replayed.stdout

    path = batch_file.batch_path(archive, 9)  # other log-probs than the history has
    file = batch_file.read(path)
    payloads = [bytes(payload) for payload in file.payloads]
    place = next(
        at
        for at, record in enumerate(record for head in file.batch.groups for record in head.records)
        if isinstance(decode_record(record), TeacherLogprobs)
    )
    payloads[place] = bytes(len(payloads[place]))
    batch_file.write(path, file.batch, payloads, meta=file.meta)
    audit = run.audit()
    assert audit["exit"] == 1 and "teaching of sample" in json.dumps(audit)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_student_comes_ten_times_nearer_within_40_steps(run: Run) -> None:
    """The teacher is the demo's warm-started model, the student the same with noise in every matrix. The figure is the
    exact KL(student || teacher) per token along held-out answers of the student, before and after.
    """
    teacher, student = demo_model.place(run.folder), run.folder / "student"
    done = run.command("demo", "--task", "running_sum", "--prepare-only", timeout=200)
    assert done.returncode == 0, done.stdout
    shutil.copytree(teacher, student)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.5 * float(weight.std()))
    model.save_pretrained(student)
    settings = (
        f'teacher=[{{name="big", model="{teacher}"}}]',
        "reward=[]",
        f'model.path="{student}"',
        f'data.path="{run.folder}/runs/data/running_sum.jsonl"',
        "data.max_prompt_tokens=64",
        "sampling.max_new_tokens=112",
        "buffer.batch_groups=16",
        "producers.count=1",
        "producers.slots=64",
        "learner.steps=40",
        "learner.optim.lr=1e-3",
        "learner.distillation.loss=jsd",
        "learner.distillation.top_k=8",
    )
    done = run.launch(*settings, timeout=300)
    assert done.returncode == 0, done.stdout + run.logs()
    assert "\nteacher " in done.stdout and "\nreward " not in done.stdout, "what it learned is the teacher's figure"
    rows = [json.loads(line) for line in (run.folder / "runs/data/running_sum-heldout.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows[:64]]
    before, after = (divergence(folder, teacher, prompts) for folder in (student, run.dir / "export"))
    assert after < before / 10, (before, after)


def divergence(student: Path, teacher: Path, prompts: list[str]) -> float:
    """Mean KL(student || teacher) per token over the whole vocabulary, along the student's own samples."""
    from transformers import AutoTokenizer

    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    first, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (student, teacher))
    given = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        ids = first.generate(**given, do_sample=True, max_new_tokens=64, top_k=0, top_p=1.0, temperature=1.0)
        start = given["input_ids"].shape[1]
        mask = torch.cat((given["attention_mask"], torch.ones_like(ids[:, start:])), 1)
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        one, other = (
            model(ids, attention_mask=mask, position_ids=places).logits[:, start - 1 : -1].log_softmax(-1)
            for model in (first, second)
        )
    ended = (ids[:, start:] == tokenizer.eos_token_id).cumsum(-1) > 1
    ended |= (ids[:, start:] == tokenizer.pad_token_id) & (tokenizer.pad_token_id != tokenizer.eos_token_id)
    gaps = (one.exp() * (one - other)).sum(-1)
    return float(gaps[~ended].mean())
