"""What the tests on several ranks share: tiny models, a gang of this process, one launch for each number of ranks.

The case modules (`backend_contract`, `critic_cases`, `supervised_cases`, `split_cases`) hold what is trained; each has
`run_all(model, gang, out)` with results by case. Under torchrun this file runs all jobs of a launch in one process
group and rank 0 writes `OUT/<job>/results.json`; the tests call the same functions in a process group of one rank as
the reference.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import matrix
import msgspec
import numpy as np
import pytest
import torch
import warm
from transformers import GenerationConfig

from asyncrl import config as configuration
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.gang.topology import Topology
from learners.step import update
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

#: Folder of the mixture-of-experts model below that of the dense one.
MOE = "moe"
#: Those of the dense model with one head of keys and values, and with as many as of queries.
LONE_KV, EACH_KV = "lone_kv", "each_kv"


class Job(NamedTuple):
    """A case module in a layout. `others`: launches and jobs whose checkpoints it loads, too."""

    module: str
    layout: str = ""  # settings with ; between them; those of `[learner.parallel]` make the gang
    others: tuple[tuple[int, str], ...] = ()
    model: str = ""  # a folder below that of the dense model


#: Case modules of two ranks without any layout.
CASE_MODULES = (
    "backend_contract",
    "critic_cases",
    "supervised_cases",
    "split_cases",
    "eight_bit_cases",
    "checkpoint_cases",
    "float16_cases",
    "vision_cases",
    "routing_cases",
    "row_cases",
)
#: The extra `megatron` is optional.
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


#: By the number of ranks, jobs by name.
LAUNCHES: dict[int, dict[str, Job]] = {
    1: {
        "alone": Job("written_alone"),
        "expert_alone": Job("written_alone", model=MOE),
        "composed_cases": Job("composed_cases"),
    },
    2: {name: Job(name) for name in CASE_MODULES}
    | {"ulysses": Job("backend_contract", "learner.ranks=2;learner.parallel.sequence=2")},
    4: {
        "hsdp": Job("backend_contract", "learner.ranks=4;learner.parallel.replicate=2"),
        "tensor": Job("backend_contract", "learner.ranks=4;learner.parallel.tensor=2"),
        "expert": Job("backend_contract", "learner.ranks=4;learner.parallel.expert=2", model=MOE),
        "row_cases": Job("row_cases"),
    },
}
for _count in (2, 4):
    LAUNCHES[_count]["composed_cases"] = Job("composed_cases", others=((1, "composed_cases"),))
MEGATRON = "learner.backend=megatron;learner.ranks={};learner.parallel.tensor={};learner.parallel.pipeline={}"
EXPERTS = ";learner.parallel.expert=2"
if HAS_MEGATRON:
    LAUNCHES[1] |= {"megatron_alone": Job("written_alone", "learner.backend=megatron")}
    LAUNCHES[2] |= {
        "megatron_tensor": Job("backend_contract", MEGATRON.format(2, 2, 1)),
        "megatron_pipeline": Job("backend_contract", MEGATRON.format(2, 1, 2)),
        "megatron_shares": Job("backend_contract", MEGATRON.format(2, 1, 1)),
        "megatron_cases": Job("megatron_cases"),
        "moe_cases": Job("moe_cases"),
        "megatron_expert": Job("backend_contract", MEGATRON.format(2, 1, 1) + EXPERTS, model=MOE),
    }
    LAUNCHES[4] |= {
        "megatron_both": Job("backend_contract", MEGATRON.format(4, 2, 2)),
        "megatron_mixed": Job("backend_contract", MEGATRON.format(4, 2, 1)),
        "moe_cases": Job("moe_cases"),
    }
for (_count, _name), _writers in matrix.CHECKPOINTS.items():
    if (_job := LAUNCHES[_count].get(_name)) is not None:
        _others = tuple(one for one in _writers if HAS_MEGATRON or "megatron" not in one[1])
        LAUNCHES[_count][_name] = _job._replace(others=_others)
#: So is `lora`: peft with what it imports.
HAS_PEFT = all(importlib.util.find_spec(name) for name in ("peft", "accelerate"))
if HAS_PEFT:
    LAUNCHES[2] |= {"lora_cases": Job("lora_cases")}
    LAUNCHES[4] |= {"lora_hsdp": Job("lora_cases", "learner.ranks=4;learner.parallel.replicate=2")}
#: Set where a test of the long form (`chaos`) was chosen: its cases are trained too. Case modules name them in `LONG`.
EVERY_CASE = "ASYNCRL_TEST_EVERY_CASE"
#: Jobs of the long form: number of ranks and name.
LONG_JOBS = ((4, "megatron_both"), (4, "megatron_mixed"), (4, "expert"), (4, "lora_hsdp"))
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCH_S = 480
#: Of the ranks: the library, and what tests share.
PYTHON_PATH = os.pathsep.join(str(Path(__file__).parents[up]) for up in (2, 1))
#: Of every case; the rest is the case module's own.
SETTINGS = """
model.path = "{model}"
model.dtype = "float32"
data.source = "a:b"
sampling.max_new_tokens = 16
learner.steps = 3
learner.micro_batch_tokens = 96
learner.optim.lr = 1e-3
"""

#: The least that a gang is made of.
LONE = 'data.max_prompt_tokens = 16\n[[reward]]\nfunction = "a:b"'


def chosen(names: Iterable[str], long: Collection[str]) -> list[str]:
    """The cases that are trained: those of the long form only where a test of it was chosen."""
    return [name for name in names if name not in long or EVERY_CASE in os.environ]


def parameters(names: Iterable[str], long: Collection[str]) -> list[Any]:
    """Cases as parameters of a test."""
    return [pytest.param(name, marks=[pytest.mark.chaos] if name in long else []) for name in names]


def settings(model: Path, lines: str, extra: str = "") -> configuration.Config:
    """The shared settings, those of a case module (TOML), and overrides with ; between them."""
    return configuration.parse(
        SETTINGS.format(model=model) + lines, overrides=[line for line in extra.split(";") if line]
    )


def lone_config(model: Path = Path("m")) -> configuration.Config:
    """Of a gang: which cases it will train does not matter."""
    return settings(model, LONE)


def make_model(folder: Path) -> Path:
    """A Qwen3 of two layers with tied embeddings, and its tokenizer; below it those with other heads of K/V."""
    for place, heads in ((folder, 2), (folder / LONE_KV, 1), (folder / EACH_KV, 4)):
        tokenizer = make_tokenizer(place)
        made = make_tiny_qwen3(len(tokenizer), hidden_size=32, layers=2, head_dim=8, mlp_size=48, kv_heads=heads)
        save_model(place, made)
    return folder


def make_moe(folder: Path) -> Path:
    """A Qwen3-MoE of two layers with 8 experts, two of them for a token, and its tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer(folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).float()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(str(folder))
    return folder


@contextmanager
def alone() -> Iterator[Gang]:
    """This process as a gang of one; the environment is left as it was."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        gang = Gang.join(lone_config())
        try:
            yield gang
        finally:
            gang.leave()
            for name in ENVIRONMENT:
                patch.delenv(name, raising=False)


def broken(loss: Any, how: str) -> Any:
    """This loss where it raises, is not a number, or is right and has a gradient beyond float32."""

    def spoiled(*given: Any, **options: Any) -> Any:
        if how == "raises":
            raise ValueError("broken")
        value = loss(*given, **options)
        if how == "nan":
            return value._replace(loss=value.loss * float("nan"))
        current = given[0] if isinstance(given[0], torch.Tensor) else given[0].current
        steep = (current - current.detach()) * 1e38  # 0 itself
        return value._replace(loss=value.loss + torch.where(value.loss != 0, steep, 0.0))

    return spoiled


def check_no_trace(
    cases: Any, config: configuration.Config, gang: Gang, *, companion: tuple[Any, str] | None, how: str, says: str
) -> None:
    """A step between two good ones whose loss is `broken` is skipped, says so, and changes no bit of either model.

    `cases` makes trial, batches and digest; the loss is that of the policy, or the function of that module and name.
    """
    backend, buried = FSDP2Backend(config, gang), dict[int, str]()
    trial = cases.make_trial(config, backend, gang, buried)
    cases.train(trial, gang, cases.make_batch(1))
    before = cases.digest(backend)
    with pytest.MonkeyPatch.context() as patch:
        if companion is not None:
            patch.setattr(*companion, broken(getattr(*companion), how))
        else:
            loss_of = update.loss_for
            patch.setattr(update, "loss_for", lambda algorithm: broken(loss_of(algorithm), how))
        result = cases.train(trial, gang, cases.make_batch(2))
    assert result.skipped and result.broken.startswith(says), result.broken
    assert how != "gradient" or "the norm of the gradient is" in result.broken
    assert cases.digest(backend) == before and not buried
    assert not cases.train(trial, gang, cases.make_batch(3)).skipped
    assert cases.digest(backend) != before


def launched(home: Path, model: Path, count: int) -> Path:
    """The folder with the results of so many ranks, all jobs in one launch; made by whoever comes first.

    `home` is that of the whole test run: workers of one run share the launch. The lock is held while it runs, at most
    `LAUNCH_S`. Launches whose checkpoints it loads come first.
    """
    for job in LAUNCHES[count].values():
        for other, _ in job.others:
            if other != count:
                launched(home, model, other)
    out = step_folder(home, count)
    with out.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            out.mkdir()
            _launch(model, out, count)
    return out


def step_folder(home: Path, count: int) -> Path:
    """Where a launch of so many ranks writes."""
    return home / f"ranks_{count}"


def _launch(model: Path, out: Path, count: int) -> None:
    try:
        done = warm.run(
            torchrun(count, __file__, str(model), str(out)),
            capture_output=True,
            text=True,
            timeout=LAUNCH_S,
            env=environment(),
        )
        said = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        said = f"{error}\n{error.stdout!r}\n{error.stderr!r}"
    (out / "said.txt").write_text(said)


def torchrun(count: int, *script: str) -> list[str]:
    """The command of so many ranks of a script."""
    name = "torch.distributed.run"
    return [
        *(sys.executable, "-m", name, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(count)),
        *script,
    ]


def environment() -> dict[str, str]:
    """Of processes with these modules on their path."""
    kept = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    path = os.pathsep.join(filter(None, (PYTHON_PATH, os.environ.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def results_in(out: Path, job: str) -> tuple[dict[str, Any], Path]:
    """Results of a job and its folder. Not the exit code decides: Gloo has been seen to abort at the end."""
    results = out / job / "results.json"
    assert results.exists(), (out / "said.txt").read_text()
    return msgspec.json.decode(results.read_bytes()), results.parent


def apart(got: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest difference of two results' weights."""
    assert got["weights"].keys() == wanted["weights"].keys()
    return max(
        float(np.abs(np.subtract(values, wanted["weights"][name])).max()) for name, values in got["weights"].items()
    )


def main() -> None:
    """`torchrun ranks.py MODEL OUT`."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    joined = Gang.join(lone_config(model))
    for name, job in LAUNCHES[joined.size].items():
        if (joined.size, name) in LONG_JOBS and EVERY_CASE not in os.environ:
            continue
        gang, folder, started = in_layout(joined, job.layout), out / name, time.monotonic()
        if gang.lead:
            folder.mkdir()
        gang.barrier()
        given: dict[str, Any] = {"layout": job.layout} if job.layout else {}
        if job.others:
            given["others"] = {of: step_folder(out.parent, count) / of / "checkpoint" for count, of in job.others}
        results = importlib.import_module(job.module).run_all(model / job.model, gang, folder, **given)
        if gang.lead:
            (folder / "results.json").write_bytes(msgspec.json.encode(results))
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    joined.leave()


def in_layout(gang: Gang, layout: str) -> Gang:
    """The same ranks in another layout. They share meshes: a group has threads that wake a hundred times a second."""
    parallel = settings(Path("m"), LONE, layout).learner.parallel
    topology = Topology.from_config(parallel, rank=gang.rank, size=gang.size)
    placed = Gang(gang.rank, gang.size, gang.device, topology)
    placed._meshes = gang._meshes
    return placed


if __name__ == "__main__":
    main()
