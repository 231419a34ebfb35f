"""The data plane as real processes that may be killed at any moment: a small supervisor, proxies, and what they leave.

`Plant` starts the real buffer, weight sync, producers (with `toy_engine`) and reward workers, and `mini_learner`; each
worker reaches the buffer through a proxy link of its own. A role that ends with anything but 0 is started again at
once, as the launcher would (its budgets would end a chaos run). Everything else is read from the run folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis
import warm
from mini_learner import Mini, load
from proxy import Link, Proxies, free_port
from redis.backoff import NoBackoff
from redis.retry import Retry
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from asyncrl.audit.findings import Audit
from asyncrl.audit.prove import audit_run
from asyncrl.config import Config, dump, parse
from asyncrl.monitor.control import ServiceClient
from asyncrl.net.addresses import ipc_address
from asyncrl.runtime.run_dir import RunDir, buffer_address

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOKENS = ["<pad>", "<bos>", "<eos>", *"0123456789"]
REWARDS = """
def score(sample):
    return (sum(sample.response_ids) % 7) / 7
"""
TOML = """
model.path = "{model}"
model.dtype = "float32"
run.name = "plant"
run.dir = "{dir}"
run.hang_timeout_s = 60
data.path = "{data}"
data.max_prompt_tokens = 16
sampling.max_new_tokens = 12
sampling.group_size = 2
buffer.batch_groups = 8
buffer.max_staleness = 4
buffer.lease_timeout_s = 2
buffer.max_reissue = 50
buffer.segment_bytes = 65536
producers.engine = "toy"
producers.slots = 32
reward_workers.timeout_s = 5
reward_workers.batch_samples = 32
learner.checkpoint_every = 5
learner.batch_timeout_s = 60
weightsync.timeout_s = 3
weightsync.member_timeout_s = 3
log.tensorboard = false
log.heartbeat_s = 0.3
network.buffer = "tcp://127.0.0.1:{port}"
network.request_timeout_s = 30
[[reward]]
function = "toy_rewards:score"
"""
MODULES = {
    "buffer": "buffers.main",
    "standby": "buffers.main",
    "weightsync": "weightsync.main",
    "producer": "producers.main",
    "reward": "producers.rewards.main",
}


class Role:
    """One name of the plant and the process that carries it now."""

    def __init__(self, name: str, link: Link | None) -> None:
        self.name = name
        self.kind = name.partition("-")[0]
        self.link = link
        self.env: dict[str, str] = {}  # of the next process
        self.words: list[str] = []
        self.inside: list[str] = []  # words before its command
        self.command: list[str] = []  # instead of that of the role
        self.always: list[str] = []  # words of every process
        self.process: subprocess.Popen[bytes] | None = None
        self.codes: list[int] = []
        self.wanted = True
        self.not_before = 0.0
        self.since = 0.0  # when the process was started

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Plant:
    """One run. `extra` are settings `key=value`; `env` goes to every process; `judges`: workers of named judges."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int = 20,
        producers: int = 2,
        rewards: int = 1,
        extra: Sequence[str] = (),
        env: dict[str, str] | None = None,
        rewards_code: str = REWARDS,
        seed: int = 0,
        judges: Mapping[str, int] | None = None,
    ) -> None:
        self.port = free_port()
        made = prepare(folder, rewards_code)
        text = TOML.format(model=made / "model", dir=folder / "run", data=made / "data.jsonl", port=self.port)
        self.config: Config = parse(text, overrides=[f"learner.steps={steps}", *extra])
        self.run = RunDir(self.config.run_dir).create()
        self.run.config.write_text(dump(self.config))
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{made}{os.pathsep}{HERE}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self.proxies = Proxies()
        names = [f"producer-{number}" for number in range(producers)]
        names += [f"reward-{number}" for number in range(rewards)] + ["learner"]
        own = {f"reward-{judge}-{number}": judge for judge, count in (judges or {}).items() for number in range(count)}
        names += own
        self.roles = {name: Role(name, None) for name in ("buffer", "weightsync")}
        for place, name in enumerate(names):
            self.roles[name] = Role(name, self.proxies.link(self.port, seed=seed + place))
        for name, judge in own.items():
            self.roles[name].always = ["--judge", judge]
        self.restarts: Counter[str] = Counter()
        self._closing = False
        self._lock = threading.Lock()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    # ------------------------------------------------------------ processes

    def start(self, *names: str) -> Plant:
        """Start all roles (or these), and keep them running."""
        for role in self.roles.values():
            role.wanted = not names or role.name in names
        for role in self.roles.values():
            if role.wanted:
                self.spawn(role)
        self._keeper.start()
        return self

    def begin(self, name: str) -> None:
        """Start a role that was left out, or that ended."""
        role = self.roles[name]
        with self._lock:
            role.wanted = True
            self.spawn(role)

    def spawn(self, role: Role) -> None:
        program = ["-m", MODULES[role.kind]] if role.kind in MODULES else [str(HERE / "mini_learner.py")]
        words = ["--config", str(self.run.config), "--name", role.name]
        if role.link is not None:
            words += ["--connect", role.link.address]
        with (self.run.logs / f"{role.name}.log").open("ab") as log:
            role.process = warm.popen(
                [*role.inside, sys.executable, *(role.command or [*program, *words, *role.always, *role.words])],
                cwd=ROOT,
                stdout=log,
                env={**self.env, **role.env},
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        role.env, role.words, role.since = {}, [], time.monotonic()

    def _keep(self) -> None:
        while not self._closing:
            time.sleep(0.02)
            with self._lock:
                for role in self.roles.values():
                    self._look(role)

    def _look(self, role: Role) -> None:
        if self._closing or not role.wanted or role.process is None or (code := role.process.poll()) is None:
            return
        if role.codes[-1:] != [code] or not role.not_before:
            role.codes.append(code)
            role.not_before = time.monotonic() + (0.0 if code < 0 else 0.3)
        if code == 0:
            role.wanted = False
        elif time.monotonic() >= role.not_before:
            role.not_before = 0.0
            self.restarts[role.name] += 1
            self.spawn(role)

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Signal the role's living process; its pid. Raises where there is none."""
        role = self.roles[name]
        pid = role.pid
        if not role.alive():
            raise ProcessLookupError(name)
        os.kill(pid, number)
        return pid

    def finish(self) -> None:
        """Make the run as long as it is by now and a few steps more, and let it end: a restart with the new length."""
        steps = self.committed() + 3 * (self.config.buffer.max_staleness + 2)
        learner = msgspec.structs.replace(self.config.learner, steps=steps)
        self.config = msgspec.structs.replace(self.config, learner=learner)
        self.run.config.write_text(dump(self.config))
        for name in ("learner", "buffer"):
            if self.roles[name].alive():
                self.kill(name)
        self.wait_done(120)

    def stop_role(self, name: str, timeout: float = 20) -> int:
        """SIGTERM, and no restart; the exit code."""
        role = self.roles[name]
        role.wanted = False
        assert role.process is not None
        if role.alive():
            role.process.send_signal(signal.SIGTERM)
        return role.process.wait(timeout)

    def close(self) -> None:
        """Kill whatever still runs."""
        self._closing = True
        if self._keeper.is_alive():
            self._keeper.join(60)
        for role in self.roles.values():
            if role.process is not None and role.process.poll() is None:
                os.kill(role.pid, signal.SIGCONT)
                role.process.kill()
                role.process.wait(60)
        self.proxies.close()

    def __enter__(self) -> Plant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the private Redis

    def redis_pid(self) -> int:
        """Of the server that runs; raises FileNotFoundError while there is none."""
        text = (self.run.store / "redis.pid").read_text()
        if not text.isdigit():  # it is being written
            raise FileNotFoundError("redis.pid")
        return int(text)

    def redis(self) -> redis.Redis:
        path = ipc_address(self.run.store, "redis").removeprefix("ipc://")
        password = (self.run.store / "redis.admin").read_text()
        return redis.Redis(
            unix_socket_path=path, username="admin", password=password, socket_timeout=3, retry=Retry(NoBackoff(), 0)
        )

    # ------------------------------------------------------------ looking

    def status(self, timeout_s: float = 20) -> dict[str, Any]:
        observer = ServiceClient(buffer_address(self.config), timeout_s=timeout_s)
        try:
            return observer.status()
        finally:
            observer.close()

    def history(self, *events: str) -> list[dict[str, Any]]:
        """The events of these names; a line that is being written is left out."""
        data = self.run.history.read_bytes() if self.run.history.exists() else b""
        lines = [msgspec.json.decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        return [line for line in lines if line["e"] in events]

    def committed(self) -> int:
        return max((line["step"] for line in self.history("commit")), default=0)

    def wait(self, what: str, condition: Callable[[], Any], timeout: float = 110) -> Any:
        deadline = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited {timeout} s for {what}\n{self.tail()}"
            time.sleep(0.02)
        return found

    def wait_done(self, timeout: float = 90) -> None:
        """The learner ended with 0 after all steps."""
        self.wait("the learner to finish", lambda: self.roles["learner"].codes[-1:] == [0], timeout)
        assert self.checkpoint().step == self.config.learner.steps, self.tail()

    def checkpoint(self) -> Mini:
        return load(self.config)

    def tail(self, size: int = 2500) -> str:
        """The ends of all logs, with the stacks of the living; for a test that fails."""
        states = {}
        for role in self.roles.values():
            if role.alive():
                states[role.name] = Path(f"/proc/{role.pid}/stat").read_text().rpartition(")")[2].split()[0]
                role.process.send_signal(signal.SIGUSR1)  # type: ignore[union-attr]
        time.sleep(0.5)
        texts = [f"--- {path.name}\n{path.read_text(errors='replace')[-size:]}" for path in self.logs()]
        return (
            "\n".join(texts)
            + f"\nstates {states}, codes { {role.name: role.codes[-6:] for role in self.roles.values()} }"
        )

    def logs(self) -> list[Path]:
        return sorted(self.run.logs.glob("*.log"))

    def said(self, name: str) -> str:
        path = self.run.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def audit(self) -> Audit:
        return audit_run(self.run.root)

    def assert_accounted(self) -> Audit:
        """0 lost, 0 doubled, 0 above the bound; and the learner's own account of what it trained says the same."""
        found = self.audit()
        assert found.ok, f"{found.violations}\n{self.tail()}"
        assert (found.lost, found.doubled, found.over_bound) == (0, 0, 0)
        mine = self.checkpoint()
        wanted = self.config.learner.steps
        size = self.config.buffer.batch_groups
        trained = [number for step in mine.trained.values() for number in step]
        assert mine.step == wanted and sorted(mine.trained) == list(range(1, wanted + 1))
        assert len(trained) == len(set(trained)), "a group is twice in the weights"
        commits = {line["step"]: line["groups"] for line in self.history("commit")}
        assert {step: commits[step] for step in mine.trained} == mine.trained
        assert (found.trained, found.steps) == (len(trained), wanted)
        assert len(trained) + sum(found.dead.values()) >= wanted * size
        return found


def prepare(folder: Path, rewards_code: str) -> Path:
    """Model folder (a tokenizer and a shape), prompts, and the toy plugins with their entry point."""
    made = folder / "made"
    model = made / "model"
    model.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(TOKENS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps({"vocab_size": len(TOKENS), "eos_token_id": 2}))
    rows = [
        {"prompt": f"{number:03d}", "data_source": "toy", "reward_model": {"ground_truth": "0"}}
        for number in range(200)
    ]
    (made / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copy(HERE / "toy_engine.py", made / "toy_engine.py")
    (made / "toy_rewards.py").write_text(rewards_code)
    info = made / "toy_engine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[asyncrl.engines]\ntoy = toy_engine:ToyEngine\n")
    return made
