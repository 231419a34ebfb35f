"""What a step cost and where its time went: parts, operations, utilisation, traces; on one rank's whole loop."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_learner_loop import gang, make_batch, make_config, make_learner, model_dir

from asyncrl.config import parse
from asyncrl.config.sections.profile import ProfileConfig
from asyncrl.errors import ConfigErrors
from asyncrl.metrics import read_lines
from asyncrl.runtime.device import Device
from asyncrl.runtime.run_dir import RunDir
from learners.batch.micro_batches import Sample, packed_row, padded_rows
from learners.checkpoints.export import export
from learners.gang.gang import Gang
from learners.profiling.device_peaks import peak_flops
from learners.profiling.flops import model_costs
from learners.profiling.metered_backend import Meter, sample_lengths
from learners.profiling.profiler import Profiler
from learners.step.timing import PARTS, StepTimes

assert gang and model_dir  # fixtures


# ---------------------------------------------------------------- the clock


def test_the_parts_of_a_step_are_its_whole_time() -> None:
    ticks = itertools.count()
    times = StepTimes(clock=lambda: float(next(ticks)))  # every look at the clock is a second later
    times.lap("wait", fetch=0.25)
    times.lap("train", proximal=7.0)  # more than the lap lasted: not more than there is
    times.lap("publish")
    found = times.take()
    assert found["wait_s"] == 0.75 and found["fetch_s"] == 0.25 and found["publish_s"] == 1.0
    assert found["proximal_s"] == 1.0 and found["train_s"] == 0.0
    assert found["step_s"] == 3.0 == sum(found[f"{part}_s"] for part in PARTS)
    times.lap("checkpoint")
    assert times.take()["step_s"] == 1.0 and times.take()["step_s"] == 0.0


# ---------------------------------------------------------------- a whole loop


def ran(gang: Gang, model: Path, place: Path, extra: str = "", *, steps: int = 3) -> tuple[list[dict[str, Any]], float]:
    """The lines of metrics of a run, and the seconds of its loop."""
    config = make_config(model, place, steps=steps, extra=extra)
    learner, _, _, services = make_learner(config, gang)
    started = time.monotonic()
    learner.run()
    spent = time.monotonic() - started
    services.close()
    return [line for line in read_lines(RunDir(place).metrics / "learner.jsonl") if "step" in line], spent


def operations(model: Path, step: int, passes: int, *, scorer: bool = False) -> int:
    """Of all samples of a step, from the config alone."""
    costs = model_costs(json.loads((model / "config.json").read_text()), scorer=scorer)
    samples = [(g.prompt_ids.size, s.response.size) for g in make_batch(step).groups for s in g.samples]
    return passes * costs.forward([p + r for p, r in samples], predicted=sum(r for _, r in samples))


def test_a_run_says_where_its_time_went_and_what_it_computed(
    gang: Gang, model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    extra = 'learner.profile = { steps = "2:3", memory = true, peak_flops = 1e12 }'
    lines, spent = ran(gang, model_dir, tmp_path / "run", extra)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert sum(line[f"{part}_s"] for part in PARTS) == pytest.approx(line["step_s"], rel=1e-6)
        assert line["train_s"] > 0 and line["publish_s"] > 0 and line["assemble_s"] > 0 and line["proximal_s"] == 0
        assert line["model_flops"] == operations(model_dir, int(line["step"]), 3)
        assert line["tflops_per_device"] == pytest.approx(line["model_flops"] / line["train_s"] / 1e12)
        assert line["mfu"] == pytest.approx(line["tflops_per_device"]) and 0 < line["mfu_step"] < line["mfu"]
        assert 0 < line["memory_bytes"] <= line["memory_peak_bytes"]
    assert sum(line["step_s"] for line in lines) <= spent  # nothing is counted twice
    assert lines[2]["checkpoint_s"] > 0 and lines[1]["checkpoint_s"] == 0  # that of step 2 blocked step 3
    said = capfd.readouterr().out
    assert said.count("keeps no history of its memory") == 1 and "profile of steps 2 to 3" in said
    [trace] = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "trace_step_000002-000003_rank0.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert names.count("asyncrl: forward and backward") == 2


def test_passes_without_gradient_have_a_part_and_operations_of_their_own(
    gang: Gang, model_dir: Path, tmp_path: Path
) -> None:
    """Two mini-batches: proximal log-probs are computed before the first update."""
    lines, _ = ran(gang, model_dir, tmp_path, "learner.algorithm.minibatches = 2\nlearner.packing = false", steps=1)
    assert lines[0]["model_flops"] == operations(model_dir, 1, 4) and lines[0]["proximal_s"] > 0
    assert "mfu" not in lines[0]  # a CPU has no peak unless one is set


def test_a_model_beside_the_policy_counts_too(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    lines, _ = ran(gang, model_dir, tmp_path, "learner.algorithm.advantage = 'gae'", steps=1)
    critic = operations(model_dir, 1, 4, scorer=True)  # its values, then its own forward and backward pass
    assert lines[0]["model_flops"] == operations(model_dir, 1, 3) + critic
    assert lines[0]["proximal_s"] > 0


def test_below_adapters_no_weight_takes_a_gradient_and_they_are_exported(
    gang: Gang, model_dir: Path, tmp_path: Path
) -> None:
    """A checkpoint of adapters is none of the model's own tensors: its backend loads it, and writes merged weights."""
    pytest.importorskip("peft", exc_type=ImportError)
    lora = 'learner.lora = { rank = 2, publish = "merged" }'
    lines, _ = ran(gang, model_dir, tmp_path / "run", lora, steps=1)
    costs = model_costs(json.loads((model_dir / "config.json").read_text()))
    samples = [(g.prompt_ids.size, s.response.size) for g in make_batch(1).groups for s in g.samples]
    lengths, predicted = [int(p + r) for p, r in samples], int(sum(r for _, r in samples))
    assert lines[0]["model_flops"] == costs.training(lengths, predicted=predicted, frozen=True)
    assert operations(model_dir, 1, 2) < lines[0]["model_flops"] < operations(model_dir, 1, 3)
    said: list[str] = []
    config = make_config(model_dir, tmp_path / "run", steps=1, extra=lora)
    folder, final = export(config, gang=gang, out=tmp_path / "out", say=said.append), RunDir(tmp_path / "run").export
    assert len(said) == 1 and "its backend loads it" in said[0]
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (folder / name).read_bytes() == (final / name).read_bytes()


def test_an_unknown_architecture_costs_the_figures_alone(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    said: list[str] = []
    meter = Meter(make_config(tmp_path / "nowhere", tmp_path), gang, say=said.append)
    backend: Any = SimpleNamespace(forward_logprobs=lambda micro: ["as it was"], critic=None)
    counted = meter.wrap(backend)
    assert counted.forward_logprobs([row(3)]) == ["as it was"] and counted.critic is None
    assert len(said) == 1 and "no model_flops and no mfu" in said[0]
    seconds, found = meter.take()
    assert seconds >= 0 == found and meter.take() == (0, 0)
    assert set(meter.figures(found, {"proximal_s": 1, "train_s": 1, "step_s": 2})) == {
        "memory_bytes",
        "memory_peak_bytes",
    }


# ---------------------------------------------------------------- lengths, peaks, settings


def a_sample(prompt: int, response: int) -> Sample:
    zeros = np.zeros(response, np.float32)
    return Sample(np.arange(prompt + response, dtype=np.int32), prompt, zeros, zeros.astype(np.uint8), 0.0)


def row(*lengths: int) -> Any:
    return packed_row([a_sample(2, length - 2) for length in lengths])


def test_lengths_are_those_of_the_samples_however_they_are_laid_out() -> None:
    samples = [a_sample(2, 5), a_sample(4, 1), a_sample(1, 9)]
    assert sample_lengths(packed_row(samples)) == sample_lengths(padded_rows(samples)) == [7, 5, 10]
    assert sample_lengths(packed_row([])) == []  # its one token is nobody's


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "float16", 989.4e12),
        ("NVIDIA H200 NVL", "bfloat16", 835e12),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA A10G", "bfloat16", 0),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("AMD Instinct MI325X", "bfloat16", 1307.4e12),
        ("NVIDIA H20", "float16", 148e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("Tesla V100-SXM2-32GB", "bfloat16", 0),
        ("NVIDIA H100 80GB HBM3", "float32", 0),
        ("cpu", "bfloat16", 0),
    ],
)
def test_the_peak_of_a_device_goes_by_its_name(name: str, dtype: str, peak: float) -> None:
    assert peak_flops(name, dtype) == peak


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ('steps = "8:5"', "not a step such as 5"),
        ('steps = "0:2"', "not a step"),
        ('steps = "5-8"', "not a step"),
        ("memory = true", "memory needs"),
    ],
)
def test_a_range_that_is_none_is_refused(profile: str, words: str, model_dir: Path) -> None:
    text = 'model.path = "m"\ndata.source = "a:b"\n[[reward]]\nfunction = "a:b"\n[learner.profile]\n'
    with pytest.raises(ConfigErrors, match=words) as refused:
        parse(text + profile)
    assert refused.value.errors[0].where == "<toml>:6"


def test_other_ranks_and_steps_write_nothing_and_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    settings = ProfileConfig(steps="2", ranks=(1,))
    other = Profiler(settings, rank=0, device=Device("cpu"), root=tmp_path, say=said.append)
    mine = Profiler(settings, rank=1, device=Device("cpu"), root=tmp_path / "none" / "such", say=said.append)
    for step in (1, 2, 3):
        for one in (other, mine):
            one.start_step(step)
            one.end_step(step)
    other.close(3)
    mine.close(3)
    assert len(said) == 1 and "the profile of steps 2 to 2 is lost" in said[0]
    assert not list(tmp_path.iterdir())
    cut = Profiler(settings, rank=1, device=Device("cpu"), root=tmp_path, say=said.append)
    cut.start_step(2)
    cut.close(1)  # the end was asked for
    assert len(list((tmp_path / "profile").iterdir())) == 1
