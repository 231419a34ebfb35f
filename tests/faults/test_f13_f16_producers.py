"""F13: a generator with old weights. F14: a slow learner. F15: a slow producer. F16: a producer that is cut off.

Whatever producers do, work is admitted by the version that their engine holds, and no more of it than the learner can
take in time.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from plant import Plant

from asyncrl.runtime.model_folder import model_fingerprint
from buffers.client.producer import ProducerClient

pytestmark = pytest.mark.timeout(300)


def test_f13_a_generator_with_old_weights_gets_no_work(tmp_path: Path) -> None:
    """A producer that comes back with version 0 while the run is far beyond: no work before it has synced."""
    with Plant(tmp_path, producers=1, extra=("learner.steps=1000000",)) as plant:
        plant.start()
        plant.wait("some steps", lambda: plant.committed() >= 10)

        async def ask_with_old_weights() -> list[str]:
            client = ProducerClient(f"tcp://127.0.0.1:{plant.port}", name="restarted", timeout_s=60)
            await client.hello(model_fingerprint(plant.config.model.path, dtype="float32"))
            reasons = []
            for version in (0, 0, -1, 1000):
                answer = await client.lease(engine_version=version, max_groups=8, wait_s=0.2)
                assert answer.leases == ()
                reasons.append(answer.reason)
            client.close()
            return reasons

        old, _, none, future = asyncio.run(ask_with_old_weights())
        assert "versions behind" in old and "no weights yet" in none and "newest published" in future
        # And the real one: killed, it comes back without weights, and leases nothing before it has current ones.
        plant.kill("producer-0")
        killed, version = time.time(), plant.committed()
        plant.wait("leases", lambda: [line for line in plant.history("lease") if line["t"] > killed])
        plant.finish()
        after = [line for line in plant.history("lease") if line["t"] > killed]
        assert all(line["w"] >= version - plant.config.buffer.max_staleness for line in after)
        plant.assert_accounted()


def test_f14_a_slow_learner_paces_the_producers(tmp_path: Path, figure: Any) -> None:
    """The learner stands still: what waits is bounded, memory is flat, and nothing was dropped at a mark."""
    extra = ("learner.steps=1000000", "sampling.max_new_tokens=12", "buffer.pipeline_depth=max")
    with Plant(tmp_path, extra=extra) as plant:
        plant.start()
        plant.wait("some steps", lambda: plant.committed() >= 5)
        bound = plant.config.buffer.max_in_flight_groups
        size = lambda: _rss(plant.roles["buffer"].pid)  # noqa: E731
        plant.wait("the buffer to be full", lambda: _stop_learner_and_fill(plant, bound - 8))
        time.sleep(1.0)
        first, seen, leases = size(), [], len(plant.history("lease"))
        for _ in range(5):
            time.sleep(0.4)
            seen.append(size())
            assert plant.status()["outstanding"] <= bound
        assert len(plant.history("lease")) == leases  # no work for nobody
        assert max(seen) <= 1.05 * first, (first, seen)
        plant.kill("learner", signal.SIGCONT)
        plant.finish()
        found = plant.assert_accounted()
        assert not found.dropped and not found.dead
        figure(f"learner stopped: outstanding at most {bound}, buffer {first >> 20} MiB -> {max(seen) >> 20} MiB")


def _stop_learner_and_fill(plant: Plant, groups: int) -> bool:
    """Stop the learner until this many groups are ready. False if it was stopped before it sent weights without which
    no producer may go on; it runs again then.
    """
    plant.kill("learner", signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while (status := plant.status())["ledger"]["ready"] < groups:
        behind = all("it must sync" in one["waiting_for"] for one in status["producers"])
        if behind or time.monotonic() > deadline:
            plant.kill("learner", signal.SIGCONT)
            time.sleep(0.5)
            return False
        time.sleep(0.1)
    return True


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.long
def test_f15_one_slow_producer_does_not_hold_up_the_others(tmp_path: Path, figure: Any) -> None:
    """One of three is fifty times slower: its groups leave in time or are waited for, the others overtake it."""
    with Plant(tmp_path, steps=20, producers=3, env={"TOY_TOKEN_S": "0.01"}, extra=("producers.slots=4",)) as plant:
        plant.roles["producer-0"].env = {"TOY_TOKEN_S": "0.3"}
        plant.start()
        plant.wait_done()
        found = plant.assert_accounted()
        assert not found.dropped and found.lag_max <= plant.config.buffer.max_staleness
        leases = {line["g"]: line for line in plant.history("lease")}
        claims = [line["t"] for line in plant.history("claim")]
        slow = [number for number, line in leases.items() if line["producer"] == "producer-0"]
        ready = {line["g"]: line["t"] for line in plant.history("ready")}
        times = [ready[number] - leases[number]["t"] for number in slow if number in ready]
        assert min(times) >= 2 * 2 * 0.3
        during = [sum(leases[n]["t"] < t < ready[n] for t in claims) for n in slow if n in ready]
        assert max(during) >= 2  # batches left while it worked on one group
        figure(f"{len(times)} groups of a slow producer took {max(times):.1f} s; {max(during)} batches overtook one")


def test_f16_a_producer_behind_a_partition(tmp_path: Path, figure: Any) -> None:
    """Nothing comes through for longer than a lease lives; it waits, comes back, and nothing is doubled."""
    with Plant(tmp_path, producers=2, extra=("learner.steps=1000000",), env={"TOY_TOKEN_S": "0.05"}) as plant:
        plant.start()
        link = plant.roles["producer-0"].link
        assert link is not None
        plant.wait(
            "work at producer-0", lambda: any(line["producer"] == "producer-0" for line in plant.history("lease"))
        )
        link.held = frozenset({"up", "down"})
        began = time.monotonic()
        plant.wait(
            "its leases to be lost", lambda: any(line["producer"] == "producer-0" for line in plant.history("lost"))
        )
        at = plant.committed()
        plant.wait("progress without it", lambda: plant.committed() > at + 10)
        assert plant.roles["producer-0"].alive() and not plant.roles["producer-0"].codes
        out = time.monotonic() - began
        link.heal()
        healed = time.time()
        plant.wait(
            "it is back",
            lambda: any(line["producer"] == "producer-0" and line["t"] > healed for line in plant.history("sample")),
        )
        refused = plant.status()["counters"].get("refused_samples", 0)
        plant.finish()
        plant.assert_accounted()
        figure(f"partition of {out:.1f} s: back {time.time() - healed:.1f} s after it, {refused} late samples refused")
