"""Many schedules, on several processes, and what they found: `python tests/simulator/sim_run.py --schedules 20000`.

A schedule that breaks a promise is printed with its seed and the end of
its trace; `--seed N` runs that one again, with its whole trace.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from sim_check import Violation
from sim_faults import ambushes_of, plan_of
from sim_world import World


def schedule(seed: int, *, keep_trace: bool = False) -> World:
    """The world of a seed with its plan, not run yet."""
    world = World(seed, keep_trace=keep_trace)
    world.calm_from = world.rng.randint(80, 160)
    world.plan = plan_of(world, faults=world.rng.randint(4, 8), messages=world.calm_from)
    world.ambushes = ambushes_of(world, world.rng.randint(0, 2))
    return world


def _work(job: tuple[int, int]) -> tuple[int, Counter[str], list[tuple[int, str]], Counter[str]]:
    first, count = job
    hits: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    seen: Counter[str] = Counter()
    gc.disable()  # a world is a tangle of cycles that is dropped as a whole: looked at now and then
    for seed in range(first, first + count):
        if seed % 25 == 0:
            gc.collect()
        world = schedule(seed)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # what the service says of its store
                world.run()
        except Violation as violation:
            failures.append((seed, str(violation)))
        except Exception as error:
            failures.append((seed, f"error: {type(error).__name__}: {error}"))
        hits.update(world.hits)
        seen["messages"] += world.net.messages
        seen["events"] += world.events
        seen["virtual_s"] += int(world.clock.now - 1000)
        seen["groups"] += sum(len(step.groups) for step in world.finished or ())
    return count, hits, failures, seen


#: What is counted beside the faults: the answers that they led to.
NOT_FAULTS = frozenset({"registered_again", "fenced_learner", "service_fenced", "publish_refused", "sent_after_all"})


def campaign(*, first: int, schedules: int, processes: int, part: int = 250) -> dict[str, Any]:
    """Run them all; figures and failures."""
    started = time.monotonic()
    jobs = [(at, min(part, first + schedules - at)) for at in range(first, first + schedules, part)]
    hits: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    done = 0
    # Not fork: what this process has (threads, sockets of other tests) hangs a child that collects it.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for count, found, failed, looked in pool.imap_unordered(_work, jobs):
            done += count
            hits.update(found)
            seen.update(looked)
            failures += failed
    took = time.monotonic() - started
    faults = sum(number for kind, number in hits.items() if kind not in NOT_FAULTS)
    return {
        "schedules": done,
        "faults": faults,
        "hits": hits,
        "seen": seen,
        "failures": sorted(failures),
        "took_s": took,
    }


def told(result: dict[str, Any]) -> str:
    """The figures as lines."""
    kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(result["hits"].items(), key=lambda kv: -kv[1]))
    by_check = Counter(text.split(":")[0] for _, text in result["failures"])
    lines = [
        f"schedules {result['schedules']}, faults {result['faults']} "
        f"({result['faults'] / max(1, result['schedules']):.1f} each), {result['schedules'] / result['took_s']:.0f} "
        f"schedules/s, {result['took_s']:.1f} s, {dict(result['seen'])}",
        f"faults by kind: {kinds}",
        f"lost {by_check['lost']}, doubled {by_check['doubled']}, bound {by_check['bound']}, "
        f"failed in all {len(result['failures'])} {dict(by_check)}",
    ]
    return "\n".join([*lines, *(f"seed {seed}: {text}" for seed, text in result["failures"][:20])])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="this one alone, with its trace")
    args = parser.parse_args()
    if args.seed:
        world = schedule(args.seed, keep_trace=True)
        try:
            world.run()
        except Exception as error:
            print("\n".join(world.trace or []), f"\n{type(error).__name__}: {error}")
            if not isinstance(error, Violation):
                raise
            return 1
        print("\n".join(world.trace or []), f"\n{world.digest()} {dict(world.hits)}")
        return 0
    result = campaign(first=args.first, schedules=args.schedules, processes=args.processes)
    print(told(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
