"""A whole run in virtual time: producers, the buffer's own state machine, reward workers, a learner, weights.

Decisions about groups are those of the live state machine: admission, the schedule, late groups,
`pipeline_depth = "auto"`. Guarantees:
1. the same plant and scenario give the same forecast, whatever the machine and its load;
2. requests wait and are answered as by `buffers.service`: the learner first, then producers in the order in which they
   asked, then reward workers;
3. a learner's step is claim, fetch, train, publish, commit, and a checkpoint every few steps; weights reach the engines
   a round later, which the learner does not wait for.
Not played: faults, evaluations, filters, several turns.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from asyncrl.config.sections.reward import DEFAULT
from asyncrl.errors import AsyncRLError
from asyncrl.planner.model import Forecast, Plant, Scenario
from asyncrl.wire import Lease, SampleHead, Samples, Score, Scores
from buffers.groups.batches import Claimed
from buffers.groups.group_table import GroupTable, check_sums, reasons
from buffers.groups.machine import GroupMachine, Parts
from buffers.groups.records import FIRST_DEPTH, Ledger, Record, Settings, State
from buffers.groups.transaction import Rows, SampleEvent, Transaction
from buffers.simulation.clock import Clock
from buffers.simulation.engines import Decoding, Engine

TICK_S = 0.2
SKIPPED = 5  # steps at the start in which the pipeline fills, at most a third of the run
MOST_SAMPLES = 20  # generated for each one that the run trains: beyond, it goes round in circles (all is late, say)
QUIET_S = 6 * 3600.0  # without the end of a sample or a step


class QuietTransaction(Transaction):
    """A transaction that keeps neither rows nor history lines: nothing reads them here."""

    def put(self, key: str, rows: Rows) -> None:
        self.generation += 1

    def put_quietly(self, key: str, rows: Rows) -> None: ...

    def event(self, name: str, **fields: Any) -> None: ...

    def sample_events(self, events: Iterable[SampleEvent]) -> None: ...

    def free(self, records: list[Record]) -> None: ...


class QuietTable(GroupTable):
    """A table that checks the sums alone: the full check costs more than the step."""

    def verify(self) -> None:
        check_sums(self)


QUIET = Parts(transaction=QuietTransaction, table=QuietTable)


class Step(msgspec.Struct):
    """What became of a learner step."""

    asked: float
    claimed: float
    ended: float
    tokens: int
    lags: list[int]


class Simulation:
    """One scenario. `run` gives the forecast."""

    def __init__(self, plant: Plant, scenario: Scenario, *, parts: Parts = QUIET) -> None:
        self.plant = plant
        self.scenario = scenario
        self.clock = Clock(cores=plant.cores, demand=plant.other_demand)
        self.machine = GroupMachine(settings_for(scenario), parts=parts)
        self.steps: list[Step] = []
        self._rng = random.Random(scenario.seed)
        self._epoch = self.machine.register(
            name="learner", pid=1, host="here", step=0, ledger=Ledger(), takeover=False, now=0.0
        )
        self.engines = [self._engine(number) for number in range(scenario.producers)]
        self._polls: dict[str, tuple[int, int, float, int, Engine]] = {}  # name -> version, groups, until, request
        self._requests = 0
        self._generated, self._progress_at = 0, 0.0  # samples; when a sample or a step ended last
        self._room = True  # something happened that may let a producer have more
        self._idle_rewards = deque(f"reward-{number}" for number in range(scenario.reward_workers))
        self._looking = False
        self._wait_since: float | None = None
        self._dropped = 0

    def _engine(self, number: int) -> Engine:
        name = f"producer-{number}"
        self.machine.hello("producer", name, pid=1, host="here", now=0.0)
        return Engine(
            self.clock,
            self.plant,
            self.scenario,
            finished=lambda sample: self._samples(name, sample),
            ask=lambda version, groups: self._lease_request(name, number, version, groups),
            length_of=self._length_of,
        )

    def _length_of(self, group: int, index: int) -> int:
        """From the measured group at the same place of the run: lengths drift, and those of one group are alike."""
        known = self.plant.lengths
        total = max(1, self.scenario.steps * self.scenario.batch_groups)
        row = known[min(len(known) - 1, group * len(known) // total)]
        return row[index] if index < len(row) else row[self._rng.randrange(len(row))]

    def _measured_at(self, measured: tuple[float, ...], step: int) -> float:
        """What was measured at the same place of the run: the same for all scenarios, so that they can be compared."""
        return measured[min(len(measured) - 1, step * len(measured) // max(1, self.scenario.steps))]

    # ------------------------------------------------------------ the buffer

    def _soon(self) -> None:
        """Look at everything that waits, once, after what happens now."""
        if not self._looking:
            self._looking = True
            self.clock.schedule(0.0, self._look)

    def _look(self) -> None:
        self._looking = False
        if self._wait_since is not None:
            self._look_at_claim()
        if self._room:
            self._room = False
            for name in list(self._polls):
                self._look_at_lease(name)
        while self._idle_rewards and self.machine.scoring.queue.count_waiting(DEFAULT):
            self._reward(self._idle_rewards.popleft())
        self.machine.workers.cancelled.clear()  # an engine hears of it with its next sample

    def _lease_request(self, name: str, number: int, version: int, groups: int) -> None:
        self._requests += 1
        request = self._requests
        self.machine.workers.see("producer", name, self.clock.now)
        self._polls[name] = (version, groups, self.clock.now + 0.25, request, self.engines[number])
        self._room = True
        self._soon()
        self.clock.schedule(0.25, lambda: self._overdue(name, request))

    def _overdue(self, name: str, request: int) -> None:
        poll = self._polls.get(name)
        if poll is not None and poll[3] == request:
            self._answer(name, ())

    def _look_at_lease(self, name: str) -> None:
        version, groups, _, request, _ = self._polls[name]
        leases = self.machine.lease(
            name, engine_version=version, max_groups=groups, request=request, now=self.clock.now
        )
        if leases:
            self._answer(name, leases)

    def _answer(self, name: str, leases: tuple[Lease, ...]) -> None:
        *_, request, engine = self._polls.pop(name)
        self.machine.workers.known["producer", name].answered = request
        engine.take_answer(leases)

    def _samples(self, name: str, sample: Decoding) -> bool:
        """A finished sample arrives; whether its lease still stands."""
        self._generated, self._progress_at = self._generated + 1, self.clock.now
        number, token = sample.lease.group, sample.lease.token
        group = self.machine.table.groups.get(number)
        if group is None or group.token != token:
            return False
        head = SampleHead(sample.index, sample.length, "stop", ((sample.oldest, sample.length),))
        self._requests += 1
        checksum = self._requests
        self.machine.samples(
            Samples(name, number, token, (head,), {}, (), "", 1),
            checksum=checksum,
            invalid=str,
            keep=lambda: Record(0, 0, 0, 0, checksum),
            now=self.clock.now,
        )
        self._soon()
        return self.machine.table.groups[number].state == State.LEASED or len(group.samples) == len(
            sample.lease.missing
        )

    def _reward(self, name: str) -> None:
        self._requests += 1
        request = self._requests
        items = self.machine.reward_lease(
            name, max_samples=self.scenario.reward_batch, request=request, now=self.clock.now
        )
        if not items:
            self._idle_rewards.append(name)
            return

        def finish() -> None:
            scores = tuple(Score(item.group, item.index, item.token, float(self._rng.random() < 0.5)) for item in items)
            self.machine.scores(Scores(name, scores), now=self.clock.now)
            self.machine.workers.known["reward", name].answered = request
            self._idle_rewards.append(name)
            self._soon()

        self.clock.schedule(2 * self.plant.request_s + len(items) * self.plant.reward_s, finish)

    # ------------------------------------------------------------ the learner

    def _claim(self) -> None:
        self._wait_since = self.clock.now
        self._soon()
        self._tick(len(self.steps))

    def _tick(self, step: int) -> None:
        """The clock of the service: late groups are given up by time alone."""
        if self._wait_since is not None and len(self.steps) == step:
            self._soon()
            self.clock.schedule(TICK_S, lambda: self._tick(step))

    def _look_at_claim(self) -> None:
        step = len(self.steps) + 1
        claimed = self.machine.claim(epoch=self._epoch, step=step, version=step - 1, now=self.clock.now)
        if claimed is not None:
            self._train(step, claimed)

    def _train(self, step: int, claimed: Claimed) -> None:
        asked, self._wait_since, self._room = self._wait_since or 0.0, None, True
        members = [self.machine.table.groups[number] for number in claimed.batch.groups]
        tokens = sum(sample.length for group in members for sample in group.samples.values())
        lags = [step - 1 - min(sample.oldest for sample in group.samples.values()) for group in members]
        self.steps.append(Step(asked, self.clock.now, 0.0, tokens, lags))
        plant = self.plant
        noise = self._measured_at(plant.train_noise, step - 1)
        train = (plant.train_s + plant.train_token_s * tokens / self.scenario.learner_speed) * noise
        self.clock.ask(plant.learner_threads)
        self.clock.schedule_work(plant.fetch_s + train + plant.publish_s, lambda: self._publish(step))

    def _publish(self, step: int) -> None:
        self.clock.ask(-self.plant.learner_threads)
        self._send(step)
        self.clock.schedule(self.plant.commit_s, lambda: self._commit(step))

    def _send(self, version: int) -> None:
        """A round to every engine."""
        delay = self._measured_at(self.plant.sync_s, version) * self.scenario.sync_factor
        for engine in self.engines:
            self.clock.schedule(delay, lambda engine=engine: engine.swap(version))  # type: ignore[misc]

    def _commit(self, step: int) -> None:
        now = self._progress_at = self.clock.now
        self.machine.commit(epoch=self._epoch, step=step, version=step, digest="", now=now)
        self.steps[-1].ended = now
        self._dropped = sum(reasons(self.machine.table, State.DROPPED).values())
        self.machine.batches.checkpointed(epoch=self._epoch, step=step)
        self._room = True
        self._soon()
        every = self.scenario.checkpoint_every
        pause = self.plant.checkpoint_s if every and step % every == 0 else 0.0
        if step < self.scenario.steps:
            self.clock.schedule(pause, self._claim)

    # ------------------------------------------------------------ the run

    def run(self) -> Forecast:
        """Play it to its last step."""
        self._send(0)
        self._claim()
        last = self.scenario.steps
        most = 1000 + MOST_SAMPLES * last * self.scenario.batch_groups * self.scenario.asked_samples
        while self._generated < most and self.clock.now < self._progress_at + QUIET_S and self.clock.step():
            if len(self.steps) == last and self.steps[-1].ended:
                return self._forecast()
        why = f"{self._dropped} groups were late so far" if self._dropped else self.machine.diagnosis(self.clock.now)
        raise AsyncRLError("plan.stuck", f"step {len(self.steps) + 1} is not reached: {why}", where="plan")

    def _forecast(self) -> Forecast:
        every = self.steps
        skipped = min(SKIPPED, len(every) // 3)
        counted = every[skipped:]
        wall = every[-1].ended
        since = every[skipped - 1].ended if skipped else 0.0
        span = max(1e-9, wall - since)
        lags = Counter(lag for step in counted for lag in step.lags)
        groups = sum(lags.values())
        idle = 1 - sum(engine.busy_s for engine in self.engines) / max(1e-9, wall * len(self.engines))
        return Forecast(
            name=self.scenario.name,
            steps=len(every),
            wall_s=wall,
            steps_s=len(counted) / span,
            tokens_s=sum(step.tokens for step in counted) / span,
            groups_s=groups / span,
            lag_mean=sum(lag * count for lag, count in lags.items()) / max(1, groups),
            lags={lag: count / groups for lag, count in sorted(lags.items())},
            learner_wait_share=sum(step.claimed - step.asked for step in counted) / span,
            producer_idle_share=max(0.0, idle),
            dropped=self._dropped,
        )


def settings_for(scenario: Scenario) -> Settings:
    """The state machine's settings."""
    return Settings(
        group_size=scenario.group_size,
        batch_groups=scenario.batch_groups,
        max_staleness=scenario.max_staleness,
        depth=min(FIRST_DEPTH, scenario.max_staleness) if scenario.auto_depth else scenario.depth,
        total_groups=scenario.steps * scenario.batch_groups,
        on_late=scenario.on_late,  # type: ignore[arg-type]
        late_timeout_s=scenario.late_timeout_s,
        lease_timeout_s=1e12,
        steps=scenario.steps,
        depth_rule="auto" if scenario.auto_depth else "fixed",
        learner_idle_target=scenario.learner_idle_target,
        max_groups_in_flight=round(scenario.max_groups_in_flight * scenario.engines),
        max_reuse=scenario.max_reuse,
        over_issue=scenario.asked_samples - scenario.group_size,
        seed=scenario.seed,
    )


def play(plant: Plant, scenario: Scenario) -> Forecast:
    """The forecast of one scenario."""
    return Simulation(plant, scenario).run()
