"""The producer process: connects, makes engine, receiver and worker, runs them, and ends them in order.

Run as `python -m producers.main --config RESOLVED.toml --name NAME [--connect URL --key FILE]`. Guarantee: SIGTERM
gives the leases back (`stopping`) and ends with 0, within two seconds if the buffer does not answer; so does a finished
run. A broken engine ends with 70, an absent buffer with 69: the supervisor starts a new process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

from asyncrl.allocator import keep_tensors
from asyncrl.config import Config
from asyncrl.config.capabilities import NO_CHOICES, NO_SECOND, refuse, refuse_cuts
from asyncrl.config.mode import demonstrates, streams
from asyncrl.device_turn import DeviceTurn
from asyncrl.engine import EngineCapabilities
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.plugins import find
from asyncrl.process_plan.interpreters import own_url
from asyncrl.runtime import role
from asyncrl.runtime import run_dir as rundir
from asyncrl.runtime.liveness import Sign
from asyncrl.runtime.model_folder import model_json
from buffers.client.producer import ProducerClient
from producers.data.evaluation_prompts import HeldOutPrompts
from producers.engines.turns import TurnTaking
from producers.other_policies import OtherPolicies
from producers.support.retry import Patience
from producers.worker import GIVE_BACK_S, Producer
from weightsync.receiver.receiver import Receiver


async def wait_for_stop(stop: role.Stop, producer: Producer) -> None:
    """Wait for SIGTERM and let `run` end; return if it does not."""
    while not stop.is_set():
        await asyncio.sleep(0.1)
    producer.leaving = True
    await asyncio.sleep(GIVE_BACK_S)


def make_parts(
    config: Config,
    args: role.RoleArgs,
    *,
    client: ProducerClient,
    engine: Any,
    patience: Patience,
    held_out: HeldOutPrompts,
    sync: str,
    keys: Any,
    evaluates: bool = False,
) -> tuple[Producer, Any]:
    """The worker and the receiver, by the mode: dataset rows need no weights."""
    if streams(config):
        from producers.dataset_worker import DatasetProducer
        from producers.engines.dataset import NoWeights

        nothing = NoWeights()
        return DatasetProducer(config, client=client, engine=engine, receiver=nothing, patience=patience), nothing
    receiver = Receiver(
        sync or rundir.endpoint(config, "weightsync"),
        engine=engine,
        name=client.name,
        keys=keys,
        config=config.weightsync,
        insecure=config.network.insecure_no_auth,
    )
    worker = Producer
    if demonstrates(config):
        from producers.self_play import SelfPlayProducer

        worker = SelfPlayProducer
    producer = worker(config, client=client, engine=engine, receiver=receiver, patience=patience, held_out=held_out)
    producer.evaluates = evaluates
    return producer, receiver


async def run_worker(producer: Producer, others: OtherPolicies, limit_s: float) -> None:
    """Work, once the other policies have weights."""

    def note(missing: str) -> bool:
        producer.waiting_for = missing
        return not producer.leaving

    producer.environments.meet(await others.wait_ready(limit_s, note))
    if not producer.leaving:
        await producer.run()


def refuse_unable(config: Config, able: EngineCapabilities) -> None:
    """Raise `config.conflict` if an engine of any package cannot do what is asked for: record the experts of a token,
    or keep second weights for evaluations.
    """
    asked = [
        ("learner.router_replay", config.learner.router_replay and not able.experts, NO_CHOICES),
        ("evaluation.lane", config.evaluation.second_weights and not able.second_weights, NO_SECOND),
    ]
    for key, refused, (why, remedy) in asked:
        if refused:
            what = f"{key}: producers.engine = {config.producers.engine!r} {why}"
            raise ConfigError("config.conflict", what, where=key, remedy=remedy)


def make_engine(config: Config, name: str) -> Any:
    """The engine of this producer, which takes turns with the learner on a device that both use."""
    engine: Any = find("asyncrl.engines", config.producers.engine)(own_url(config, name))
    if config.cluster.devices != "turns":
        return engine
    turn = DeviceTurn(rundir.RunDir(config.run_dir).root, together=True, limit_s=config.run.hang_timeout_s)
    return TurnTaking(engine, turn)


async def produce(args: role.RoleArgs, config: Config, stop: role.Stop, *, evaluates: bool = False) -> None:
    """Connect, load, work, and end in order. `evaluates`: only held-out prompts."""
    kind = "evaluator" if evaluates else "producer"
    refuse(config, model_json(config.model.path), role="producer")
    keys = role.worker_key(args, config, "producer")
    address, limit_s = rundir.buffer_address(config, args.connect), config.network.request_timeout_s
    patience = Patience(f"buffer {address}", limit_s=limit_s, stop=stop)
    client = ProducerClient(
        address, name=args.name, keys=keys, max_bytes=config.network.max_message_bytes, timeout_s=limit_s
    )
    client.may_rename = role.MAY_RENAME in os.environ
    engine = make_engine(config, args.name)
    held_out = HeldOutPrompts(config)
    others = OtherPolicies(config, name=args.name)
    leave = asyncio.Event()
    reason = "stopping"
    producer: Producer | None = None
    tasks: list[asyncio.Task[None]] = []
    try:
        welcome = await patience.ask(lambda: client.hello(engine.fingerprint(), evaluation_rows=held_out.rows))
        sync = rundir.sibling_address(welcome.endpoints.get("weightsync", ""), args.connect) if args.connect else ""
        parts: dict[str, Any] = {"client": client, "engine": engine, "patience": patience, "held_out": held_out}
        producer, receiver = make_parts(config, args, sync=sync, keys=keys, evaluates=evaluates, **parts)
        await engine.start()
        if kind == "producer":  # nothing is trained on what an evaluator samples
            refuse_cuts(config, able=engine.capabilities().supports, key="producers.engine")
        refuse_unable(config, engine.capabilities())
        print(f"{kind} {args.name}: pid {os.getpid()} on {socket.gethostname()}, engine ready", flush=True)
        tasks = [
            asyncio.create_task(work)
            for work in (
                run_worker(producer, others, config.run.hang_timeout_s),
                receiver.run(leave),
                others.run(leave),
                producer.heartbeats(),
                wait_for_stop(stop, producer),
                producer.signs(Sign(rundir.RunDir(config.run_dir).alive, role=kind, name=args.name)),
            )
        ]
        # bounded: the life of the role; each of its parts has its own deadlines
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    except AsyncRLError as error:
        reason = error.code
        if not patience.gave_up:
            raise
        print(f"left without a word: {error.message}; its leases expire", flush=True)
    finally:
        leave.set()  # ends the receivers
        for task in tasks[:1] + tasks[3:]:
            task.cancel()
        if producer is not None:
            await producer.give_back(reason)
            await producer.environments.close()
        if tasks:
            await asyncio.wait(tasks, timeout=GIVE_BACK_S)
        await engine.close(grace_s=GIVE_BACK_S)
        await others.close(grace_s=GIVE_BACK_S)
        client.close()


def body(args: role.RoleArgs, config: Config, stop: role.Stop, *, evaluates: bool = False) -> None:
    keep_tensors()
    asyncio.run(produce(args, config, stop, evaluates=evaluates))


def main() -> int:
    return role.run("producer", body)


if __name__ == "__main__":
    sys.exit(main())
