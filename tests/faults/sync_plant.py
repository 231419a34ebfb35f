"""A weight-sync service, a learner and three generators as processes, and what must hold of them at every moment.

`SyncPlant` starts them (`sync_roles`), brings versions to them, hurts one of them while generator g0 has just taken
bucket k, and checks: no generator ever made anything current but a version that was published, whole; those that live
end with the same version; nobody who came back serves before it has it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import Child, Forks
from sync_roles import BUCKETS

from asyncrl.config import Config, DataConfig, ModelConfig, RewardFunctionConfig, RunConfig, WeightSyncConfig, dump
from asyncrl.errors import Unavailable
from asyncrl.monitor.control import ServiceClient
from asyncrl.runtime.run_dir import RunDir, endpoint

DEADLINE_S = {"collective": 1.5}  # a quarter of it is for members to appear
OTHER_DEADLINE_S = 1.0
MEMBER_S = 0.8
WITHIN_S = 90.0  # for everybody to be whole again; the machine may be busy
GENERATORS = ("g0", "g1", "g2")
HERE = Path(__file__).resolve().parent
__all__ = ["BUCKETS", "GENERATORS", "SyncPlant", "sync_forks"]


def sync_forks() -> Forks:
    """The parent of all processes of the tests of a module."""
    return Forks(["sync_roles"], paths=[HERE])


class SyncPlant:
    """One run. `settings` are those of `[weightsync]`."""

    def __init__(
        self, forks: Forks, folder: Path, *, generators: tuple[str, ...] = GENERATORS, **settings: Any
    ) -> None:
        self.deadline_s = DEADLINE_S.get(settings["transport"], OTHER_DEADLINE_S)
        self.stopped_s = self.deadline_s + 0.3
        sync = WeightSyncConfig(
            **{"timeout_s": self.deadline_s, "member_timeout_s": MEMBER_S, "stream_chunk_bytes": 5000, **settings}
        )
        self.config = Config(
            run=RunConfig(dir=str(folder / "run")),
            model=ModelConfig(path="none"),
            data=DataConfig(source="a:b"),
            reward=(RewardFunctionConfig(function="a:b"),),
            weightsync=sync,
        )
        self.run = RunDir(self.config.run_dir).create()
        self.run.config.write_text(dump(self.config))
        self.version = self.epoch = 0
        self.published: dict[str, int] = {}  # version by digest
        self.held_up: list[float] = []  # seconds that each publish took
        self.children: dict[str, Child] = {}
        self.seen: dict[str, int] = {}  # words of each child that were checked
        self.commits: dict[str, list[tuple[int, str]]] = {}  # of each generator process
        self.names = generators
        self._forks = forks
        self.start("service")
        self.start("learner")
        for name in generators:
            self.start(name)
        self.next_version()
        self.wait_whole()

    # ------------------------------------------------------------ processes

    def start(self, name: str, **environment: str) -> None:
        """A process of that name, in place of the one before."""
        function, args = ("generator", [name]) if name in self.names else (name, [])
        if name == "learner":
            self.epoch += 1
            args = [self.epoch]
        log = str(self.run.root / f"{name}.log")
        child = self._forks.start("sync_roles", function, str(self.run.config), *args, environment=environment, log=log)
        self.children[name], self.seen[name], self.commits[name] = child, 0, []
        if name != "service":
            assert child.next() == ("up",), f"{name} did not start: {Path(log).read_text()[-2000:]}"

    def signal(self, name: str, number: int) -> None:
        self.children[name].signal(number)

    def kill(self, name: str) -> None:
        self.children[name].end()

    # ------------------------------------------------------------ versions

    def next_version(self) -> int:
        """Publish one more; the learner must not be held up."""
        self.version += 1
        self.say("learner", "publish", self.version)
        word = self.children["learner"].next()
        assert word is not None and word[:2] == ("published", self.version), word
        self.published[word[2]] = self.version
        self.held_up.append(word[3])
        return self.version

    def publish_to_the_dead(self) -> None:
        """Publish from a learner that is about to be killed by a fail-point: it may not answer."""
        self.version += 1
        self.say("learner", "publish", self.version)
        word = self.children["learner"].next(2)
        if word is not None:
            self.published[word[2]] = self.version

    def say(self, name: str, *word: Any) -> None:
        self.children[name].say(word)

    def hear(self, name: str, within_s: float = 0.0) -> list[Any]:
        """New words of a generator; what it makes current is checked here."""
        child = self.children[name]
        while child.pipe.poll(within_s):
            if child.next(0) is None:
                break
            within_s = 0.0
        new = [word for word in child.said[self.seen[name] :] if word is not None]
        self.seen[name] = len(child.said)
        for word in new:
            if word[0] == "commit":
                assert self.published.get(word[2]) == word[1], f"{name} made a torn version {word[1]} current"
                self.commits[name].append((word[1], word[2]))
            assert word[0] != "ended", f"{name} ended: {word}"
        return new

    def wait_bucket(self, name: str, number: int) -> None:
        """Until the generator has taken this bucket of the newest version, and stands there."""
        self.wait(f"bucket {number} at {name}", lambda: ("bucket", self.version, number) in self.hear(name, 0.02))

    def wait_whole(self, *names: str) -> None:
        """Until these generators (all) hold the newest version; what they hold is digested again."""
        for name in names or self.names:
            self.wait(f"version {self.version} at {name}", lambda name=name: self._holds_newest(name))
        for name in names or self.names:
            version, digest = self.look(name)
            assert version == self.version and self.published[digest] == version

    def _holds_newest(self, name: str) -> bool:
        self.hear(name, 0.02)
        assert self.children[name].alive(), f"{name} has ended\n{self.logs()}"
        return bool(self.commits[name]) and self.commits[name][-1][0] == self.version

    def look(self, name: str) -> tuple[int, str]:
        """What a generator says that it holds now, digested now: a published version or nothing."""
        self.say(name, "look")
        until = time.monotonic() + 90
        while time.monotonic() < until:
            for word in self.hear(name, 0.05):
                if word[0] == "holds":
                    assert word[2] == "" or self.published.get(word[2]) == word[1], f"{name} holds a torn {word[1]}"
                    return word[1], word[2]
        raise AssertionError(f"{name} does not say what it holds")

    def members(self) -> dict[str, Any]:
        """The generators as the service sees them; empty where it does not answer."""
        client = ServiceClient(endpoint(self.config, "weightsync"), timeout_s=60)
        try:
            return dict(client.status()["members"])
        except Unavailable:
            return {}
        finally:
            client.close()

    def wait(self, what: str, ready: Callable[[], Any], within_s: float = WITHIN_S) -> None:
        until = time.monotonic() + within_s
        while not ready():
            assert time.monotonic() < until, f"waited {within_s:g} s for {what}; {self.members()}\n{self.logs()}"
            time.sleep(0.005)

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.run.root.glob("*.log")))

    # ------------------------------------------------------------ one fault

    def hurt(self, victim: str, action: int, number: int) -> float:
        """Let it happen while g0 has bucket `number` of the next version; bring everybody back. How long until the
        others were whole again."""
        self.say("g0", "gate", self.version + 1, number)
        self.look("g0")  # it takes words in order: its answer says that the gate is set
        self.next_version()
        self.wait_bucket("g0", number)
        self.signal(victim, action)
        started = time.monotonic()
        if action == signal.SIGKILL:
            self._after_kill(victim)
        else:
            self._after_stop(victim)
        took = time.monotonic() - started
        self.wait_whole()
        self.check()
        return took

    def _after_kill(self, victim: str) -> None:
        if victim != "g0":
            self.say("g0", "go")
        others = [name for name in self.names if name != victim]
        if victim == "learner":
            for name in others:
                version, _ = self.look(name)
                assert version in (self.version - 1, self.version)
            self.start("learner")
            self.next_version()
        elif victim == "service":
            self.start("service")
        self.wait_whole(*others)
        if victim in self.names:
            self.start(victim)
            self._comes_back(victim)

    def _after_stop(self, victim: str) -> None:
        if victim != "g0":
            self.say("g0", "go")
        others = [name for name in self.names if name != victim]
        until = time.monotonic() + self.stopped_s
        if victim in self.names:
            self.wait_whole(*others)
            self.next_version()  # the learner goes on meanwhile
            self.wait_whole(*others)
            self.wait(
                f"{victim} to be left out",
                lambda: self.members().get(victim, {}).get("state") not in ("serving", "syncing"),
            )
        time.sleep(max(0.0, until - time.monotonic()))
        self.signal(victim, signal.SIGCONT)
        if victim in self.names:
            self.say(victim, "go")
            self._comes_back(victim)
        self.wait_whole(*others)

    def _comes_back(self, name: str) -> None:
        """It serves again only with the newest version, by its own word."""

        def serves() -> bool:
            self.hear(name)
            state = self.members().get(name, {})
            if state.get("state") != "serving" or state["pid"] != self.children[name].pid:
                return False  # or it is the process before, of which the service does not know yet that it is dead
            self.hear(name)
            assert state["version"] == self.version and self.version in [version for version, _ in self.commits[name]]
            return True

        self.wait(f"{name} to serve again", serves)

    def check(self) -> None:
        """Nobody was held up, and all agree."""
        assert max(self.held_up) < self.deadline_s + 1
        assert {self.commits[name][-1] for name in self.names} == {(self.version, self._digest())}

    def _digest(self) -> str:
        return next(digest for digest, version in self.published.items() if version == self.version)

    def close(self) -> None:
        for child in self.children.values():
            child.end()
