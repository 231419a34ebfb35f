"""The catalogue of metrics: unit, role and meaning of every name that a metrics file may hold."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

#: Families of names: parts of the reward, judges, lags, numbers of attempts, figures of evaluations.
OPEN = ("reward/", "judge/", "lag/", "pass_at/", "val-core/", "val-aux/")


class Metric(NamedTuple):
    """Unit of a number, the role that writes it, and its meaning."""

    unit: str
    role: str
    meaning: str


CATALOGUE: dict[str, Metric] = {
    # learner, one line per step
    "step": Metric("1", "learner", "optimizer step (a batch of groups), counted from 1"),
    "version": Metric("1", "learner", "weight version after the step"),
    "reward_mean": Metric("1", "learner", "mean reward of the samples in the batch"),
    "reward_std": Metric("1", "learner", "standard deviation of these rewards"),
    "lag_mean": Metric("steps", "learner", "mean over groups of the version the step starts from minus the oldest"),
    "lag_max": Metric("steps", "learner", "largest lag in the batch"),
    "bound_max": Metric("steps", "learner", "largest bound of the groups in the batch"),
    "over_bound_groups": Metric("groups", "learner", "groups above their own bound (on_late = train only)"),
    "loss": Metric("1", "learner", "policy loss, aggregated over the batch"),
    "entropy": Metric("nats", "learner", "mean entropy of the policy over sampled tokens"),
    "entropy_coeff": Metric("1", "learner", "weight of the entropy bonus in the step"),
    "entropy_threshold": Metric("nats", "learner", "lowest entropy of a token in the policy loss (entropy_keep < 1)"),
    "entropy_kept_share": Metric("share", "learner", "trained tokens at or above it; more than entropy_keep by ties"),
    "grad_norm": Metric("1", "learner", "global gradient norm before clipping"),
    "loss_scale": Metric("1", "learner", "factor on the loss of the last update, against underflow (float16 alone)"),
    "grad_overflows": Metric(
        "1", "learner", "passes repeated at half the loss scale, as a gradient overflowed (float16)"
    ),
    "lr": Metric("1", "learner", "learning rate"),
    "value_loss": Metric("1", "learner", "clipped squared error of the critic, half of it, before its update"),
    "value_clip_share": Metric("share", "learner", "tokens whose value loss is the clipped one"),
    "value_mean": Metric("1", "learner", "mean value over trained tokens, at the start of the step"),
    "return_mean": Metric("1", "learner", "mean target of the critic over trained tokens"),
    "explained_variance": Metric("share", "learner", "variance of the returns that the values explain; 1 is perfect"),
    "critic_grad_norm": Metric("1", "learner", "the critic's global gradient norm before clipping"),
    "critic_lr": Metric("1", "learner", "learning rate of the critic"),
    "critic_alone": Metric("bool", "learner", "1 if the step trained only the critic (warm-up)"),
    "process_loss": Metric("1", "learner", "cross-entropy of the process reward model, before its update"),
    "process_accuracy": Metric("share", "learner", "samples that the process reward model judges as the outcome does"),
    "process_reward_mean": Metric("1", "learner", "mean process reward per token, beta times the log-ratio"),
    "process_grad_norm": Metric("1", "learner", "its global gradient norm before clipping"),
    "process_lr": Metric("1", "learner", "learning rate of the process reward model"),
    "pair_accuracy": Metric("share", "learner", "pairs whose chosen answer has the higher score (dpo, reward_model)"),
    "chosen_score": Metric("1", "learner", "mean score of chosen answers (dpo, kto: beta times the log-ratio)"),
    "rejected_score": Metric("1", "learner", "mean score of rejected answers"),
    "score_margin": Metric("1", "learner", "mean score of chosen less that of rejected answers"),
    "kto_kl": Metric("nats", "learner", "KL to the reference model per answer (mode kto), from prompts of other rows"),
    "clip_share": Metric("share", "learner", "tokens whose ratio was clipped"),
    "dual_clip_share": Metric("share", "learner", "tokens with a negative advantage whose loss the dual clip bounded"),
    "gated_share": Metric("share", "learner", "tokens whose gradient the gate of sapo or vespo changed by over 1 %"),
    "approx_kl": Metric("nats", "learner", "k1 estimate of KL(proximal || current) per token; 0 with one mini-batch"),
    "ratio_max": Metric("1", "learner", "largest exp(proximal - behaviour) before truncation"),
    "tis_capped_share": Metric("share", "learner", "tokens whose importance weight was truncated"),
    "ess": Metric("share", "learner", "effective sample size of the importance weights over tokens"),
    "kl_behaviour": Metric("nats", "learner", "k3 estimate of KL(behaviour || proximal) per token"),
    "logprob_gap_mean": Metric("nats", "learner", "mean |proximal - behaviour| per token"),
    "logprob_gap_max": Metric(
        "nats",
        "learner",
        "largest |proximal - behaviour|, rounded up by at most 14 % and to 1e-4 at least; "
        "lag/0/logprob_gap_*: the numerical difference of engine and learner",
    ),
    "ess_rows": Metric("share", "learner", "effective sample size of the rows' mean importance weights"),
    "ratio_p01": Metric("1", "learner", "1 % of the tokens have a ratio proximal / behaviour below this"),
    "ratio_p50": Metric("1", "learner", "median ratio proximal / behaviour"),
    "ratio_p99": Metric("1", "learner", "1 % of the tokens have a ratio above this"),
    "chi2_seq": Metric("1", "learner", "mean squared ratio of whole rows minus 1: variance of sequence weights"),
    "rejected_share": Metric("share", "learner", "tokens that the correction rejected"),
    "kl_reference": Metric("nats", "learner", "KL to the reference model per token, by the estimator in force"),
    "teacher_kl": Metric("nats", "learner", "mean log-prob of the policy minus that of the teacher, on sampled tokens"),
    "teacher_jsd": Metric(
        "nats", "learner", "divergence from the teacher per token, on its likeliest tokens (loss jsd)"
    ),
    "kl_coeff": Metric("1", "learner", "weight of the KL term in the step"),
    "overlong_share": Metric("share", "learner", "samples with a penalty for their length"),
    "lag/tokens_share": Metric(
        "share",
        "learner",
        "lag/<steps>/tokens_share: tokens of samples that old; likewise "
        "lag/<steps>/ of ess, kl_behaviour, clip_share, truncated_share, rejected_share, "
        "ratio_p01, ratio_p50, ratio_p99, logprob_gap_mean, logprob_gap_max",
    ),
    "reward/name": Metric(
        "1",
        "learner",
        "reward/<name>: mean of one reward function, before its weight, over the samples of the batch that it applies "
        "to (reward.data_sources)",
    ),
    "pass_at/2": Metric(
        "share",
        "learner",
        "pass_at/<k>, k = 2, 4, 8 .. up to the group's size: chance that one of k samples of a prompt is right (above "
        "shaping.correct_above)",
    ),
    "zero_advantage_share": Metric("share", "learner", "groups whose samples all have the same reward"),
    "tokens": Metric("tokens", "learner", "response tokens trained"),
    "response_length_mean": Metric("tokens", "learner", "mean response length"),
    "response_length_max": Metric("tokens", "learner", "longest response"),
    "issued_length_mean": Metric("tokens", "buffer", "mean length of samples since the buffer started"),
    "trained_length_mean": Metric("tokens", "buffer", "mean length of trained samples"),
    "dropped_length_mean": Metric(
        "tokens", "buffer", "mean length of samples whose group was dropped, quarantined or made again"
    ),
    "length_bias": Metric("share", "buffer", "trained mean / issued mean - 1; below -0.1 the short ones win"),
    "truncated_share": Metric("share", "learner", "samples cut by max_new_tokens"),
    "router_replay_share": Metric(
        "share", "learner", "samples whose experts are replayed; the others have none, or several versions made them"
    ),
    "observed_share": Metric(
        "share", "learner", "tokens of the responses that the policy did not sample: observations"
    ),
    "rows_mean": Metric("1", "learner", "sequences per sample: above 1 where sessions have several conversations"),
    "groups": Metric("groups", "learner", "groups trained in the step"),
    "micro_batches": Metric("1", "learner", "packed rows of the step over all ranks"),
    "wait_s": Metric("s", "learner", "time the step waited for its batch to be ready"),
    "fetch_s": Metric("s", "learner", "time to read and check the payloads of the batch, after the buffer's answer"),
    "assemble_s": Metric("s", "learner", "time for advantages, rows and their way to the ranks"),
    "proximal_s": Metric(
        "s", "learner", "time in forward passes without gradient: proximal and reference log-probs, values; device time"
    ),
    "train_s": Metric("s", "learner", "time of the rest of the update: forward, backward, optimizer"),
    "publish_s": Metric("s", "learner", "time that gathering and copying out weights blocked the step"),
    "publish_bytes": Metric("bytes", "learner", "bytes of one copy of the weights, as last copied out"),
    "delta_bytes": Metric("bytes", "learner", "size of the last delta that was encoded; 0: dropped, or not needed"),
    "delta_s": Metric("s", "learner", "time to encode it, in the background"),
    "commit_s": Metric("s", "learner", "time to commit the step, and to write the records of the step before"),
    "checkpoint_s": Metric("s", "learner", "time blocked by the checkpoint after the step before"),
    "checkpoint_write_s": Metric("s", "learner", "time to write the newest durable checkpoint, blocked or not"),
    "checkpoint_failures": Metric(
        "1", "learner", "checkpoints in a row, before this step, that could not be written (a full disk)"
    ),
    "step_s": Metric(
        "s",
        "learner",
        "wall time of the step: wait + fetch + assemble + proximal + train + publish + commit + checkpoint",
    ),
    "model_flops": Metric(
        "1", "learner", "operations of all models' passes in the step, over all ranks, by the samples' own lengths"
    ),
    "tflops_per_device": Metric("TFLOP/s", "learner", "model_flops per device and second of proximal_s + train_s"),
    "mfu": Metric("share", "learner", "tflops_per_device of the device's peak (docs/profiling.md)"),
    "mfu_step": Metric("share", "learner", "the same over the whole step, waits included"),
    "memory_bytes": Metric(
        "bytes", "learner", "held by rank 0 after the step: its device's allocator, or the process on a CPU"
    ),
    "memory_peak_bytes": Metric("bytes", "learner", "the most that was held until now"),
    "tokens_per_s": Metric("tokens/s", "learner", "response tokens trained per second of the step"),
    "replayed": Metric("bool", "learner", "1 if the batch was a recorded one, after a restart"),
    # heartbeats of all workers
    "busy_share": Metric("share", "all", "share of the last interval spent working rather than waiting"),
    "generated_tokens": Metric("tokens", "producer", "tokens sampled since the start"),
    "generated_samples": Metric("samples", "producer", "samples finished since the start"),
    "groups_in_flight": Metric("groups", "producer", "groups leased and not complete"),
    "samples_in_flight": Metric("samples", "producer", "samples leased and not finished"),
    "held_tokens": Metric("tokens", "producer", "mean KV cache per sample in progress"),
    "kv_used": Metric("share", "producer", "used share of the engine's KV cache"),
    "preempted_samples": Metric("samples", "producer", "preempted because the KV cache was full, since the start"),
    "drafted_tokens": Metric("tokens", "producer", "draft tokens fed (producers.speculative_tokens), since the start"),
    "accepted_drafts": Metric("tokens", "producer", "draft tokens that came true, since the start"),
    "live_slots": Metric("samples", "producer", "samples being decoded now"),
    "engine_version": Metric("1", "producer", "version of the weights in the engine"),
    "swaps": Metric("1", "producer", "weight versions taken since the start"),
    "swap_s": Metric("s", "producer", "pause of the engine for the last swap"),
    "refused_samples": Metric("samples", "producer", "samples the buffer refused since the start"),
    "continued_samples": Metric("samples", "producer", "partial samples of other producers, finished since the start"),
    "turns": Metric("turns", "producer", "turns of the policy since the start, in environments of several turns"),
    "tool_calls": Metric("calls", "producer", "tool calls that the policy wrote, since the start"),
    "malformed_calls": Metric("calls", "producer", "tool calls that could not be read, since the start"),
    "failed_calls": Metric("calls", "producer", "tool calls in which the tool's own code raised, since the start"),
    "failed_episodes": Metric("samples", "producer", "samples whose environment failed, since the start"),
    "saved_tokens": Metric("tokens", "producer", "tokens of these that were not generated again"),
    "scored_samples": Metric("samples", "reward", "samples scored since the start"),
    "failed_rewards": Metric("1", "reward", "reward calls that failed since the start"),
    "reward_call_s": Metric("s", "reward", "mean time of a call in the last interval"),
    # buffer, one line per committed step and per second
    "issued": Metric("groups", "buffer", "prompts ever issued"),
    "leased": Metric("groups", "buffer", "being generated"),
    "unscored": Metric("groups", "buffer", "complete, waiting for scores"),
    "ready": Metric("groups", "buffer", "scored, waiting for the learner"),
    "claimed": Metric("groups", "buffer", "in the step being trained"),
    "trained": Metric("groups", "buffer", "trained, not yet in a durable checkpoint"),
    "retired": Metric("groups", "buffer", "trained and in a durable checkpoint"),
    "dropped": Metric("groups", "buffer", "dropped, all reasons"),
    "dead": Metric("groups", "buffer", "quarantined, all reasons"),
    "outstanding": Metric("groups", "buffer", "leased + unscored + ready + claimed"),
    "ingest_bytes": Metric("bytes", "buffer", "payload bytes accepted since the start"),
    "bad_frames": Metric("1", "buffer", "frames refused since the start"),
    "duplicates": Metric("samples", "buffer", "samples acknowledged a second time since the start"),
    "discarded_checkpoints": Metric("samples", "buffer", "partial samples that were not continued, since the start"),
    "judge/default/waiting": Metric(
        "samples",
        "buffer",
        "judge/<name>/waiting: samples that wait for a worker of this judge, likewise "
        "leased: with one of its workers; scored, late (of these, after their lease had expired), failures and refused "
        "(of a group that ended, or a second answer): since the service started",
    ),
    "judge/default/call_s": Metric("s", "buffer", "mean time of a call of its living workers in their last interval"),
    # buffer, one line per evaluation (metrics/evaluation.jsonl)
    "evaluation_prompts": Metric("prompts", "buffer", "held-out prompts of the evaluation: scored + failed + missing"),
    "evaluation_scored": Metric(
        "prompts", "buffer", "prompts with all samples scored: only these count in the figures"
    ),
    "evaluation_failed": Metric("prompts", "buffer", "prompts that could not be scored; the same line has the reasons"),
    "evaluation_missing": Metric("prompts", "buffer", "prompts without a result when the evaluation ended"),
    "evaluation_samples": Metric("samples", "buffer", "samples per prompt, k"),
    "evaluation_s": Metric("s", "buffer", "duration of the evaluation"),
    "evaluation_version": Metric("1", "buffer", "version of the weights that was measured; -1: none was"),
    "evaluation_version_min": Metric("1", "buffer", "oldest version that made a scored sample: the measured one"),
    "evaluation_version_max": Metric("1", "buffer", "newest version that made a scored sample: the measured one"),
    "evaluation_refused": Metric("samples", "buffer", "refused because another version made tokens of them"),
    "evaluation_restarts": Metric("1", "buffer", "times that it began again because its version was lost"),
    "evaluation_skipped": Metric("1", "buffer", "evaluations of the run so far that came due and never began"),
    "evaluation_length_mean": Metric("tokens", "buffer", "mean length of the scored samples"),
    "evaluation_truncated_share": Metric("share", "buffer", "scored samples cut by evaluation.max_new_tokens"),
    "val-core/mean": Metric(
        "1",
        "buffer",
        "val-core/<data source>/reward/mean@k, best@k/mean, maj@k/mean and val-core/<data source>/acc/pass@k/mean: "
        "figures over the scored prompts of an evaluation, k samples each (docs/evaluation.md)",
    ),
    "val-aux/mean": Metric(
        "1", "buffer", "the same for smaller n, parts of the reward, and /se: standard errors over prompts"
    ),
    # weight sync, one line per round
    "round": Metric("1", "weightsync", "round number"),
    "round_s": Metric("s", "weightsync", "from publish to the last acknowledgement"),
    "round_bytes": Metric("bytes", "weightsync", "bytes of one copy of the weights"),
    "carried_bytes": Metric("bytes", "weightsync", "bytes of the transfers that arrived whole, over all generators"),
    "members_committed": Metric("1", "weightsync", "generators that acknowledged the version with its digest"),
    "members_left_out": Metric("1", "weightsync", "generators that missed the deadline"),
}
NUMBERS = frozenset({"t", "step", *CATALOGUE})  # these are always numbers in a line of metrics
#: Metrics files of a run; in other files (history, samples, groups) the same names may have other meanings.
SERIES = frozenset(f"metrics/{name}.jsonl" for name in ("learner", "buffer", "roles", "weightsync"))


def is_series(path: Path) -> bool:
    """Whether the lines of this file are metrics."""
    return "/".join(path.parts[-2:]) in SERIES
