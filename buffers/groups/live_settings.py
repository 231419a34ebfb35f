"""The settings in force: those of the configuration and what `asyncrl tune` changed, and the plan of batch sizes.

Guarantees:
1. a change is applied as a whole or refused (`tune.refused`). It is numbered, persisted in the row `tuning` and written
   to the history, one event per key; it survives a restart of the service and wins over the configuration file;
2. a group keeps the bound and the number of uses that it was issued with;
3. the length of a run stays in steps: its total number of groups is the sum of the plan over all steps;
4. a larger batch counts from the next claim. A smaller one counts from the first step from which the schedule of
   everything outstanding stays feasible. Leases are judged by the plan, so (F) holds through the change;
5. `pipeline_depth = "auto"` sets the depth by how long claims wait; each change is one by the author `auto`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncrl.config import AlgorithmConfig
from asyncrl.config.sections.buffer import MOST_IN_FLIGHT_GROUPS
from buffers.groups.group_table import GroupTable
from buffers.groups.records import FIRST_DEPTH, Change, Settings
from buffers.groups.transaction import Transaction
from buffers.groups.tunable_settings import (
    ALGORITHM,
    KEPT_CHANGES,
    SHORT,
    DepthController,
    Tuning,
    check_algorithm,
    convert_value,
    flatten,
    full_key,
    refusal,
)
from buffers.values.feasibility import Plan, capacity, levels

KEPT_IN_CHECKPOINT = 16  # changes that can be undone even after a loss of the store
Changed = dict[str, tuple[Any, Any]]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Tuning).decode


class LiveSettings:
    """`base` are the settings of the configuration, `current` those in force, `plan` the sizes of batches."""

    def __init__(self, base: Settings, tx: Transaction, table: GroupTable) -> None:
        self.base = base
        self.current = base
        self.tx = tx
        self.table = table
        self.tuning = Tuning()
        self.plan = Plan(((1, base.batch_groups),))
        self._controller = DepthController(base.learner_idle_target)
        self._watched: tuple[int, float, float | None] | None = None  # step, time of its claim, time of the batch

    def load(self, rows: Iterable[tuple[str, bytes]]) -> None:
        """Take over the persisted row; tuned settings win over those of the configuration."""
        for key, value in rows:
            if key == "tuning":
                self.tuning = _decode(value)
        if self.tuning.number:
            self._put_in_force()

    def rows(self) -> list[Change]:
        """The row, for a store that lost its own."""
        return [Change("tuning", self.row("tuning"))]

    def row(self, key: str) -> bytes | None:
        return _encode(self.tuning)

    # ------------------------------------------------------------ tune and undo

    def tune(self, changes: Mapping[str, Any], *, author: str) -> tuple[int, Changed, str]:
        """Change settings: the number of the change, key -> (old, new), a note. Keys are dotted or short."""
        values = dict(self.tuning.values)
        for key, value in changes.items():
            values[full_key(key)] = convert_value(full_key(key), value)
        if not changes:
            raise refusal("nothing to change")
        return self._change(values, author=author)

    def undo(self, number: int, *, author: str) -> tuple[int, Changed, str]:
        """Return to the settings in force after change `number`; 0 is the configuration. This is a change, too."""
        if number == 0:
            return self._change({}, author=author, undo=True)
        if number not in self.tuning.past:
            known = f"{min(self.tuning.past)} to {self.tuning.number}" if self.tuning.past else "none"
            raise refusal(f"change {number} is not known; known are 0 (the configuration) and {known}")
        return self._change(dict(self.tuning.past[number]), author=author, undo=True)

    def _change(self, values: dict[str, Any], *, author: str, undo: bool = False) -> tuple[int, Changed, str]:
        before, after = self._values_in_force(self.tuning.values), self._values_in_force(values)
        keys = sorted({*self.tuning.values, *values})
        changed = {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}
        if not changed:
            return self.tuning.number, {}, ""
        check_together(after)
        check_algorithm(values, self.base.algorithm)
        old_depth = self.current.depth
        self.tuning.values = values
        notes = [self._replan(int(after["buffer.batch_groups"]))] if "buffer.batch_groups" in changed else []
        self._put_in_force()
        if self.current.depth != old_depth and "buffer.pipeline_depth" not in changed:
            notes.append(f"pipeline_depth is {self.current.depth} now")
        if "buffer.max_staleness" in changed:
            notes.append("groups that are leased keep their bound")
        self._record(changed, author=author, undo=undo)
        return self.tuning.number, changed, "; ".join(filter(None, notes))

    def _record(self, changed: Changed, *, author: str, undo: bool = False) -> None:
        tuning = self.tuning
        tuning.number += 1
        tuning.author = author[:200]
        tuning.past[tuning.number] = dict(tuning.values)
        for number in sorted(tuning.past)[:-KEPT_CHANGES]:
            del tuning.past[number]
        for key, (old, new) in changed.items():
            more = {"undo": True} if undo else {}
            self.tx.event("tune", n=tuning.number, author=tuning.author, key=key, old=old, new=new, **more)
        self.tx.put("tuning", self)

    def checkpoint_text(self) -> str:
        """The changes as a checkpoint keeps them, so that they stay in force even without the store."""
        if not self.tuning.number:
            return ""
        newest = sorted(self.tuning.past)[-KEPT_IN_CHECKPOINT:]
        kept = msgspec.structs.replace(self.tuning, past={number: self.tuning.past[number] for number in newest})
        return msgspec.json.encode(kept).decode()

    def adopt(self, text: str) -> None:
        """Take over the changes of a checkpoint if those here are older (the store was lost or restored)."""
        found = msgspec.json.decode(text, type=Tuning) if text else Tuning()
        if found.number > self.tuning.number:
            self.tuning = found
            self._put_in_force()
            self.tx.put("tuning", self)

    def tunable(self) -> dict[str, Any]:
        """Every setting that can be tuned, with its value in force."""
        return self._values_in_force(self.tuning.values)

    def _values_in_force(self, values: Mapping[str, Any]) -> dict[str, Any]:
        base = self.base
        depth = base.depth if base.depth_rule == "fixed" else base.depth_rule
        known = {
            **{key: getattr(base, short) for short, key in SHORT.items() if short != "pipeline_depth"},
            "buffer.pipeline_depth": depth,
            **{f"{ALGORITHM}{name}": value for name, value in flatten(base.algorithm).items()},
        }
        return {**known, **values}

    def _put_in_force(self) -> None:
        """Derive `current` and `plan` from the configuration and the overrides."""
        base, tuning, values = self.base, self.tuning, self._values_in_force(self.tuning.values)
        bound, depth = values["buffer.max_staleness"], values["buffer.pipeline_depth"]
        rule = depth if isinstance(depth, str) else "fixed"
        steps, total = base.steps or -(-base.total_groups // base.batch_groups), base.total_groups
        if tuning.plan:
            self.plan = Plan(tuning.plan)
            total += self.plan.capacity(0, steps - 1) - steps * base.batch_groups
        if rule == "auto":
            depth = min(tuning.depth if tuning.depth >= 0 else FIRST_DEPTH, bound)
        self.current = msgspec.structs.replace(
            base,
            max_staleness=bound,
            depth=bound if rule == "max" else min(depth, bound),
            depth_rule=rule,
            on_late=values["buffer.on_late"],
            late_timeout_s=values["buffer.late_timeout_s"],
            batch_groups=values["buffer.batch_groups"],
            max_reuse=values["buffer.max_reuse"],
            max_groups_in_flight=values["producers.max_groups_in_flight"],
            total_groups=total,
            steps=steps if tuning.plan else base.steps,
        )

    def _replan(self, size: int) -> str:
        """A new batch size from the first step from which everything outstanding stays feasible; a note."""
        v, due = self.table.frontier, self.table.indexes.due
        first, last = v + 1, max((v, *due)) + 2
        for step in range(first, last + 1):
            plan = self.plan.resize(step, size)
            if all(
                n <= max(capacity(plan, v, u), 0) or plan.capacity(v, u) >= self.plan.capacity(v, u)
                for u, n in levels(due, v)
            ):
                break
        self.plan, self.tuning.plan = plan, plan.changes
        if step == first:
            return ""
        before = sum(count for u, count in due.items() if u < step)
        return f"batch_groups = {size} from step {step} on: {before} groups must be trained before"

    # ------------------------------------------------------------ pipeline_depth = "auto"

    def watch_claim(self, step: int) -> None:
        """The learner asks for the batch of `step`: the step before is over."""
        now = self.tx.now
        last, self._watched = self._watched, (step, now, None)
        if self.current.depth_rule != "auto" or last is None or last[0] != step - 1 or last[2] is None:
            return
        depth = self.current.depth
        wanted = self._controller.observe(
            idle_s=last[2] - last[1], step_s=now - last[1], depth=depth, limit=self.current.max_staleness
        )
        if wanted != depth:
            self.tuning.depth = wanted
            self._put_in_force()
            self._record({"buffer.pipeline_depth": (depth, wanted)}, author="auto")

    def watch_batch(self, step: int) -> None:
        """The learner gets the batch of `step`."""
        if self._watched is not None and self._watched[0] == step:
            self._watched = (step, self._watched[1], self.tx.now)


def check_together(values: Mapping[str, Any]) -> None:
    """The rules across settings, as for the configuration file. Raises `tune.refused`."""
    bound, depth, batch = (values[SHORT[key]] for key in ("max_staleness", "pipeline_depth", "batch_groups"))
    if isinstance(depth, int) and depth > bound:
        raise refusal(
            f"pipeline_depth = {depth} is above max_staleness = {bound}: work that deep would be too old when its "
            "turn comes; change both, or set pipeline_depth = max"
        )
    deepest = depth if isinstance(depth, int) else bound
    if (deepest + 1) * batch > MOST_IN_FLIGHT_GROUPS:
        raise refusal(
            f"({deepest} + 1) * batch_groups = {batch} lets {(deepest + 1) * batch} groups run ahead of the learner; "
            f"at most {MOST_IN_FLIGHT_GROUPS} are supported"
        )
    minibatches = values.get(f"{ALGORITHM}minibatches", AlgorithmConfig().minibatches)
    if minibatches > batch:
        raise refusal(f"learner.algorithm.minibatches = {minibatches} exceeds batch_groups = {batch}")
