"""For the status: why a claim waits, in one sentence (the holders of the missing groups, and when they were last heard
from), and what the judges do.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from asyncrl.config.judges import display_name
from buffers.groups.batches import Batches
from buffers.groups.judgements import ScoreQueue
from buffers.groups.records import State
from buffers.groups.scoring import Scoring


class Diagnosis:
    """Reads the parts of the state machine and changes nothing."""

    def __init__(self, batches: Batches, scoring: Scoring) -> None:
        self.tx = batches.tx
        self.batches = batches
        self.scoring = scoring
        self.workers = batches.workers
        self.indexes = batches.table.indexes

    def describe(self) -> str:
        """`step 3 waits 1.0 s for 1 group: 1 leased to p (last seen 6.0 s ago); late: group 0`."""
        schedule = self.batches.schedule
        step = self.batches.table.meta.version + 1
        size = schedule.batch_size(step)
        asked = self.batches.asked_since
        waited = self.tx.now - asked[1] if asked and asked[0] == step else 0.0
        if size <= 0:
            return f"step {step}: all {self.batches.live.current.total_groups} groups of the run are in batches"
        missing = max(0, size - len(self.indexes.ready) - len(schedule.usable(step - 1)))
        late = self.batches.late_groups(step)
        wanted = max(missing, len(late))
        head = f"step {step} waits {waited:.1f} s for {wanted} group{'s' * (wanted != 1)}"
        parts = [*self._holders(), *self._describe_waiting()] or [self._idle()]
        tail = f"; late: group{'s' * (len(late) != 1)} {', '.join(map(str, late[:8]))}" if late else ""
        return f"{head}: {', '.join(parts)}{tail}"

    def _holders(self) -> list[str]:
        held = sorted((name, len(ids)) for name, ids in self.indexes.held.items() if ids)
        return [f"{number} leased to {name} ({self._last_seen('producer', name)})" for name, number in held]

    def _last_seen(self, role: str, name: str) -> str:
        return self.workers.last_seen(role, name, self.tx.now)

    def _describe_waiting(self) -> list[str]:
        parts = []
        if self.indexes.pending:
            parts.append(f"{len(self.indexes.pending)} waiting for a producer")
        unscored = self.indexes.counts[State.UNSCORED]
        if unscored:
            busy = Counter({name: len(keys) for name, keys in self.scoring.queue.held.items() if keys})
            by = [
                f"{number} samples at {name} ({self._last_seen('reward', name)})"
                for name, number in sorted(busy.items())
            ]
            by += self._judges_without_workers()
            parts.append(f"{unscored} unscored" + (f" ({', '.join(by)})" if by else ""))
        return parts

    def _judges_without_workers(self) -> list[str]:
        queue = self.scoring.queue
        return [
            f"{queue.count_waiting(name)} samples wait for judge {display_name(name)}, which has no living worker"
            for name in self.scoring.judges.names
            if queue.count_waiting(name) and not self.scoring.living_workers(name)
        ]

    def _idle(self) -> str:
        """Nothing is leased: the state of the producers."""
        limit = self.batches.live.current.lease_timeout_s
        producers = [worker for (role, _), worker in self.workers.known.items() if role == "producer"]
        alive = [worker for worker in producers if self.tx.now - worker.seen <= limit]
        if not alive:
            newest = sorted(producers, key=lambda worker: -worker.seen)[:4]
            lines = [f"{worker.name} ({self._last_seen('producer', worker.name)})" for worker in newest]
            return "none is leased and no producer is alive" + (f": {', '.join(lines)}" if lines else "")
        lines = sorted(f"{worker.name} {worker.waiting_for or 'waits for work'}" for worker in alive)
        return f"none is leased; {'; '.join(lines[:4])}"


def describe_judges(scoring: Scoring, held_out: ScoreQueue | None = None) -> list[dict[str, Any]]:
    """The judges: samples that wait, are with workers, and arrived since the service started.

    `held_out`: the queue of an evaluation, whose samples are counted, too.
    """
    queues = [scoring.queue] if held_out is None else [scoring.queue, held_out]
    lines = []
    for judge in scoring.judges.names:
        mine = [scoring.workers.known["reward", name] for name in sorted(scoring.living_workers(judge))]
        calls = [worker.stats["reward_call_s"] for worker in mine if "reward_call_s" in worker.stats]
        counts = Counter({what: n for (name, what), n in scoring.counts.items() if name == judge})
        refused = {what.partition(":")[2]: n for what, n in sorted(counts.items()) if what.startswith("refused:")}
        lines.append(
            {
                "judge": display_name(judge),
                "workers": len(mine),
                "waiting": sum(queue.count_waiting(judge) for queue in queues),
                "leased": sum(queue.count_leased(judge) for queue in queues),
                "scored": counts["scored"],
                "late": counts["late"],
                "failures": counts["failures"],
                "refused": refused,
                "call_s": round(sum(calls) / len(calls), 6) if calls else None,
            }
        )
    return lines
