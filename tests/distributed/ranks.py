"""What the tests on several ranks share: a tiny model, a gang of this process, one launch of two ranks.

The case modules (`fsdp2_cases`, `critic_cases`, `supervised_cases`) hold what is trained; each has
`run_all(model, gang, out)` with results by case. Under torchrun this file runs all of them in one launch and rank 0
writes `OUT/<module>/results.json`; the tests call the same functions in a process group of one rank as the reference.
Batches are structs with the fields that training reads, so that no buffer is needed.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl import config as configuration
from learners.gang import Gang
from learners.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

MODULES = ("fsdp2_cases", "critic_cases", "supervised_cases")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LAUNCH_S = 480
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


class GroupSample(msgspec.Struct, frozen=True):
    """What training reads of a sample."""

    index: int
    response: Any
    logprobs: Any
    reward: float
    mask: Any = None
    runs: Any = ((0, 1),)
    finish: str = "stop"
    parts: dict[str, float] = {}


class Group(msgspec.Struct, frozen=True):
    """What training reads of a group."""

    group: int
    prompt_ids: Any
    samples: tuple[GroupSample, ...]
    bound: int = 4


class Batch(msgspec.Struct, frozen=True):
    """What training reads of a batch."""

    step: int
    version: int
    groups: tuple[Group, ...]
    tuning: str = ""


def settings(model: Path, lines: str, extra: str = "") -> configuration.Config:
    """The shared settings, those of a case module (TOML), and overrides with ; between them."""
    return configuration.parse(
        SETTINGS.format(model=model) + lines, overrides=[line for line in extra.split(";") if line]
    )


def lone_config(model: Path = Path("m")) -> configuration.Config:
    """Of a gang: which cases it will train does not matter."""
    return settings(model, 'data.max_prompt_tokens = 16\n[[reward]]\nfunction = "a:b"')


def make_model(folder: Path) -> Path:
    """A Qwen3 of two layers with tied embeddings, and its tokenizer."""
    tokenizer = make_tokenizer(folder)
    save_model(folder, make_tiny_qwen3(len(tokenizer), hidden_size=32, layers=2, head_dim=8, mlp_size=48))
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


def launched(home: Path, model: Path) -> Path:
    """The folder with the results of two ranks, all case modules in one launch; made by whoever comes first.

    `home` is that of the whole test run: workers of one run share the launch. The lock is held while it runs, at most
    `LAUNCH_S`.
    """
    out = home / "two_ranks"
    with (home / "two_ranks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            out.mkdir()
            _launch(model, out)
    return out


def _launch(model: Path, out: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
             "--nproc-per-node", "2", __file__, str(model), str(out)],
            capture_output=True, text=True, timeout=LAUNCH_S, env=environment, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        said = f"{error}\n{error.stdout!r}\n{error.stderr!r}"
    (out / "said.txt").write_text(said)


def results_in(out: Path, module: str) -> tuple[dict[str, Any], Path]:
    """Results of a case module and its folder. Not the exit code decides: Gloo has been seen to abort at the end."""
    results = out / module / "results.json"
    assert results.exists(), (out / "said.txt").read_text()
    return msgspec.json.decode(results.read_bytes()), results.parent


def main() -> None:
    """`torchrun ranks.py MODEL OUT`."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    gang = Gang.join(lone_config(model))
    for name in MODULES:
        folder = out / name
        if gang.lead:
            folder.mkdir()
        gang.barrier()
        results = importlib.import_module(name).run_all(model, gang, folder)
        if gang.lead:
            (folder / "results.json").write_bytes(msgspec.json.encode(results))
    gang.leave()


if __name__ == "__main__":
    main()
