"""The four pages of curves: health, learning, speed, faults.

Guarantees:
1. every name of the catalogue, and every name of an open family, has exactly one page;
2. figures of evaluations keep their names, which are verl's (`val-core/`, `val-aux/`): `metric_tag`.
"""

from __future__ import annotations

from typing import Literal

Page = Literal["health", "learning", "speed", "faults"]
PAGES: tuple[Page, ...] = ("health", "learning", "speed", "faults")

HEALTH = frozenset({
    "version", "lag_mean", "lag_max", "bound_max", "groups", "ratio_max", "tis_capped_share", "ess", "ess_rows",
    "kl_behaviour", "logprob_gap_mean", "logprob_gap_max", "ratio_p01", "ratio_p50", "ratio_p99", "chi2_seq",
    "truncated_share", "zero_advantage_share", "issued_length_mean", "trained_length_mean", "dropped_length_mean",
    "length_bias", "issued", "leased", "unscored", "ready", "claimed", "trained", "retired", "outstanding",
    "engine_version", "swaps", "members_committed", "round",
    "turns", "tool_calls", "observed_share", "rows_mean", "router_replay_share", "waiting",
})  # fmt: skip
SPEED = frozenset({
    "wait_s", "fetch_s", "assemble_s", "proximal_s", "train_s", "publish_s", "publish_bytes", "delta_bytes", "delta_s",
    "commit_s", "checkpoint_s", "checkpoint_write_s", "step_s", "tokens_per_s", "tokens", "micro_batches",
    "model_flops", "tflops_per_device", "mfu", "mfu_step", "memory_bytes", "memory_peak_bytes", "busy_share",
    "generated_tokens", "generated_samples", "groups_in_flight", "samples_in_flight", "held_tokens", "kv_used",
    "live_slots", "swap_s", "scored_samples", "reward_call_s", "ingest_bytes", "round_s", "round_bytes",
    "carried_bytes", "saved_tokens", "call_s", "drafted_tokens", "accepted_drafts",
})  # fmt: skip
FAULTS = frozenset({
    "dropped", "dead", "over_bound_groups", "replayed", "checkpoint_failures", "refused_samples", "failed_rewards",
    "bad_frames", "duplicates", "discarded_checkpoints", "preempted_samples", "continued_samples", "members_left_out",
    "evaluation_failed", "evaluation_missing", "rejected_share", "malformed_calls", "failed_calls",
    "failed_episodes",
})  # fmt: skip


def metric_page(name: str) -> Page:
    """The page of a metric: health, speed and faults by the tables above; everything else is about learning."""
    last = name.rpartition("/")[2] if name.startswith(("lag/", "judge/")) else name
    if name in FAULTS or last in FAULTS:
        return "faults"
    if name in HEALTH or last in HEALTH or name.startswith(("lag/", "evaluation_")):
        return "health"
    return "speed" if last in SPEED else "learning"


def metric_tag(name: str, *, role: str = "") -> str:
    """Page and name: `health/lag_mean`; with the role if several processes report it: `speed/producer/busy_share`.

    >>> metric_tag("lag_max"), metric_tag("busy_share", role="producer"), metric_tag("val-core/add/acc/pass@4/mean")
    ('health/lag_max', 'speed/producer/busy_share', 'val-core/add/acc/pass@4/mean')
    """
    if name.startswith(("val-core/", "val-aux/")):
        return name
    return f"{metric_page(name)}/{role}/{name}" if role else f"{metric_page(name)}/{name}"


#: Charts of a page, most important first: title -> patterns of tags (TensorBoard's custom layout).
LAYOUT: dict[Page, dict[str, tuple[str, ...]]] = {
    "health": {
        "staleness (steps)": ("lag_mean", "lag_max", "bound_max"),
        "queue (groups)": ("leased", "unscored", "ready", "claimed", "outstanding"),
        "importance weights": ("ess", "ess_rows", "tis_capped_share"),
        "engine against learner (nats)": ("kl_behaviour", "logprob_gap_mean"),
        "samples cut or without a signal": ("truncated_share", "zero_advantage_share"),
        "do the short ones win": ("issued_length_mean", "trained_length_mean", "dropped_length_mean"),
    },
    "learning": {
        "reward": ("reward_mean", "reward_std"),
        "loss": ("loss", "value_loss"),
        "entropy (nats)": ("entropy",),
        "gradient": ("grad_norm", "critic_grad_norm"),
        "clipped": ("clip_share", "dual_clip_share"),
        "distance to the reference (nats)": ("kl_reference", "approx_kl"),
        "length (tokens)": ("response_length_mean", "response_length_max"),
    },
    "speed": {
        "where a step's time goes (s)": (
            "wait_s", "fetch_s", "assemble_s", "proximal_s", "train_s", "publish_s", "commit_s", "checkpoint_s",
        ),
        "step (s)": ("step_s",),
        "tokens trained per second": ("tokens_per_s",),
        "use of the devices": ("mfu", "mfu_step"),
        "memory (bytes)": ("memory_bytes", "memory_peak_bytes"),
    },
    "faults": {
        "groups that were not trained": ("dropped", "dead"),
        "over their bound": ("over_bound_groups",),
        "trained again, checkpoints not written": ("replayed", "checkpoint_failures"),
        "tokens rejected by the correction": ("rejected_share",),
    },
}  # fmt: skip
