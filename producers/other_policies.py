"""The other policies of a run (`[policies]`) in a producer: an engine of each, which follows its weight sync.

Guarantees:
1. an engine plays nothing before it holds a version with a matching digest, and takes each newer one, like that of the
   trained policy (`weightsync.receiver.receiver`);
2. if the weight sync of a policy is silent or has ended, its engine goes on with the last weights, and looks for the
   service again until the end of this process;
3. the wait for the first weights has a limit, and a text for status displays.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.config import Config, load
from asyncrl.errors import Unavailable, WorkError
from asyncrl.net.keys import Keys, read_keys, worker_file
from asyncrl.plugins import find
from asyncrl.process_plan.interpreters import own_url
from asyncrl.runtime.run_dir import RunDir, endpoint
from producers.data.tokenizer import Tokenizer
from producers.environments.other_policy import OtherPolicy
from weightsync.receiver.receiver import Receiver

LOOK_S = 0.05
AGAIN_S = 1.0  # until a service that has ended is looked for again


class OtherPolicies:
    """Those of `run.other_policies`. `name`: of this producer."""

    def __init__(self, config: Config, *, name: str) -> None:
        member = f"{config.run.policy}-{name}"
        self._each = [_Follower(one, Path(folder), member) for one, folder in config.run.other_policies.items()]

    @property
    def waiting_for(self) -> str:
        """What is missing before a game can begin; empty if nothing is."""
        return "; ".join(one.waiting_for for one in self._each if not one.ready)

    async def wait_ready(self, limit_s: float, note: Callable[[str], bool]) -> dict[str, OtherPolicy]:
        """The policies by name, once each holds weights, or `note` returns False. It gets what is missing, and an empty
        text at the end.

        Raises:
            WorkError: `sync.failed` after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        while missing := self.waiting_for:
            if time.monotonic() > deadline:
                raise WorkError("sync.failed", f"waited {limit_s:g} s for {missing}")
            if not note(missing):
                break
            await asyncio.sleep(LOOK_S)
        note("")
        return {one.name: one.policy for one in self._each if one.policy is not None}

    async def run(self, leave: asyncio.Event) -> None:
        """Follow the weights of all until `leave` is set. Raises what an engine or a handshake raises."""
        # bounded: the life of the role
        await asyncio.gather(leave.wait(), *(one.run(leave) for one in self._each))

    async def close(self, *, grace_s: float) -> None:
        for one in self._each:
            if one.policy is not None:
                await one.policy.engine.close(grace_s=grace_s)


class _Follower:
    """One other policy. `folder`: of its run, `member`: this producer's name there."""

    def __init__(self, name: str, folder: Path, member: str) -> None:
        self.name = name
        self.policy: OtherPolicy | None = None
        self._run = RunDir(folder)
        self._member = member
        self._receiver: Receiver | None = None
        self.ready = False

    @property
    def waiting_for(self) -> str:
        if self._receiver is None:
            return f"the run of policy {self.name} ({self._run.root})"
        return f"the weights of policy {self.name}: {self._receiver.waiting_for}"

    async def run(self, leave: asyncio.Event) -> None:
        while not self._run.config.exists():  # bounded: by `wait_ready`, and by `leave`
            if leave.is_set():
                return
            await asyncio.sleep(LOOK_S)
        config = load(self._run.config)
        engine: Any = find("asyncrl.engines", config.producers.engine)(own_url(config, self._member))
        tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self.policy = OtherPolicy(self.name, config, engine=engine, tokenizer=tokenizer)
        await engine.start()
        keys = _read_keys(config)
        while not leave.is_set():  # bounded: the life of the role
            self._receiver = Receiver(
                endpoint(config, "weightsync"),
                engine=engine,
                name=self._member,
                keys=keys,
                config=config.weightsync,
                insecure=config.network.insecure_no_auth,
            )
            try:
                await self._follow(self._receiver, leave)
            except Unavailable as error:
                print(f"policy {self.name}: {error.message}; it plays on with the weights it has", flush=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(leave.wait(), AGAIN_S)

    async def _follow(self, receiver: Receiver, leave: asyncio.Event) -> None:
        """Follow the service until it ends or `leave` is set; `ready` from the first version on."""
        following = asyncio.create_task(receiver.run(leave))
        try:
            while not self.ready and not following.done():
                self.ready = await receiver.wait_newer(-1, LOOK_S)
            await following  # bounded: the life of the role
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # bounded: it was cancelled


def _read_keys(config: Config) -> Keys | None:
    """The producers' key of another policy's run; None without keys."""
    path = config.network.key_file
    return read_keys(worker_file(Path(path), "producer")) if path else None
