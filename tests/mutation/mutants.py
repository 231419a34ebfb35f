"""Wrong edits of the product that the short suite must catch, each with the test files that are expected to fail.

The wrong rules of the buffer, the weight sync and the simulator are injected as parts and caught by their own tests
(`tests/model`, `tests/simulator`). These are the rest: transports, engines, learners, stores, launcher, network.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """Replace `old` by `new` in `file`; one of `tests` must fail. `old` stands exactly once in the file."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LOSSES = ("tests/unit/test_losses.py", "tests/unit/test_reference_cases.py")
ESTIMATES = ("tests/unit/test_advantages.py", "tests/unit/test_reference_cases.py")

MUTANTS = (
    Mutant(
        "receiver.digest_ignored",
        "weightsync/receiver/transfer.py",
        "        if held != self._manifest.bucket_digests[number]:",
        "        if held is None:",
        ("tests/contract/test_receiver.py",),
    ),
    Mutant(
        "plan.not_aligned",
        "weightsync/plan/buckets.py",
        "offset = sizes[-1] + -sizes[-1] % ITEM_BYTES[spec.dtype] if sizes else 0",
        "offset = sizes[-1] if sizes else 0",
        ("tests/unit/test_weight_plan.py", "tests/unit/test_delta.py"),
    ),
    Mutant(
        "plan.bucket_too_large",
        "weightsync/plan/buckets.py",
        "offset + spec.nbytes > bucket_bytes",
        "offset > bucket_bytes",
        ("tests/unit/test_weight_plan.py",),
    ),
    Mutant(
        "plan.slots_not_aligned",
        "weightsync/plan/buckets.py",
        "end += size + -size % ALIGNMENT",
        "end += size",
        ("tests/unit/test_weight_plan.py", "tests/unit/test_staging.py"),
    ),
    Mutant(
        "delta.overlap_accepted",
        "weightsync/encoding/delta.py",
        "        if start < end or stop > nbytes:",
        "        if stop > nbytes:",
        ("tests/unit/test_delta.py",),
    ),
    Mutant(
        "hf.logprobs_without_temperature",
        "producers/engines/hf/sampling.py",
        "    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]",
        "    return tokens[:, 0], torch.log_softmax(logits.float(), dim=-1).gather(1, tokens)[:, 0]",
        ("tests/unit/test_slot_sampler.py", "tests/contract/test_engines.py"),
    ),
    Mutant(
        "hf.top_k_off_by_one",
        "producers/engines/hf/sampling.py",
        "(ranks < top_k[:, None])",
        "(ranks <= top_k[:, None])",
        ("tests/unit/test_slot_sampler.py", "tests/contract/test_engines.py"),
    ),
    Mutant(
        "hf.nucleus_without_its_first_token",
        "producers/engines/hf/sampling.py",
        "(before < top_p[:, None])",
        "(share < top_p[:, None])",
        ("tests/unit/test_slot_sampler.py", "tests/contract/test_engines.py"),
    ),
    Mutant(
        "batch.row_over_the_limit",
        "learners/batch/micro_batches.py",
        "return spread if max(loads, default=0) <= limit else rows",
        "return spread",
        ("tests/unit/test_batch.py",),
    ),
    Mutant(
        "batch.padded_over_the_limit",
        "learners/batch/micro_batches.py",
        "(len(batches[-1]) + 1) * lengths[batches[-1][0]] > limit",
        "len(batches[-1]) * lengths[batches[-1][0]] > limit",
        ("tests/unit/test_batch.py",),
    ),
    Mutant(
        "loss.optimistic_clip",
        "learners/algorithms/loss_terms.py",
        "return torch.maximum(plain, clipped), clipped > plain",
        "return torch.minimum(plain, clipped), clipped > plain",
        LOSSES,
    ),
    Mutant(
        "loss.gradient_through_advantages",
        "learners/algorithms/loss_terms.py",
        "return masked(inputs.advantages.detach(), inputs.mask)",
        "return masked(inputs.advantages, inputs.mask)",
        LOSSES,
    ),
    Mutant(
        "loss.ranks_ignored",
        "learners/algorithms/aggregation.py",
        "return values.sum() * ranks / _denominator",
        "return values.sum() / _denominator",
        ("tests/unit/test_algorithms.py", "tests/unit/test_losses.py", "tests/unit/test_reference_cases.py"),
    ),
    Mutant(
        "advantage.no_baseline",
        "learners/algorithms/advantages.py",
        "rows.centred(scores) * sizes / (sizes - 1).clamp(min=1)",
        "rows.centred(scores) * sizes / sizes.clamp(min=1)",
        ESTIMATES,
    ),
    Mutant(
        "gae.adaptive_lambda_sign",
        "learners/algorithms/gae.py",
        "(1 - 1 / (alpha * lengths.clamp(min=1))).clamp(0, 1)",
        "(1 / (alpha * lengths.clamp(min=1))).clamp(0, 1)",
        ("tests/unit/test_gae.py", "tests/unit/test_reference_cases.py"),
    ),
    Mutant(
        "correction.ratio_not_clamped",
        "learners/algorithms/tensors.py",
        "return (masked(new, mask) - masked(old, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)",
        "return masked(new, mask) - masked(old, mask)",
        ("tests/unit/test_corrections.py", *LOSSES),
    ),
    Mutant(
        "logprobs.temperature_ignored",
        "learners/models/logprobs.py",
        "return logits if temperature == 1.0 else logits / temperature",
        "return logits",
        ("tests/unit/test_logprobs.py",),
    ),
    Mutant(
        "schedule.warm_up_from_zero",
        "learners/step/lr_schedule.py",
        "return optim.lr * step / optim.warmup_steps",
        "return optim.lr * (step - 1) / optim.warmup_steps",
        ("tests/unit/test_learner_loop.py",),
    ),
    Mutant(
        "checkpoint.damage_accepted",
        "learners/checkpoints/checkpoint.py",
        "            if _entry(folder / name) != entry:",
        "            if not (folder / name).exists():",
        ("tests/unit/test_export.py",),
    ),
    Mutant(
        "checkpoint.fence_skipped",
        "learners/checkpoints/checkpoint.py",
        "    fence()\n    if target.exists()",
        "    if target.exists()",
        ("tests/unit/test_asynchronous_checkpoints.py",),
    ),
    Mutant(
        "segments.checksum_ignored",
        "buffers/payloads/segments.py",
        " or checksum_of(header, payload) != record.checksum:",
        ":",
        ("tests/unit/test_segments.py",),
    ),
    Mutant(
        "sqlite.fence_ignored",
        "buffers/stores/sqlite.py",
        "        if found is None or found[0] != self._epoch:",
        "        if found is None:",
        ("tests/contract/test_stores.py",),
    ),
    Mutant(
        "redis.second_write_of_a_retry",
        "buffers/stores/apply.lua",
        "  if seq == ARGV[3] then return 'done' end\n",
        "",
        ("tests/contract/test_stores.py",),
    ),
    Mutant(
        "redis.fence_ignored",
        "buffers/stores/apply.lua",
        "if epoch > mine then return 'fenced' end\n",
        "",
        ("tests/contract/test_stores.py",),
    ),
    Mutant(
        "permissions.join_key_may_publish",
        "asyncrl/net/permissions.py",
        "        wire.Publish,\n",
        "",
        ("tests/security/test_keys.py", "tests/security/test_other_host.py"),
    ),
    Mutant(
        "rewards.weights_ignored",
        "producers/rewards/child.py",
        "reward += spec.weight * outcome.value",
        "reward += outcome.value",
        ("tests/unit/test_rewards_child.py", "tests/unit/test_rewards.py", "tests/unit/test_scorers.py"),
    ),
    Mutant(
        "rewards.failure_becomes_zero",
        "producers/rewards/child.py",
        "                return Result(place, reason=outcome.reason, detail=outcome.detail)",
        "                continue",
        ("tests/unit/test_rewards_child.py", "tests/unit/test_rewards.py"),
    ),
    Mutant(
        "launcher.restarts_without_end",
        "asyncrl/launcher/supervisor.py",
        "if code in FINAL_EXIT_CODES or len(child.restarted) >= child.plan.restarts:",
        "if code in FINAL_EXIT_CODES:",
        ("tests/unit/test_supervise.py",),
    ),
    Mutant(
        "launcher.restarts_a_final_code",
        "asyncrl/launcher/supervisor.py",
        "if code in FINAL_EXIT_CODES or len(child.restarted) >= child.plan.restarts:",
        "if len(child.restarted) >= child.plan.restarts:",
        ("tests/unit/test_supervise.py",),
    ),
    Mutant(
        "liveness.stopped_process_not_silent",
        "asyncrl/launcher/liveness_watch.py",
        "if state and state in STOPPED:",
        "if False:",
        ("tests/unit/test_silence.py", "tests/unit/test_supervise.py"),
    ),
    Mutant(
        "evaluation.pass_at_k",
        "asyncrl/evaluation/statistics.py",
        "return 1 - math.comb(n - c, k) / math.comb(n, k)",
        "return 1 - (1 - c / n) ** k",
        ("tests/unit/test_evaluation_figures.py",),
    ),
)
