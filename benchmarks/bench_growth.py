"""What grows with the prompts that were issued: the state machine and its SQLite store, half of all groups dropped. And
what grows with the producers: a lease request.

Run: `python benchmarks/bench_growth.py [--issued 10000 100000 1000000]` (the largest takes about ten minutes; a list
without numbers measures the producers alone). Each
size is a process of its own. It leases, finishes, claims and commits batches of 64 groups; a filter drops every second
group at random, and every 5 steps are a checkpoint. Up to the size it measures, as means over 32 points:
the check of each second (`check_table`; how many ids it looks at) and the ledger of a checkpoint, in CPU time, fastest
of five, and the ledger's bytes (an id of a later prompt has more digits). At the size: resident
memory, the rows of the store, and a restart (rows read and checked, the learner registered).
Producers return a group of one sample and ask for one, in turn: CPU time of the state machine per request.
Writes benchmarks/results/growth.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from buffers.groups.group_table import check_table, ledger_counts
from buffers.groups.machine import GroupMachine, finish_group
from buffers.groups.records import Ledger, Settings, State, ledger_of
from buffers.stores.sqlite import SqliteStore

BATCH, CHECKPOINT_STEPS = 64, 5
ROUNDS, REQUESTS_S = 8, 1000
POINTS, APART = 32, 256  # eight chunks of the archive in all, at every phase of chunks and checkpoints
SETTINGS = Settings(group_size=1, batch_groups=BATCH, max_staleness=4, depth=2, total_groups=1 << 40)


def drop_marked(*, rewards: list[float], **_: Any) -> str:
    return "marked" if rewards == [7.0] else ""


class Run:
    """A learner and a producer in turn, on the real machine and store."""

    def __init__(self, path: Path) -> None:
        self.store = SqliteStore(path, fsync="never")
        self.machine = GroupMachine(SETTINGS, epoch=self.store.open(floor=1).epoch, filters=(("half", drop_marked),))
        self.random = random.Random(0)
        self.step = self.requests = 0
        self.now = 0.0
        self.ledger = Ledger()
        self.epoch = register(self.machine, 0, Ledger(), self.now)

    def flush(self) -> None:
        self.store.apply(self.machine.take().rows)

    def train(self) -> None:
        """One step; a checkpoint after every fifth."""
        machine, table, version = self.machine, self.machine.table, self.step
        self.now += 0.1
        while table.indexes.counts[State.READY] < BATCH:
            self.requests += 1
            got = machine.lease("p", engine_version=version, max_groups=BATCH, request=self.requests, now=self.now)
            assert got, machine.lease_blocked(version)
            for lease in got:
                finish_group(machine, lease.group, now=self.now, reward=self.random.choice([0.5, 7.0]))
            self.flush()
        self.step += 1
        claimed = machine.claim(epoch=self.epoch, step=self.step, version=version, now=self.now)
        assert claimed is not None
        machine.commit(epoch=self.epoch, step=self.step, version=self.step, digest="", now=self.now)
        if self.step % CHECKPOINT_STEPS == 0:
            self.ledger = machine.batches.ledger(epoch=self.epoch, step=self.step)
            machine.batches.checkpointed(epoch=self.epoch, step=self.step)
        self.flush()

    def ledger_text(self) -> str:
        return self.machine.batches.ledger(epoch=self.epoch, step=self.step).to_json()

    def reach(self, issued: int) -> None:
        while self.machine.table.meta.cursor < issued:
            self.train()


def register(machine: GroupMachine, step: int, ledger: Ledger, now: float) -> int:
    return machine.register(name="l", pid=1, host="h", step=step, ledger=ledger, takeover=True, now=now)


def fastest_ms(call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return min(times) * 1e3


def resident_mb() -> float:
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def restart(path: Path, step: int, text: str) -> dict[str, Any]:
    """A new service on a copy of the store: read it, check it, register the learner."""
    started = time.perf_counter()
    store = SqliteStore(path, fsync="never")
    opened = store.open(floor=1)
    machine = GroupMachine(SETTINGS, epoch=opened.epoch)
    machine.load(opened.rows)
    machine.note_start(0.0)
    machine.check()
    register(machine, step, ledger_of(text), 1.0)
    store.apply(machine.take().rows)
    took = time.perf_counter() - started
    store.close()
    return {"restart_s": took, "rows": len(opened.rows), "store_mb": path.stat().st_size / 2**20}


def measure(issued: int, queue: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.db"
        run = Run(path)
        checks, ledgers, sizes, looked = [], [], [], []
        started = time.perf_counter()
        for point in range(POINTS):
            run.reach(issued - (POINTS - 1 - point) * APART)
            checks.append(fastest_ms(lambda: check_table(run.machine.table)))
            ask = run.ledger_text
            ledgers.append(fastest_ms(ask))
            sizes.append(len(ask()))
            table = run.machine.table
            looked.append(len(table.groups) + len(table.ended) + len(table.retired))
        took = time.perf_counter() - started
        found = {
            "issued": run.machine.table.meta.cursor,
            "dropped": ledger_counts(run.machine.table)["dropped"],
            "ids_checked": statistics.mean(looked),
            "check_ms": statistics.mean(checks),
            "ledger_ms": statistics.mean(ledgers),
            "ledger_bytes": round(statistics.mean(sizes)),
            "resident_mb": resident_mb(),
            "us_per_prompt": took / issued * 1e6,
        }
        run.store.close()
        copy = Path(folder) / "copy.db"
        shutil.copy(path, copy)
        saved = run.step // CHECKPOINT_STEPS * CHECKPOINT_STEPS
        queue.put(found | restart(copy, saved, run.ledger.to_json()))


def fleet(producers: int) -> dict[str, float]:
    """Microseconds of CPU time for a lease request, once every producer has asked."""
    machine = GroupMachine(msgspec.structs.replace(SETTINGS, batch_groups=4 * producers), epoch=1)
    epoch, now, step, took = register(machine, 0, Ledger(), 0.0), 0.0, 0, 0.0
    held: dict[int, list[int]] = {}
    for request in range(1, (1 + ROUNDS) * producers + 1):
        now += 1 / REQUESTS_S
        for group in held.get(request % producers, ()):
            finish_group(machine, group, now=now, reward=0.5)
        started = time.process_time()
        got = machine.lease(f"p{request % producers}", engine_version=step, max_groups=1, request=request, now=now)
        took += (time.process_time() - started) * (request > producers)
        held[request % producers] = [lease.group for lease in got]
        machine.take()
        while machine.claim(epoch=epoch, step=step + 1, version=step, now=now) is not None:
            step += 1
            machine.commit(epoch=epoch, step=step, version=step, digest="", now=now)
    return {"producers": producers, "lease_us": round(took / ROUNDS / producers * 1e6, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--issued", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/growth.json")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for issued in args.issued:
        queue = spawn.Queue()
        process = spawn.Process(target=measure, args=(issued, queue))
        process.start()
        rows.append({name: round(value, 3) for name, value in queue.get().items()})
        process.join()
        print(json.dumps(rows[-1]), flush=True)
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    found["machine"] = {"cpus": os.cpu_count(), "python": platform.python_version()}
    found |= {"sizes": rows} if rows else {}
    found["fleets"] = [fleet(producers) for producers in (10, 100, 400)]
    print(json.dumps(found["fleets"]))
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
