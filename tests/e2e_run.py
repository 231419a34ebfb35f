"""A small run of real processes: a random tiny model, prompts, a configuration, and the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm

ROOT = Path(__file__).parents[1]
REWARD = """
import os, time
def length_reward(data_source, solution_str, ground_truth, extra_info=None):
    return min(len(solution_str), 20) / 20
def failing_reward(data_source, solution_str, ground_truth, extra_info=None):
    raise ValueError("this reward always fails")
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with random weights; no training."""
    folder = tmp_path_factory.mktemp("model")
    code = (
        "import sys, torch\n"
        "from learners.warm_start.tiny_model import make_tokenizer, make_tiny_qwen3, save_model\n"
        "tokenizer = make_tokenizer(sys.argv[1])\n"
        "torch.manual_seed(0)\n"
        "save_model(sys.argv[1], make_tiny_qwen3(len(tokenizer)))\n"
    )
    warm.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=True, timeout=120)
    return folder


class Run:
    """One run folder and its commands: forked with their roles, or (`fresh`) interpreters that start as a user's do."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.fresh = False
        self.folder = folder
        self.dir = folder / "run"
        self.config = folder / "run.toml"
        self.children: list[subprocess.Popen[str]] = []
        (folder / "my_rewards.py").write_text(REWARD)
        rows = [{"prompt": f"{n % 90 + 10}+{n % 7 + 10}=", "data_source": "add"} for n in range(64)]
        for row in rows:
            row["reward_model"] = {"ground_truth": "0"}  # type: ignore[assignment]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config.write_text(
            f'[run]\nname = "test"\ndir = "{self.dir}"\n'
            f'[model]\npath = "{model}"\ndtype = "float32"\n'
            f'[data]\npath = "{folder}/prompts.jsonl"\nmax_prompt_tokens = 32\n'
            "[sampling]\ngroup_size = 4\nmax_new_tokens = 24\n"
            "[buffer]\nbatch_groups = 4\nmax_staleness = 2\nlease_timeout_s = 4\n"
            "[producers]\ncount = 2\nslots = 16\n"
            '[[reward]]\nfunction = "my_rewards:length_reward"\n'
            "[reward_workers]\ncount = 1\ntimeout_s = 10\n"
            "[learner]\nsteps = 5\nmicro_batch_tokens = 512\ncheckpoint_every = 2\n"
            "[learner.optim]\nlr = 1e-4\n"
            "[log]\ntensorboard = false\n"
        )

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": f"{self.folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}

    def start(self, *words: str) -> subprocess.Popen[str]:
        popen = subprocess.Popen if self.fresh else warm.popen
        child = popen(
            [sys.executable, "-m", "asyncrl", *words],
            cwd=self.folder,
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.children.append(child)
        return child

    def command(self, *words: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        child = self.start(*words)
        try:
            out, _ = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.close()
            out, _ = child.communicate(timeout=60)
            pytest.fail(f"asyncrl {' '.join(words)} hung:\n{out}\n{self.logs()}")
        return subprocess.CompletedProcess(words, child.returncode, out, "")

    def launch(self, *settings: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        words = [word for setting in settings for word in ("--set", setting)]
        return self.command("launch", "all", str(self.config), *words, timeout=timeout)

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.dir / name
        found = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def steps(self) -> list[int]:
        return [int(line["step"]) for line in self.lines("metrics/learner.jsonl")]

    def audit(self) -> dict[str, Any]:
        done = self.command("audit", str(self.dir), "--json", timeout=60)
        result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        result["exit"] = done.returncode
        return result

    def pid(self, role: str) -> int:
        """Pid of the newest living process of a role or name."""
        for line in reversed(self.lines("processes.jsonl")):
            if role in (line["role"], line["name"]) and alive(line["pid"]):
                return int(line["pid"])
        raise AssertionError(f"no living {role}")

    def wait(self, what: str, condition: Callable[[], bool], timeout: float = 90) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if condition():
                return
            time.sleep(0.1)
        raise AssertionError(f"waited {timeout} s for {what}\n{self.logs()}")

    def logs(self) -> str:
        texts = [f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.dir.glob("logs/*.log"))]
        return "\n".join(texts)

    def living(self) -> list[dict[str, Any]]:
        return [line for line in self.lines("processes.jsonl") if alive(line["pid"])]

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
        for line in self.lines("processes.jsonl"):
            if alive(line["pid"]):
                os.kill(line["pid"], signal.SIGKILL)


def alive(pid: int) -> bool:
    """Running, and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path) -> Iterator[Run]:
    made = Run(tmp_path, tiny_model)
    yield made
    made.close()
