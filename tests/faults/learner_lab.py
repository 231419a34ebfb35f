"""A learner under fire: real buffer and weight-sync services, real learner processes, scripted arrivals.

All groups of the run are made before the first learner starts (bound and depth are as long as the run), from their
number alone. So the batch of step s is always groups (s - 1) * B .. s * B - 1, whatever is killed when: runs that
differ in their faults alone must end with the same bits.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm

from asyncrl.audit.prove import audit_file
from asyncrl.config import Config, dump, parse
from asyncrl.engine import GenDelta
from asyncrl.errors import Unavailable
from asyncrl.metrics import read_lines
from asyncrl.monitor.control import ServiceClient
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.runtime.run_dir import RunDir, endpoint
from buffers.client.producer import ProducerClient

ROOT = Path(__file__).resolve().parents[2]
B, G = 2, 3
TOML = """
model.path = "{model}"
model.dtype = "float32"
run.name = "lab"
run.dir = "{dir}"
run.hang_timeout_s = 60
data.source = "a:b"
data.max_prompt_tokens = 16
sampling.max_new_tokens = 16
sampling.group_size = 3
buffer.store = "sqlite"
buffer.batch_groups = 2
buffer.max_staleness = {steps}
learner.steps = {steps}
learner.micro_batch_tokens = 64
learner.checkpoint_every = 2
learner.optim.lr = 1e-3
learner.engine_gap = "warn"
log.tensorboard = false
log.heartbeat_s = 0.5
network.request_timeout_s = 20
[[reward]]
function = "a:b"
"""


class Children:
    """Learner processes: start, kill, wait."""

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, argv: list[str], *, log: Path, env: dict[str, str], limits: dict[str, int]) -> int:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("ab") as out:
            child = warm.popen(
                [sys.executable, "-m", "learners.main", *argv],
                cwd=ROOT,
                env={**os.environ, **own, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        for limit, value in limits.items():
            resource.prlimit(child.pid, getattr(resource, limit), (value, value))
        self._started[child.pid] = child
        return child.pid

    def running(self, pid: int) -> bool:
        return self._started[pid].poll() is None

    def wait(self, pid: int, timeout: float) -> int | None:
        """The exit code (negative: the signal); None where it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._started[pid].wait(timeout)
        return self._started[pid].returncode

    def close(self) -> None:
        for child in self._started.values():
            child.kill()


class Lab:
    """One run folder with its services. `learner` starts a learner; what it leaves behind is read from the folder."""

    def __init__(self, folder: Path, model: Path, children: Children, *, steps: int, extra: str = "") -> None:
        self.config: Config = parse(
            TOML.format(model=model, dir=folder / "run", steps=steps),
            overrides=[line for line in extra.split(";") if line],
        )
        self.steps = steps
        self.children = children
        self.run = RunDir(self.config.run_dir).create()
        self.run.config.write_text(dump(self.config))
        self.log = self.run.logs / "learner.log"
        self.services: dict[str, subprocess.Popen[bytes]] = {}
        self.learners: list[int] = []

    # ------------------------------------------------------------ services

    def serve(self, *names: str, **env: str) -> Lab:
        for name in names or ("buffer", "weightsync"):
            module = {"buffer": "buffers.main", "weightsync": "weightsync.main"}[name]
            with (self.run.logs / f"{name}.log").open("ab") as log:
                self.services[name] = warm.popen(
                    [sys.executable, "-m", module, "--config", str(self.run.config)],
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                )
        if not names or "buffer" in names:
            self.wait("the buffer", lambda: self._answers() or self.services["buffer"].poll() is not None)
            assert self.services["buffer"].poll() is None, self.tail()
        return self

    def _answers(self) -> bool:
        observer = ServiceClient(endpoint(self.config, "buffer"), timeout_s=1)
        try:
            return bool(observer.status())
        except Unavailable:
            return False
        finally:
            observer.close()

    def status(self) -> dict[str, Any]:
        observer = ServiceClient(endpoint(self.config, "buffer"), timeout_s=30)
        try:
            return observer.status()
        finally:
            observer.close()

    def kill_service(self, name: str) -> None:
        self.services[name].kill()
        self.services[name].wait(60)

    def lose_store(self) -> None:
        """The buffer dies, and its store, its payloads and every trace of them are gone."""
        self.kill_service("buffer")
        shutil.rmtree(self.run.store)
        shutil.rmtree(self.run.segments)
        self.run.create()

    def produce(self, *, version: int = 0, count: int | None = None) -> None:
        """Lease and answer groups in their order: all of the run, or so many."""
        asyncio.run(self._produce(version, self.steps * B if count is None else count))

    async def _produce(self, version: int, wanted: int) -> None:
        client = ProducerClient(endpoint(self.config, "buffer"), name="script", timeout_s=30)
        await client.hello(model_fingerprint(self.config.model.path, dtype=self.config.model.dtype))
        digest = self.digest_of(version)
        made = 0
        deadline = time.monotonic() + 110
        while made < wanted:
            assert time.monotonic() < deadline, f"{made} of {wanted} groups\n{self.tail()}"
            leases = await client.lease(engine_version=version, max_groups=B, wait_s=1.0)
            for lease in leases.leases:
                prompt, samples = make_group(lease.group, version)
                reply = await client.submit(
                    lease,
                    prompt_ids=prompt,
                    samples=samples,
                    digests={version: digest},
                    row={},
                    rewards={item.index: float(item.token_ids[0] % 2) + 0.1 * item.index for item in samples},
                )
                made += len(reply.accepted) == len(samples)
            if leases.done:
                break
        client.close()

    def digest_of(self, version: int) -> str:
        """As the buffer was told it; version 0 by whoever comes first."""
        return next((line["digest"] for line in self.history("commit") if line["version"] == version), "start")

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pid in self.learners:
            if self.children.running(pid):
                os.kill(pid, signal.SIGKILL)
                self.children.wait(pid, 10)
        for service in self.services.values():
            service.kill()
            service.wait(60)

    # ------------------------------------------------------------ learners

    def learner(self, *words: str, failpoint: str = "", limits: dict[str, int] | None = None) -> int:
        """Start one; its pid."""
        argv = ["--config", str(self.run.config), "--name", "learner", *words]
        env = {"ASYNCRL_FAILPOINT": failpoint} if failpoint else {}
        pid = self.children.start(argv, log=self.log, env=env, limits=limits or {})
        self.learners.append(pid)
        return pid

    def end_of(self, pid: int, timeout: float = 90) -> int:
        code = self.children.wait(pid, timeout)
        assert code is not None, f"learner {pid} still runs\n{self.tail()}"
        return code

    def finish(self, timeout: float = 120) -> None:
        """One more learner, to the end of the run."""
        code = self.end_of(self.learner(), timeout)
        assert code == 0, self.tail()

    def assert_ends(self, pid: int, wanted: dict[str, Any], **accounted: int) -> None:
        """This learner ends by itself; nothing is lost or doubled; the result is that of the run without a fault."""
        code = self.end_of(pid, 120)
        assert code == 0, self.tail()
        self.assert_accounted(**accounted)
        assert self.result() == wanted

    def wait(self, what: str, condition: Callable[[], bool], timeout: float = 110) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout} s for {what}\n{self.tail()}"
            time.sleep(0.003)

    # ------------------------------------------------------------ what is left

    def tail(self, size: int = 3000) -> str:
        texts = [f"--- {path.name}\n{path.read_text()[-size:]}" for path in sorted(self.run.logs.glob("*.log"))]
        return "\n".join(texts)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.run.metrics / "learner.jsonl")

    def history(self, *events: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run.history) if line["e"] in events]

    def committed(self) -> int:
        """The newest step ever committed."""
        return max((line["step"] for line in self.history("commit")), default=0)

    def result(self) -> dict[str, Any]:
        """What two runs must agree on: the exported bytes, the digest of every version, the groups of every step."""
        export = hashlib.blake2b((self.run.export / "model.safetensors").read_bytes()).hexdigest()
        digests: dict[int, set[str]] = {}
        groups: dict[int, tuple[int, ...]] = {}
        for line in self.history("commit"):
            digests.setdefault(line["version"], set()).add(line["digest"])
            groups[line["step"]] = tuple(line["groups"])
        return {"export": export, "digests": {v: sorted(found) for v, found in digests.items()}, "groups": groups}

    def assert_accounted(self, **more: int) -> None:
        """Nothing lost, nothing doubled, every step trained."""
        audit = audit_file(self.run.history)
        assert audit.ok and (audit.lost, audit.doubled) == (0, 0), audit.violations
        expected = {"trained": self.steps * B, "steps": self.steps, **more}
        assert {name: getattr(audit, name) for name in expected} == expected


def make_group(number: int, version: int = 0) -> tuple[Any, list[GenDelta]]:
    """The prompt and the samples of a group; made from its number."""
    rng = np.random.default_rng(number)
    prompt = rng.integers(3, 20, int(rng.integers(2, 6))).astype(np.int32)
    samples = []
    for index in range(G):
        length = int(rng.integers(2, 12))
        samples.append(
            GenDelta(
                f"{number}:{index}",
                index,
                rng.integers(3, 20, length).astype(np.int32),
                -rng.random(length).astype(np.float32),
                ((version, length),),
                "stop",
            )
        )
    return prompt, samples


class Recorded:
    """A store with all arrivals of a run, made once per length and copied for every run."""

    def __init__(self, folder: Path, model: Path, children: Children) -> None:
        self.model = model
        self._folder = folder
        self._children = children
        self._references: dict[tuple[int, str], dict[str, Any]] = {}

    def lab(self, folder: Path, *, steps: int, extra: str = "") -> Lab:
        """A run whose groups have all arrived; no service runs yet."""
        kept = self._folder / f"arrivals-{steps}"
        if not kept.exists():
            first = Lab(self._folder / f"making-{steps}", self.model, self._children, steps=steps)
            try:
                first.serve("buffer").produce()
            finally:
                first.close()
            kept.mkdir()
            for name in ("store", "segments", "history.jsonl"):
                os.rename(first.run.root / name, kept / name)
        lab = Lab(folder, self.model, self._children, steps=steps, extra=extra)
        for name in ("store", "segments"):
            shutil.copytree(kept / name, lab.run.root / name, dirs_exist_ok=True)
        shutil.copy(kept / "history.jsonl", lab.run.history)
        return lab

    def fresh(self, folder: Path, *, steps: int, extra: str = "") -> Lab:
        """A run without any arrivals."""
        return Lab(folder, self.model, self._children, steps=steps, extra=extra)

    def reference(self, folder: Path, *, steps: int, extra: str = "") -> dict[str, Any]:
        """How an undisturbed run of that length ends."""
        if (steps, extra) not in self._references:
            lab = self.lab(folder / "undisturbed", steps=steps, extra=extra)
            try:
                lab.serve()
                lab.finish()
                lab.assert_accounted()
                found = self._references[steps, extra] = lab.result()
                assert all(len(digests) == 1 for digests in found["digests"].values())
            finally:
                lab.close()
        return self._references[steps, extra]


def seed_of(name: str) -> random.Random:
    """Random points that can be had again: the seed is printed, and taken from CHAOS_SEED where that is set."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
    print(f"{name}: CHAOS_SEED={seed}")
    return random.Random(seed)


def make_model(folder: Path) -> Path:
    """A model folder of some thousand parameters, made by a process of its own."""
    code = (
        "import sys\n"
        "from learners.warm_start.tiny_model import make_tokenizer, make_tiny_qwen3, save_model\n"
        "tokenizer = make_tokenizer(sys.argv[1])\n"
        "save_model(sys.argv[1], make_tiny_qwen3(len(tokenizer), hidden_size=32, layers=2, head_dim=8, mlp_size=48))\n"
    )
    done = warm.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, timeout=120)
    if done.returncode:
        pytest.fail("the tiny model could not be made")
    return folder
