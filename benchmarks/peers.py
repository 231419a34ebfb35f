"""Published speeds of asynchronous RL systems next to forecasts of `asyncrl plan`. Nothing is run but the planner.

    python benchmarks/peers.py

A forecast takes the seconds of each phase that the source prints for its division of devices: the generation of one
batch, and the training of one. It plays a bound of 0 with the phases of the source's synchronous row, and a bound of 1
with those of its asynchronous row. What a source does not say is in `ASSUMED`. How a decode step slows down with its
samples is not said either, so each case is played at both extremes: the range of its forecasts.
Writes benchmarks/results/peers.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec
from reports import write

from asyncrl.planner.forecast import drawn_lengths, play
from asyncrl.planner.model import Plant, Scenario
from asyncrl.planner.search import play_all

RESULTS = ROOT / "benchmarks" / "results" / "peers.json"
ONE_STEP_OFF = "verl, docs/advance/one_step_off.md of 07/17/2025, table 'Experimental Results'"
FULLY_ASYNC = "verl, docs/advance/fully_async.md of 10/18/2025, table 'Asynchronous Training on 7B Model'"
ABLATION = "verl, docs/advance/fully_async.md of 10/18/2025, table '128-card Stale Ablation Experiment'"
AREAL = "AReaL, blog/AReaL_v0_3.md, table 2"
ASSUMED = {
    "batch": "512 prompts of 16 samples in every case; one_step_off.md does not print its batch",
    "lengths": "log-normal, mean of a quarter of the longest response, standard deviation of its mean, cut at the "
    "longest",
    "slots": "a batch is decoded at once",
    "bound": "1, as one step off; verl's staleness_threshold counts samples, and one that spans several versions goes "
    "on, whereas a bound here counts from the oldest token",
    "weights": "0.3 s from a publish to the swap: one_step_off.md says below 300 ms",
    "left out": "rewards, and the time of a step that the source lists in no phase",
}
GROUPS, SAMPLES, STEPS, SYNC_S = 512, 16, 16, 0.3
#: Share of the time of a decode step that grows with its samples.
EXTREMES = {"constant step": 0.0, "step grows with its samples": 1.0}


class Phases(NamedTuple):
    """Seconds of one batch on these devices."""

    engines: int  # devices that generate
    generate_s: float
    train_s: float  # old log-probs and update


class Case(NamedTuple):
    name: str
    source: str
    hardware: str
    model: str
    published: tuple[float, float]  # synchronous and asynchronous: seconds of a step, or hours of the run
    unit: str
    longest: int = 0  # response tokens
    synchronous: Phases | None = None
    asynchronous: Phases | None = None
    note: str = ""


QWEN, R1 = "Qwen2.5-Math-7B", "R1-Distill-Qwen"
COLOCATED = "the synchronous row uses all devices in both phases"
CASES = (
    Case("verl, one step off, FSDP2, 4 + 12", ONE_STEP_OFF, "16 H20", QWEN, (749, 520), "s", 20_480,
         Phases(16, 321, 88 + 286), Phases(4, 458, 108 + 337), COLOCATED),
    Case("verl, one step off, Megatron, 4 + 12", ONE_STEP_OFF, "16 H20", QWEN, (699, 566), "s", 8_192,
         Phases(16, 207, 119 + 344), Phases(4, 501, 120 + 347), COLOCATED),
    Case("verl, fully asynchronous, 16 + 16", FULLY_ASYNC, "32 H20", QWEN, (790.10, 294.77), "s", 28_672,
         note="no time of generation on 16 devices"),
    Case("verl, fully asynchronous, 32 + 32", FULLY_ASYNC, "64 H20", QWEN, (365.28, 189.26), "s", 28_672,
         Phases(64, 150.72, 70.26 + 133.41), Phases(32, 357.41, 156.98),
         f"{COLOCATED}; generation on 32 devices is that of the synchronous row of 32"),
    Case("verl, fully asynchronous, 64 + 64", FULLY_ASYNC, "128 H20", QWEN, (356.30, 150.63), "s", 28_672,
         Phases(128, 177.85, 53.92 + 113.81), Phases(64, 150.72, 113.16),
         f"{COLOCATED}; generation on 64 devices is that of the synchronous row of 64"),
    Case("verl, staleness_threshold 0.5 against 0, 64 + 64", ABLATION, "128 H20", QWEN, (231.34, 150.63), "s", 28_672,
         Phases(64, 150.72, 98.77), Phases(64, 150.72, 113.16),
         "same division in both rows; at 0 verl still trains on the first quarter of a batch while it generates the "
         "rest, a bound of 0 does not"),
    Case("AReaL, 1.5B", AREAL, "16 nodes", f"{R1} 1.5B", (41.0, 14.8), "h", note="no times of phases, no division"),
    Case("AReaL, 7B", AREAL, "24 nodes", f"{R1} 7B", (57.7, 25.4), "h", note="no times of phases, no division"),
)  # fmt: skip


def step_seconds(case: Case, phases: Phases, bound: int, growing: float) -> float:
    """Forecast seconds of a step. `growing`: share of a decode step that grows with its samples."""
    slots = GROUPS * SAMPLES // phases.engines
    lengths = drawn_lengths(case.longest / 4, 1.0, limit=case.longest, samples=SAMPLES)
    token_s = phases.generate_s / case.longest  # a first value, adapted below
    plant = Plant((1 - growing) * token_s, growing * token_s / slots, 0.0, 0.0, lengths, sync_s=(SYNC_S,))
    scenario = Scenario(
        steps=STEPS,
        producers=phases.engines,
        slots=slots,
        group_size=SAMPLES,
        asked_samples=SAMPLES,
        batch_groups=GROUPS,
        max_staleness=0,
        depth=0,
        late_timeout_s=1e6,  # a late group is waited for, as the sources do
    )
    [alone] = play_all(plant, [scenario], play)  # a batch is generated, nothing is trained
    faster = phases.generate_s * alone.steps_s
    plant = msgspec.structs.replace(
        plant,
        decode_s=plant.decode_s * faster,
        decode_sample_s=plant.decode_sample_s * faster,
        train_s=phases.train_s,
    )
    scenario = msgspec.structs.replace(scenario, max_staleness=bound, depth=bound)
    [found] = play_all(plant, [scenario], play)
    return 1 / found.steps_s


def report(case: Case) -> dict[str, Any]:
    """The published figures of a case and its forecasts, if its source gives enough."""
    before, after = case.published
    ratio = round(before / after, 2)
    row: dict[str, Any] = {
        "source": case.source,
        "hardware": case.hardware,
        "model": case.model,
        "published": {"synchronous": before, "asynchronous": after, "unit": case.unit, "ratio": ratio},
        "note": case.note,
        "forecast": None,
    }
    if case.synchronous and case.asynchronous:
        row["inputs"] = {
            "synchronous": case.synchronous._asdict(),
            "asynchronous": case.asynchronous._asdict(),
            "longest": case.longest,
        }
        row["forecast"] = {}
        for name, growing in EXTREMES.items():
            slow = step_seconds(case, case.synchronous, 0, growing)
            fast = step_seconds(case, case.asynchronous, 1, growing)
            found = {"synchronous_s": round(slow, 1), "asynchronous_s": round(fast, 1), "ratio": round(slow / fast, 2)}
            row["forecast"][name] = found
    return row


def main() -> None:
    rows = {case.name: report(case) for case in CASES}
    write(
        RESULTS,
        "published ratios of synchronous and asynchronous training, and forecasts by the planner; neither was run here",
        packages=(),
        assumed=ASSUMED,
        cases=rows,
    )
    for name, row in rows.items():
        ratios = sorted(found["ratio"] for found in (row["forecast"] or {}).values())
        print(f"{name}: published {row['published']['ratio']}, forecast {' - '.join(map(str, ratios)) or 'none'}")


if __name__ == "__main__":
    main()
