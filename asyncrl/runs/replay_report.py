"""Plan and result of a replay, the comparison with the run, and its text.

Pure. Guarantees:
1. a version counts as equal only if both digests are known and equal; versions without a logged digest are counted
   apart;
2. versions under changed settings are compared, but a difference is no failure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

PLAN, LINES, END = "plan.json", "steps.jsonl", "end.json"
COMPARED = {
    "loss": "loss",
    "grad_norm": "grad norm",
    "clip_share": "clip share",
    "entropy": "entropy",
    "weight_mean": "mean weight",
    "tis_capped_share": "capped",
    "ess": "ess",
    "kl_behaviour": "KL",
    "lr": "lr",
}
SHOWN_COLUMNS = ("loss", "grad_norm", "clip_share", "entropy", "weight_mean")
SHOWN_STEPS = 24


class Step(msgspec.Struct, frozen=True):
    """A step of the run. `digest` is empty if no log holds it."""

    step: int
    groups: tuple[int, ...]
    digest: str = ""
    metrics: dict[str, float] = {}


class Plan(msgspec.Struct, frozen=True):
    """Plan of a replay. `checkpoint` is empty if it begins with the start weights."""

    run: str
    start: int  # version of the first weights
    since: int  # `overrides` and other rewards apply after this step
    steps: tuple[Step, ...]
    checkpoint: str = ""
    start_digest: str = ""
    overrides: tuple[str, ...] = ()
    rewards: str = ""  # file of the scores whose rewards are trained on
    rescored: dict[int, tuple[int, ...]] = {}  # step -> groups with other rewards there
    left: tuple[str, ...] = ()  # gaps of that file
    final: str = ""  # the run's weights after the last step; empty: none


class Done(msgspec.Struct):
    """A line of steps.jsonl: the replayed step."""

    step: int
    digest: str
    metrics: dict[str, float] = {}
    skipped: int = 0
    left_out: tuple[int, ...] = ()  # groups that failed here and not in the run


class End(msgspec.Struct):
    """end.json: facts after the last step."""

    start_digest: str = ""
    device: str = ""
    ranks: int = 1
    weights: dict[str, float] = {}  # distance of the final weights from the run's
    notes: tuple[str, ...] = ()


class Compared(msgspec.Struct):
    """One version. `equal` is None if the run's digest is unknown."""

    step: int
    changed: bool  # under changed settings
    equal: bool | None
    digest: str
    recorded: str
    old: dict[str, float]
    new: dict[str, float]
    skipped: int = 0


class Replayed(msgspec.Struct):
    """The verdict. `ok`: every version under unchanged settings with a known digest is equal."""

    ok: bool
    run: str
    start: int
    checkpoint: str
    since: int
    last: int
    overrides: tuple[str, ...]
    checked: int  # versions under unchanged settings whose digest the run's log holds
    equal: int
    unknown: int
    first_different: int | None
    steps: list[Compared]
    weights: dict[str, float]
    notes: list[str]
    wall_s: float
    rewards: str = ""
    rescored: dict[int, tuple[int, ...]] = {}


def judge(plan: Plan, done: Sequence[Done], end: End, *, wall_s: float) -> Replayed:
    """Compare the replay's lines with the run's."""
    by_step = {line.step: line for line in done}
    steps = []
    for old in plan.steps:
        new = by_step[old.step]
        changed = bool(plan.overrides or plan.rewards) and old.step > plan.since
        equal = None if not old.digest else old.digest == new.digest
        steps.append(
            Compared(
                old.step, changed, equal, new.digest, old.digest, _part(old.metrics), _part(new.metrics), new.skipped
            )
        )
    same = [step for step in steps if not step.changed]
    checked = [step for step in same if step.equal is not None]
    different = [step.step for step in checked if not step.equal]
    notes = [*end.notes, *plan.left]
    first = different[0] if different else None
    if plan.start_digest and plan.start_digest != end.start_digest:
        first = plan.start
        notes.insert(0, f"the weights it began with are not version {plan.start} of the run (was the model changed?)")
    if different and (end.device != "cpu" or end.ranks > 1):
        notes.append(f"bitwise equality is promised for one rank on a CPU, this was {end.ranks} x {end.device}")
    notes += [f"step {line.step}: groups {list(line.left_out)} broke here" for line in done if line.left_out]
    return Replayed(
        ok=first is None and bool(checked or plan.overrides or plan.rescored),
        run=plan.run,
        start=plan.start,
        checkpoint=plan.checkpoint,
        since=plan.since,
        last=plan.steps[-1].step,
        overrides=plan.overrides,
        checked=len(checked),
        equal=len(checked) - len(different),
        unknown=len(same) - len(checked),
        first_different=first,
        steps=steps,
        weights=end.weights,
        notes=notes,
        wall_s=round(wall_s, 3),
        rewards=plan.rewards,
        rescored=plan.rescored,
    )


def _part(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in COMPARED if name in metrics}


def render(found: Replayed) -> str:
    """The text of a replay."""
    begin = f"checkpoint of step {found.start}" if found.checkpoint else "the start weights"
    lines = [f"replay of {found.run}: steps {found.start + 1} to {found.last} from {begin}, {found.wall_s:.1f} s"]
    if found.checked:
        lines.append(f"{found.equal} of {found.checked} versions bitwise equal")
    if found.first_different is not None:
        at = next((step for step in found.steps if step.step == found.first_different), None)
        words = f": {at.digest} here, {at.recorded} in the run" if at else ""
        lines.append(f"the first that differs is version {found.first_different}{words}")
    if found.unknown:
        lines.append(f"{found.unknown} versions have no digest in the run's log")
    if found.rewards:
        lines += _format_rescored(found)
    if not found.checked and not found.overrides and not found.rescored:
        lines.append("nothing could be compared: this proves nothing")
    if found.overrides or found.rescored:
        lines += _what_if(found)
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _format_rescored(found: Replayed) -> list[str]:
    groups = sum(len(numbers) for numbers in found.rescored.values())
    lines = [f"rewards of {found.rewards}: {groups} groups have others than the run, in {len(found.rescored)} steps"]
    for step, numbers in list(found.rescored.items())[:SHOWN_STEPS]:
        lines.append(f"  step {step}: groups {', '.join(map(str, numbers))}")
    if len(found.rescored) > SHOWN_STEPS:
        lines.append(f"  and {len(found.rescored) - SHOWN_STEPS} steps more")
    return lines


def _what_if(found: Replayed) -> list[str]:
    changed = [step for step in found.steps if step.changed]
    what = [*found.overrides, *(["rewards of the file"] if found.rescored else [])]
    lines = [f"what if, from step {found.since + 1} on: {', '.join(what)}", ""]
    lines.append("  step  " + "  ".join(f"{COMPARED[name] + ' old -> new':>24}" for name in SHOWN_COLUMNS))
    every = max(1, -(-len(changed) // SHOWN_STEPS))
    for place, step in enumerate(changed):
        if place % every == 0 or step is changed[-1]:
            cells = [f"{_number(step.old.get(name))} -> {_number(step.new.get(name))}" for name in SHOWN_COLUMNS]
            lines.append(
                f"  {step.step:>4}  "
                + "  ".join(f"{cell:>24}" for cell in cells)
                + ("  skipped" if step.skipped else "")
            )
    lines += ["", "  mean over these steps, old -> new"]
    for name, title in COMPARED.items():
        pairs = [(step.old[name], step.new[name]) for step in changed if name in step.old and name in step.new]
        if pairs:
            old, new = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            lines.append(f"    {title:<12} {_number(old)} -> {_number(new)}")
    if found.weights:
        w = found.weights
        lines.append(
            f"  final weights: distance {w['distance']:.4g} (L2), {w['relative']:.3g} of the run's norm; "
            f"largest difference {w['largest']:.3g}"
        )
    equal = sum(step.equal is True for step in changed)
    lines.append(f"  versions bitwise equal to the run's: {equal} of {len(changed)}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"
