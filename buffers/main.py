"""The buffer's process: `python -m buffers.main --config RESOLVED.toml`.

Started by the front door. Guarantees:
1. one service per run folder (a lock) and per store (an epoch); with `network.standby` a lease in Redis replaces the
   lock, and with `--standby` the process waits for it;
2. a kill at any moment loses nothing that was answered; the next start continues from the store and the segments;
3. SIGTERM or a `Stop` message ends it after every poll is answered and everything is written.
Any failure that is not a peer's ends the process: state in memory that the store does not have must not be served.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from asyncrl.allocator import keep_memory
from asyncrl.config import BufferConfig, Config
from asyncrl.evaluation.ids import is_evaluation
from asyncrl.net.keys import Keys
from asyncrl.net.responder import Responder
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.history_chain import signing_key
from asyncrl.runtime.liveness import Sign
from asyncrl.runtime.role import RoleArgs, Stop, key_file, run, run_key
from asyncrl.runtime.run_dir import RunDir, endpoint, run_id, run_keys, write_atomic
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.failure_budget import load_filters
from buffers.groups.group_table import ledger_counts
from buffers.groups.machine import GroupMachine
from buffers.groups.records import State, settings_of
from buffers.payloads.segments import Segments
from buffers.service.event_log import KEY, History
from buffers.service.service import BufferService
from buffers.stores.base import Store

if TYPE_CHECKING:
    from buffers.stores.lease import Lease

TICK_S = 0.2


def store_kind(buffer: BufferConfig) -> tuple[str, str]:
    """Which store, and why: the setting; auto = redis where a URL or a server on the PATH is found, else sqlite."""
    if buffer.store != "auto":
        return buffer.store, "as set"
    if buffer.redis_url:
        return "redis", "buffer.redis_url is set"
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    return ("redis", f"{found} found") if found else ("sqlite", "no redis-server or valkey-server on the PATH")


def open_store(config: Config, stop: Callable[[], bool]) -> Store:
    """The store of the configuration."""
    kind, why = store_kind(config.buffer)
    print(f"buffer: store {kind} ({why})", flush=True)
    folder = RunDir(config.run_dir).store
    if kind == "sqlite":
        from buffers.stores.sqlite import SqliteStore

        return SqliteStore(folder / "index.sqlite", fsync=config.buffer.fsync)
    from buffers.stores.redis import open_redis

    return open_redis(config.buffer, run_id=run_id(config), folder=folder, stop=stop)


def process_gone(pid: int, host: str) -> bool:
    """Whether a process of this host has certainly ended (a zombie has)."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[:1] == ["Z"]
    except ProcessLookupError:
        return True
    except OSError:
        return False


def _last_epoch(run_dir: RunDir) -> int:
    """The epoch of the service before this one, by the run folder: an emptied store may be opened twice in a second."""
    try:
        return int(run_dir.service.read_bytes())
    except (OSError, ValueError):
        return 0


def open_service(
    config: Config, store: Store, keys: Keys | None = None, *, confirm: Callable[[], None] = lambda: None
) -> BufferService:
    """Read the state back and bring payloads, index and history to agreement. `keys` sign the history if it is set;
    `confirm` raises if another service has taken over meanwhile.
    """
    now = time.monotonic()
    opened = store.open(floor=max(int(time.time()), _last_epoch(RunDir(config.run_dir)) + 1))
    write_atomic(RunDir(config.run_dir).service, b"%d" % opened.epoch)
    failpoint("buffer.at_open")
    machine = GroupMachine(
        settings_of(config),
        epoch=opened.epoch,
        wall_offset=time.time() - now,
        filters=load_filters(config.buffer.filters),
    )
    machine.load(opened.rows)
    evaluations = Evaluations(config, machine)
    evaluations.load(opened.rows)
    groups = machine.table.groups
    records = {record: group.id for group in groups.values() for record in group.records}
    records |= evaluations.table.records()
    pieces = {record for group in groups.values() for found in group.partial.values() for record in found.pieces}
    buffer = config.buffer
    run_dir = RunDir(config.run_dir)
    confirm()
    segments = Segments(
        run_dir.segments,
        segment_bytes=buffer.segment_bytes,
        cache_bytes=buffer.cache_bytes,
        fsync=buffer.fsync,
        live=[*records, *pieces],
        apart=bool(config.network.standby),
    )
    history = History(
        run_dir.history,
        last=dict(opened.rows).get(KEY, b""),
        fsync=buffer.fsync,
        key=signing_key(keys) if config.log.sign else b"",
    )
    for line in segments.report:
        print(f"buffer: {line}", flush=True)
    machine.note_start(now)
    evaluations.scoring.settle_judges()
    if history.went_back or (history.found and not opened.rows):
        what = "was restored to an earlier state" if opened.rows else "was emptied"
        print(f"buffer: the {store.kind} store {what}; no prompt is issued before a learner registers", flush=True)
        machine.recovery.note_state_lost()
    if segments.damaged:
        machine.partial.discard_damaged(pieces.intersection(segments.damaged))
        _lose_payloads(machine, evaluations, {records[record] for record in segments.damaged if record in records})
    machine.check()
    evaluations.table.check()
    service = BufferService(
        config,
        machine=machine,
        store=store,
        segments=segments,
        history=history,
        process_gone=process_gone,
        confirm=confirm,
        evaluations=evaluations,
    )
    service.flush()
    failpoint("buffer.after_open")
    return service


def _lose_payloads(machine: GroupMachine, evaluations: Evaluations, damaged: set[int]) -> None:
    """Have the damaged groups and prompts generated again."""
    held_out = sorted(number for number in damaged if is_evaluation(number))
    groups = machine.table.groups
    # A learner may hold a recorded batch in its memory: its next claim shows whether the bytes are missed.
    lost = sorted(number for number in damaged.difference(held_out) if groups[number].state < State.CLAIMED)
    count = len(damaged) - len(held_out)
    print(f"buffer: payloads of {count} groups are damaged, {len(lost)} are generated again", flush=True)
    machine.batches.lose_payloads(lost)
    evaluations.lose_payloads(held_out)


async def serve(
    config: Config,
    service: BufferService,
    responder: Responder,
    stop: Stop,
    failed: list[BaseException],
) -> None:
    """Tick until the stop; the answering happens in callbacks."""
    loop = asyncio.get_running_loop()
    syncing: asyncio.Future[Any] | None = None
    second = time.monotonic()
    sign = Sign(RunDir(config.run_dir).alive, role="buffer", name="buffer")
    while not (stop.is_set() or service.stop_reason or failed):
        await asyncio.sleep(TICK_S)
        service.context.bad_frames = responder.counters["bad_frames"]
        sign.beat(every_s=config.log.heartbeat_s)
        service.tick()
        if time.monotonic() - second >= 1.0:
            second = time.monotonic()
            service.write_metrics()
            service.tidy()
            if syncing is not None and syncing.done():
                syncing.result()
            if syncing is None or syncing.done():
                syncing = loop.run_in_executor(None, _sync, service)
    if syncing is not None:
        await syncing  # bounded: an fsync; the launcher's grace ends a disk that hangs
    sign.close()


def _sync(service: BufferService) -> None:
    service.segments.sync()
    service.store.sync()
    service.history.sync()


async def main_loop(args: RoleArgs, config: Config, stop: Stop, lease: Lease | None) -> None:
    keys = run_keys(config, make=True) if config.network.key_file else run_key(args, config)
    failed: list[BaseException] = []

    def on_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failed.append(context.get("exception") or RuntimeError(str(context.get("message"))))

    asyncio.get_running_loop().set_exception_handler(on_failure)
    store = open_store(config, stop.is_set)
    service = open_service(config, store, keys, confirm=lease.confirm if lease else lambda: None)
    if lease is not None:
        lease.announce(epoch=service.machine.service_epoch, nonce=service.segments.location()[1])
    network = config.network
    responder = Responder(
        lease.me.address if lease else endpoint(config, "buffer"),
        lambda calls: None if failed else service.handle(calls),
        keys=keys,
        max_bytes=network.max_message_bytes,
        insecure=network.insecure_no_auth,
        key_file=key_file(args, config),
    )
    counts = ledger_counts(service.machine.table)
    print(
        f"buffer: ready at {responder.address}, service epoch {service.machine.service_epoch}, "
        f"{counts['issued']} prompts issued, version {service.machine.table.meta.version}",
        flush=True,
    )
    try:
        await serve(config, service, responder, stop, failed)
        if failed:
            raise failed[0]
        ended = service.stop_reason or ("the run is complete" if service.machine.table.meta.done else "")
        service.close(stop.reason or "stop", hands_over=lease is not None and not ended)
        if lease is not None:
            lease.leave(ended=ended)
    finally:
        responder.close()
        if failed:
            store.close()


def _win_lease(args: RoleArgs, config: Config, stop: Stop) -> Lease | None:
    """The lease of the run, renewed from now on; None if this process has nothing to do."""
    from buffers.service.takeover import StandBy, open_lease, take_lease

    lease = open_lease(config, stop, standby=args.standby)
    won = StandBy(config, lease).wait(stop) if args.standby else take_lease(lease, stop, process_gone=process_gone)
    if won:
        lease.keep()
    return lease if won else None


def body(args: RoleArgs, config: Config, stop: Stop) -> None:
    """The role: hold the run's lock, or its lease, and serve."""
    if config.network.standby:
        if (lease := _win_lease(args, config, stop)) is not None:
            try:
                _serve_run(args, config, stop, lease)
            finally:
                lease.leave()
        return
    lock = RunDir(config.run_dir).lock("buffer")
    try:
        _serve_run(args, config, stop, None)
    finally:
        lock.close()


def _serve_run(args: RoleArgs, config: Config, stop: Stop, lease: Lease | None) -> None:
    # The state is a large tree without cycles: walking it for garbage took 7 % of the service's time.
    keep_memory()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    uvloop.run(main_loop(args, config, stop, lease))


def main() -> None:
    sys.exit(run("buffer", body))


if __name__ == "__main__":
    main()
