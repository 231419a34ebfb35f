"""One line of advice about a run: rules, the most urgent first.

Guarantees:
1. each rule is a pure function of a snapshot: a sentence with its numbers and a remedy, or nothing;
2. the order of `RULES` is their urgency; the first rule that applies gives the advice;
3. a rule without its numbers gives none. docs/top.md lists every rule by its first line (a test checks that).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.config.sections.algorithm_catalogue import OLD_STEPS
from asyncrl.monitor.snapshot import Row, Snapshot

WAITS = 0.3  # share of time above which waiting is worth advice
LATE_SHARE = 0.1  # of issued groups
FLAT_SHARE = 0.7
CUT_SHARE = 0.3
GAP = 0.05  # nats per token at lag 0
LOW_ESS = 0.5
BIAS = -0.1
SYNC_SHARE = 0.2
FULL_KV = 0.9
FEW_STEPS = 5


def the_run_failed(s: Snapshot) -> str:
    """The run has ended with an error."""
    if not s.ended or not s.exit_code:
        return ""
    return (
        f"the run ended with code {s.exit_code} ({s.ended}): `asyncrl report` shows the faults; the same launch resumes"
    )


def the_run_is_complete(s: Snapshot) -> str:
    """The run is over."""
    return f"the run is over ({s.ended}): `asyncrl report {s.folder}` shows it" if s.ended else ""


def the_buffer_ends_the_run(s: Snapshot) -> str:
    """The buffer has ended the run."""
    return f"the buffer ends the run: {s.fault}" if s.fault else ""


def the_buffer_is_silent(s: Snapshot) -> str:
    """The buffer does not answer, and the run has not ended."""
    if not s.silent:
        return ""
    how = "its launcher restarts it; see logs/buffer.log" if s.launchers else "start the run again: it resumes"
    return f"the buffer does not answer ({s.silent}): {how}"


def a_process_is_stopped(s: Snapshot) -> str:
    """A process is stopped by a signal or a debugger."""
    everybody = [(one.name, one.state, str(one.pid)) for one in (*s.producers, *s.rewards)]
    for name, state, pid in [*everybody, (s.learner.name, s.learner.state, "PID")]:
        if state and state in "Tt":
            return f"{name} is stopped (state {state}): wake it (kill -CONT {pid}), or kill it and others take its work"
    return ""


def a_process_is_silent(s: Snapshot) -> str:
    """A process is silent for longer than run.silent_timeout_s."""
    if s.ended or s.silent:
        return ""
    quiet = [one for one in (*s.producers, *s.rewards) if one.seen_s >= s.silent_timeout_s and one.state != "ended"]
    if not quiet:
        return ""
    one = quiet[0]
    return f"{one.name} (pid {one.pid} on {one.host}) is silent for {one.seen_s:.0f} s: see logs/{one.name}.log"


def checkpoints_fail(s: Snapshot) -> str:
    """The learner cannot write its checkpoints."""
    failed = s.newest("checkpoint_failures") or 0
    return f"{failed:.0f} checkpoints in a row could not be written: free space on the run's disk" if failed else ""


def a_process_keeps_ending(s: Snapshot) -> str:
    """A process has recently ended with an error three times."""
    exits = [event for event in s.troubles if event.what == "exit"]
    for name in sorted({event.text.split(" ")[0] for event in exits}):
        mine = [event for event in exits if event.text.split(" ")[0] == name]
        if len(mine) >= 3:
            return f"{name} ended {len(mine)} times lately (last: {mine[0].text}): see logs/{name}.log"
    return ""


def nobody_generates(s: Snapshot) -> str:
    """No producer is connected."""
    if s.ended or not s.live or s.producers:
        return ""
    return "no producer is there: asyncrl launch producers CONFIG.toml --connect URL, from any machine"


def nobody_scores(s: Snapshot) -> str:
    """Samples wait for scores, and no reward worker is connected."""
    waiting = s.queue.get("unscored", 0)
    if s.ended or not s.live or s.rewards or not waiting:
        return ""
    return f"{waiting} groups wait for scores and no reward worker is there: asyncrl launch rewards CONFIG.toml"


def weights_do_not_arrive(s: Snapshot) -> str:
    """A generator does not receive its weights."""
    for name, member in sorted(s.members.items()):
        reason = member.why or member.said
        behind = s.version - member.version
        if member.state in ("stale", "dead") and behind > 1 and reason:
            return f"{name} holds version {member.version} of {s.version} ({member.state}): {reason}"
    if s.sync_error:
        return f"the weight sync does not answer ({s.sync_error}): see logs/weightsync.log"
    return ""


def groups_die(s: Snapshot) -> str:
    """Groups were quarantined."""
    count = s.queue.get("dead", 0)
    why = ", ".join(f"{reason} {number}" for reason, number in sorted(s.dead.items(), key=lambda pair: -pair[1])[:2])
    return f"{count} groups are dead{f' ({why})' if why else ''}: asyncrl trace RUN GROUP tells why" if count else ""


def rewards_fail(s: Snapshot) -> str:
    """Reward calls fail."""
    failed = sum(one.stat("failed_rewards") or 0 for one in s.rewards)
    scored = sum(one.stat("scored_samples") or 0 for one in s.rewards)
    if not failed or failed < 0.01 * scored:
        return ""
    return f"{failed:.0f} reward calls failed ({scored:.0f} samples scored): see logs/{s.rewards[0].name}.log"


def a_judge_is_missing(s: Snapshot) -> str:
    """Samples wait for a judge without a connected worker."""
    for one in s.judges:
        if not s.ended and one.waiting and not one.workers:
            return f"{one.waiting} samples wait for judge {one.judge} and none of its workers is there: start one"
    return ""


def scores_are_late(s: Snapshot) -> str:
    """More than half of the groups in flight wait for scores."""
    waiting = s.queue.get("unscored", 0)
    if s.ended or not s.rewards or waiting <= max(1, s.outstanding / 2):
        return ""
    return (
        f"{waiting} of {s.outstanding} groups under way wait for scores: raise reward_workers.count ({len(s.rewards)})"
    )


def much_is_too_old(s: Snapshot) -> str:
    """A tenth of the issued groups was dropped as too old."""
    late, issued = sum(number for why, number in s.dropped.items() if why.startswith("late")), s.queue.get("issued", 0)
    if not issued or late < LATE_SHARE * issued:
        return ""
    raise_ = f"raise max_staleness ({s.max_staleness}) or lower pipeline_depth"
    return f"{late / issued:.0%} of the groups came too late: {raise_}"


def the_learner_waits(s: Snapshot) -> str:
    """The learner waits for batches while producers work."""
    waits, busy = s.learner.waiting, _mean_busy(s.producers)
    if s.ended or waits is None or waits < WAITS or (busy is not None and busy < 0.6):
        return ""
    return (
        f"the learner waits {waits:.0%} of the time: add producers ({len(s.producers)} now), or raise producers.slots"
    )


def the_pipeline_is_shallow(s: Snapshot) -> str:
    """Learner and producers wait for each other: the limit on groups in flight is too low."""
    waits, busy = s.learner.waiting, _mean_busy(s.producers)
    if s.ended or waits is None or waits < WAITS or busy is None or busy >= 0.6:
        return ""
    deep = s.depth >= s.max_staleness >= 0
    what = f"max_staleness ({s.max_staleness})" if deep else f"pipeline_depth ({s.depth})"
    return f"learner ({waits:.0%}) and producers ({1 - busy:.0%}) wait for each other: raise {what}"


def updates_are_skipped(s: Snapshot) -> str:
    """Numbers of the newest step are not finite."""
    skipped = s.lines[-1].get("skipped") if s.lines else None
    if not skipped:
        return ""
    return f"step {s.step}: {', '.join(map(str, skipped))} not finite: lower learner.optim.lr; see logs/learner.log"


def engine_and_learner_differ(s: Snapshot) -> str:
    """Engine and learner compute different log-probs with the same weights."""
    gap = s.recent("lag/0/logprob_gap_mean")
    if gap is None or gap < GAP:
        return ""
    return f"engine and learner differ by {gap:.2g} nats per token under the same weights: docs/engines.md"


def samples_are_old(s: Snapshot) -> str:
    """Samples are four steps old or more, with weights of single tokens."""
    lag = s.recent("lag_mean")
    if s.ended or lag is None or lag < OLD_STEPS or len(s.lines) < FEW_STEPS or s.weight_level != "token":
        return ""
    return (
        f"samples are {lag:.1f} steps old: lower max_staleness ({s.max_staleness}), or, for answers of up to a few "
        "hundred tokens, weigh whole responses: docs/tune-staleness.md"
    )


def weights_count_for_little(s: Snapshot) -> str:
    """The effective sample size is below half of the samples, without weights of whole responses."""
    ess = s.recent("ess")
    # Weights of whole responses vary more, and learn more from old samples all the same (docs/learning.md).
    if ess is None or ess >= LOW_ESS or len(s.lines) < FEW_STEPS or s.weight_level == "sequence":
        return ""
    return f"the effective sample size is {ess:.2f}: the data is too old, lower max_staleness ({s.max_staleness})"


def nothing_to_learn(s: Snapshot) -> str:
    """Most groups have the same reward for all samples."""
    flat = s.recent("zero_advantage_share")
    if flat is None or flat < FLAT_SHARE or len(s.lines) < FEW_STEPS:
        return ""
    reward = s.recent("reward_mean") or 0.0
    return f"{flat:.0%} of the groups have no signal (reward {reward:.2f}): take prompts that are harder, or easier"


def answers_are_cut(s: Snapshot) -> str:
    """Many samples end at max_new_tokens."""
    cut = s.recent("truncated_share")
    if cut is None or cut < CUT_SHARE:
        return ""
    return f"{cut:.0%} of the samples are cut: raise sampling.max_new_tokens, or penalise length (shaping)"


def short_answers_win(s: Snapshot) -> str:
    """Trained samples are shorter than generated samples."""
    bias = s.recent("length_bias")
    if bias is None or bias > BIAS or len(s.lines) < FEW_STEPS:
        return ""
    return f"trained samples are {-bias:.0%} shorter than those made: long ones come too late, raise max_staleness"


def memory_is_short(s: Snapshot) -> str:
    """An engine is preempting: its KV cache is too small."""
    for one in s.producers:
        thrown = one.stat("preempted_samples") or 0
        if thrown and (one.stat("kv_used") or 0) > FULL_KV:
            return f"{one.name} has preempted {thrown:.0f} samples (KV cache full): lower producers.slots ({s.slots})"
    return ""


def weights_take_long(s: Snapshot) -> str:
    """Weights, commits and checkpoints take a fifth of the learner's time."""
    other = s.learner.other
    if s.ended or other is None or other < SYNC_SHARE:
        return ""
    what = "weightsync.encoding, learner.checkpoint_every"
    return f"publishing and checkpoints take {other:.0%} of the learner's time: see {what}"


def producers_wait(s: Snapshot) -> str:
    """Producers wait for work: the learner is the bottleneck."""
    busy = _mean_busy(s.producers)
    if s.ended or busy is None or busy >= 0.5 or (s.learner.waiting or 0.0) >= WAITS:
        return ""
    return f"producers wait {1 - busy:.0%} of the time: the learner is the slow part, give it the devices"


def all_is_well(s: Snapshot) -> str:
    """Nothing to do."""
    if s.learner.waiting is None:
        return "the first step is still to come"
    return f"nothing to do: the learner waits {s.learner.waiting:.0%} of the time"


RULES: Sequence[Callable[[Snapshot], str]] = (
    the_run_failed, the_run_is_complete, the_buffer_ends_the_run, the_buffer_is_silent, checkpoints_fail,
    a_process_is_stopped, a_process_is_silent, a_process_keeps_ending, nobody_generates, nobody_scores,
    a_judge_is_missing, weights_do_not_arrive, updates_are_skipped, rewards_fail, groups_die, much_is_too_old,
    scores_are_late, engine_and_learner_differ, memory_is_short, the_learner_waits, the_pipeline_is_shallow,
    weights_count_for_little, samples_are_old, nothing_to_learn, answers_are_cut, short_answers_win, weights_take_long,
    producers_wait, all_is_well,
)  # fmt: skip


def advice(s: Snapshot) -> str:
    """The most urgent sentence."""
    return next(filter(None, (rule(s) for rule in RULES)), "")


def _mean_busy(rows: Sequence[Row]) -> float | None:
    known = [one.busy for one in rows if one.busy is not None]
    return sum(known) / len(known) if known else None
