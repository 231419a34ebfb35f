"""A learner process without a model: the product's own services, account and publisher around weights that are a hash.

Run by `plant` as `python mini_learner.py --config RUN --name learner --connect URL [--takeover]`. The weights of step s
are a hash of those of step s - 1 and of every token of the batch, in its order. Its durable checkpoint is one file:
step, weights, the buffer's ledger, digests, and the groups of every step that these weights hold; so a test can say
what was trained without asking the buffer.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.errors import StateLost, Unavailable
from asyncrl.runtime import role
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.runtime.run_dir import RunDir, buffer_address, endpoint, write_atomic
from asyncrl.wire.batch_arrays import ClaimedBatch
from buffers.client.learner import LearnerClient
from learners.heartbeat import Heart
from learners.rank_zero import Services
from producers.engines.model_files import read_facts
from weightsync.plan.buckets import Plan, TensorSpec, plan_buckets
from weightsync.publisher.publisher import Publisher

KEPT = 3  # states for the audit
TENSORS = ("first", "second", "third")


class Mini(msgspec.Struct):
    """The checkpoint."""

    step: int = 0
    weights: str = ""
    ledger: str = ""
    digests: dict[int, str] = {}
    trained: dict[int, list[int]] = {}


def place_of(config: Config) -> Path:
    return RunDir(config.run_dir).checkpoints / "mini.json"


def load(config: Config) -> Mini:
    path = place_of(config)
    return msgspec.json.decode(path.read_bytes(), type=Mini) if path.exists() else Mini()


def tensors_of(weights: str) -> Any:
    for name in TENSORS:
        data = hashlib.blake2b(f"{name} {weights}".encode(), digest_size=64).digest()
        yield name, np.frombuffer(data, np.uint8)


def parts_of(config: Config, weights: str) -> Any:
    """What is published: bytes of the hash, or where the model folder has tensors, values drawn from it."""
    shapes = read_facts(config.model.path).shapes
    if not shapes:
        yield from tensors_of(weights)
    for name, shape in shapes.items():
        seed = int.from_bytes(hashlib.blake2b(f"{name} {weights}".encode(), digest_size=8).digest(), "little")
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        yield name, values.reshape(-1).view(np.uint8)


def plan_of(config: Config) -> Plan:
    """Its layout."""
    shapes = read_facts(config.model.path).shapes
    specs = [TensorSpec(name, "F32", shape) for name, shape in shapes.items()]
    return plan_buckets(
        specs or [TensorSpec(name, "U8", (64,)) for name in TENSORS], bucket_bytes=8192 if shapes else 64
    )


def trained_on(weights: str, batch: ClaimedBatch) -> str:
    digest = hashlib.blake2b(weights.encode(), digest_size=16)
    for group in batch.groups:
        digest.update(f"{group.group} {group.bound}".encode())
        for sample in group.samples:
            digest.update(sample.response.tobytes() + repr(sample.reward).encode())
    return digest.hexdigest()


class MiniLearner:
    """The loop of `learners.loop` in small."""

    def __init__(self, config: Config, services: Services) -> None:
        self.config = config
        self.services = services
        self.state = load(config)
        self.saved = self.state.step
        self.pause_s = float(os.environ.get("MINI_STEP_S", "0"))

    def run(self) -> str:
        state, services, steps = self.state, self.services, self.config.learner.steps
        if services.register(step=state.step, ledger=state.ledger, digests=state.digests):
            services.publish(state.step, parts_of(self.config, state.weights))
        while True:
            try:
                services.raise_trouble()
                if state.step >= steps:
                    break
                batch = services.claim(state.step + 1)
            except StateLost as error:
                print(f"mini: {error.message}; registering again", flush=True)
                services.trouble = error
                self.save()
                if services.register_again(state.step):
                    services.publish(state.step, parts_of(self.config, state.weights))
                continue
            except Unavailable:
                self.save()
                raise
            if batch is None:
                break
            self.train(batch)
        self.save()
        reason = "" if state.step >= steps else "asked to stop"
        services.end(state.step, done=not reason, reason=reason or "all steps are done")
        return reason

    def train(self, batch: ClaimedBatch) -> None:
        state, services = self.state, self.services
        time.sleep(self.pause_s)
        state.weights = trained_on(state.weights, batch)
        state.trained[batch.step] = [group.group for group in batch.groups]
        services.note_trained(batch)
        state.step = batch.step
        if services.wants_publish(batch):
            services.publish(state.step, parts_of(self.config, state.weights))
        services.commit(state.step)
        if state.step % self.config.learner.checkpoint_every == 0:
            self.save()

    def save(self) -> None:
        """As `learners.loop`: the ledger, a durable file, and only then the buffer's leave to forget."""
        state = self.state
        if state.step == self.saved:
            return
        state.ledger, state.digests = self.services.ledger(state.step), dict(self.services.digests)
        self.services.mark.check()
        write_atomic(place_of(self.config), msgspec.json.encode(state))
        self.keep_state(msgspec.json.encode(state))
        self.saved = state.step
        self.services.checkpointed(state.step, state.ledger)

    def keep_state(self, data: bytes) -> None:
        """As the checkpoints of `learners.checkpoints` do, for the audit: in a folder per step, the newest few."""
        root = RunDir(self.config.run_dir).checkpoints
        folder = root / f"step_{self.state.step:06d}"
        folder.mkdir(exist_ok=True)
        write_atomic(folder / "state.json", data)
        for old in sorted(root.glob("step_*"))[:-KEPT]:
            shutil.rmtree(old)


def body(args: role.RoleArgs, config: Config, stop: role.Stop) -> None:
    limit_s = config.network.request_timeout_s
    fingerprint = model_fingerprint(config.model.path, dtype=config.model.dtype)
    address = buffer_address(config, args.connect)
    buffer = LearnerClient(address, name=args.name, timeout_s=limit_s)
    pulse = LearnerClient(address, name=args.name, timeout_s=4.0)
    buffer.hello(fingerprint)
    publisher = Publisher(
        endpoint(config, "weightsync"),
        keys=None,
        config=config.weightsync,
        name=args.name,
        fingerprint=fingerprint,
        scratch=RunDir(config.run_dir).root / "weights",
    )
    leaving = threading.Event()
    services = Services(
        config,
        buffer=buffer,
        publisher=publisher,
        stop=stop,
        takeover=args.takeover,
        fingerprint=fingerprint,
        plan=plan_of(config),
        heart=Heart(pulse.heartbeat, every_s=config.log.heartbeat_s, close=pulse.close, ended=leaving),
        vocabulary=13,
    )
    try:
        MiniLearner(config, services).run()
    finally:
        leaving.set()
        services.close()


if __name__ == "__main__":
    sys.exit(role.run("learner", body))
