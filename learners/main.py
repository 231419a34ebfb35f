"""The learner process: `python -m learners.main --config run/config.toml`, once per rank under torchrun. Without
torchrun it runs as a gang of one.

Guarantees:
1. only rank 0 connects to services; the other ranks talk to their gang;
2. SIGTERM ends the run after the current step, with a checkpoint and exit code 0. If the buffer does not answer, the
   checkpoint holds the learner's own account and the exit code is 69 after a few seconds;
3. a learner that was replaced by another one exits with code 75 (`fenced`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.capabilities import refuse_cuts
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.liveness import Sign, Ticker
from asyncrl.runtime.role import RoleArgs, Stop, run, run_key
from asyncrl.runtime.run_dir import RunDir

HEARTBEAT_TIMEOUT_S = 4.0
MAPPED_BYTES = 1 << 20  # a large model's tensors of this size go back to the system when they are freed


def body(args: RoleArgs, config: Config, stop: Stop) -> None:
    """Report signs of life from the end of the heavy imports on, and train."""
    import torch

    from asyncrl.allocator import keep_memory, keep_tensors
    from asyncrl.preflight.threads import is_large

    rank = int(os.environ.get("RANK", "0"))
    name = f"{args.name}-rank{rank}" if rank else args.name
    sign = Sign(RunDir(config.run_dir).alive, role="learner", name=name)
    torch.set_num_threads(config.learner.torch_threads)
    if is_large(config.model.path):
        # On a CPU activations would leave holes in the heap: measured, a quarter more memory at the peak.
        keep_memory(mapped_bytes=MAPPED_BYTES)
    else:
        keep_tensors()
    with Ticker(sign, every_s=config.log.heartbeat_s, waits=lambda: "its model to load") as ticker:
        _train(args, config, stop, ticker)


def _train(args: RoleArgs, config: Config, stop: Stop, ticker: Ticker) -> None:
    """Join the gang, build the backend, connect (rank 0), train."""
    from asyncrl.plugins import find
    from learners.device_turns import DeviceTurns
    from learners.gang.gang import Gang, lost_peer
    from learners.gang.watchdog import Watchdog
    from learners.loop import Learner

    started = time.monotonic()
    _quiet()
    gang = Gang.join(config)
    gang.device.seed_all(config.run.seed + gang.topology.share)
    turns = DeviceTurns(config, gang)
    turns.begin()
    backend = find("asyncrl.backends", config.learner.backend)(config, gang)
    refuse_cuts(config, able=getattr(backend, "supports", False), key="learner.backend")
    backend.self_check()
    if gang.lead:
        print(f"learner: {gang.size} x {gang.device}, ready after {time.monotonic() - started:.1f} s", flush=True)
    services = _connect(args, config, stop, backend) if gang.lead else None

    def diagnosis() -> str:
        waits = turns.waiting_for or (services.waits_for() if services is not None else "")
        return f"rank {gang.rank} of {gang.size} waits for {waits or 'an order or a collective of the other ranks'}"

    ticker.waits = lambda: turns.waiting_for or (services.waits_for() if services is not None else "")
    watchdog = Watchdog(config.run.hang_timeout_s, first_s=config.run.start_timeout_s, diagnosis=diagnosis)
    lost = False
    try:
        learner = Learner(
            config, gang=gang, backend=backend, services=services, turns=turns, progress=watchdog.progress
        )
        reason = learner.run()
    except RuntimeError as error:
        if lost_peer(error):
            lost = True
            what = f"rank {gang.rank} of {gang.size} lost another rank: {str(error).splitlines()[0]}"
            print(f"learner: {what}", flush=True)  # at once: torchrun kills slow processes
            raise AsyncRLError("role.failed", what) from error
        raise
    finally:
        watchdog.stop()
        if services is not None:
            services.close(hurry=lost)
    if gang.lead and reason:
        print(f"learner: ended early: {reason}", flush=True)
    gang.leave()


def _connect(args: RoleArgs, config: Config, stop: Stop, backend: Any) -> Any:
    """Connect to the buffer and weight sync, and start the heartbeat thread."""
    from asyncrl.config.mode import streams
    from asyncrl.runtime.model_folder import model_fingerprint
    from asyncrl.runtime.run_dir import buffer_address, endpoint, sibling_address
    from buffers.client.learner import LearnerClient
    from learners.heartbeat import Heart, Patience
    from learners.rank_zero import Services
    from weightsync.publisher.publisher import Publisher

    keys = run_key(args, config)
    fingerprint = model_fingerprint(config.model.path, dtype=config.model.dtype)
    network = config.network
    reached_at = buffer_address(config, args.connect)

    class WatchedClient(LearnerClient):
        """A client that warns if the buffer is silent, and gives up once this process should end."""

        def __init__(self, timeout_s: float, on_silence: Any) -> None:
            super().__init__(
                reached_at, name=args.name, keys=keys, max_bytes=network.max_message_bytes, timeout_s=timeout_s
            )
            self._requester.on_silence = self._beats.on_silence = on_silence

    silence = Patience(f"buffer {reached_at}", limit_s=network.request_timeout_s, stop=stop)
    buffer: Any = WatchedClient(network.request_timeout_s, silence)
    leaving = threading.Event()
    pulse = WatchedClient(HEARTBEAT_TIMEOUT_S, lambda _: stop.is_set() or leaving.is_set())
    welcome = buffer.hello(fingerprint)
    address = sibling_address(welcome.endpoints.get("weightsync", ""), args.connect) if args.connect else ""
    publisher: Any = NoGenerators()
    if not streams(config):
        publisher = Publisher(
            address or endpoint(config, "weightsync"),
            keys=keys,
            config=config.weightsync,
            name=args.name,
            fingerprint=fingerprint,
            scratch=RunDir(config.run_dir).root / "weights",
            run_dir=RunDir(config.run_dir).root,
            insecure=network.insecure_no_auth,
        )
    plan, adapter = publish_plans(backend, bucket_bytes=config.weightsync.bucket_bytes)
    return Services(
        config,
        buffer=buffer,
        publisher=publisher,
        stop=stop,
        takeover=args.takeover,
        fingerprint=fingerprint,
        plan=plan,
        adapter=adapter,
        heart=Heart(pulse.heartbeat, every_s=config.log.heartbeat_s, close=pulse.close, ended=leaving),
        decode=_decoder(config),
        vocabulary=_vocabulary(config),
    )


def publish_plans(backend: Any, *, bucket_bytes: int) -> tuple[Any, Any]:
    """Return the layout of full weights, and of adapters (None if the backend has none)."""
    from learners.rank_zero import AdapterPlan
    from weightsync.encoding.adapter import config_text, plan_adapter
    from weightsync.plan.buckets import TensorSpec, plan_buckets

    whole = plan_buckets([TensorSpec(*spec) for spec in backend.weight_specs()], bucket_bytes=bucket_bytes)
    if (adapters := backend.adapters) is None:
        return whole, None
    specs, settings = [TensorSpec(*spec) for spec in adapters.specs()], adapters.settings
    return whole, AdapterPlan(plan_adapter(specs, settings, bucket_bytes=bucket_bytes), config_text(settings))


class NoGenerators:
    """Replaces the publisher in modes without generators."""

    def __init__(self) -> None:
        self.stats: dict[str, float] = {}
        self.stage_wanted = -1

    def start(self, *, epoch: int) -> None: ...

    def committed_version(self) -> int:
        return -1

    def close(self, *, hurry: bool = False) -> None: ...


def _vocabulary(config: Config) -> int:
    """Return the number of token ids of the model; 0 if config.json does not say."""
    try:
        found = json.loads((Path(config.model.path) / "config.json").read_text())
        return int(found.get("vocab_size") or found.get("text_config", {}).get("vocab_size") or 0)
    except (OSError, ValueError, TypeError):
        return 0


def _decoder(config: Config) -> Any:
    """Return a function from token ids to text; None if the model folder has no tokenizer."""
    from asyncrl.runtime.model_folder import load_tokenizer

    try:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError, ConfigError) as error:
        print(f"learner: warning: samples are kept as token ids: {error}", flush=True)
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _quiet() -> None:
    """Disable progress bars, which would fill the log file."""
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    quiet.set_verbosity_error()


def main(argv: list[str] | None = None) -> int:
    return run("learner", body, argv)


if __name__ == "__main__":
    sys.exit(main())
