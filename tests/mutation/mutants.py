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
        "    drawn = logprobs.gather(1, tokens)[:, 0]",
        "    drawn = torch.log_softmax(logits.float(), dim=-1).gather(1, tokens)[:, 0]",
        ("tests/unit/test_slot_sampler.py", "tests/contract/test_engines.py"),
    ),
    Mutant(
        "hf.top_k_off_by_one",
        "producers/engines/hf/sampling.py",
        "(ranks < top_k)",
        "(ranks <= top_k)",
        ("tests/unit/test_slot_sampler.py", "tests/contract/test_engines.py"),
    ),
    Mutant(
        "hf.logprobs_over_all_with_a_support",
        "producers/engines/hf/sampling.py",
        "        drawn = torch.where(exact & ~kept.all(-1), over, drawn)",
        "        drawn = torch.where(exact & ~kept.all(-1), drawn, drawn)",
        ("tests/engines/test_engine_contract.py",),
    ),
    Mutant(
        "support.of_the_likeliest_alone",
        "learners/models/support.py",
        "    total = torch.where(cut, sum_rows(weights, part, split), 1.0)",
        "    total = torch.where(cut, 1.0, 1.0)",
        ("tests/unit/test_supports.py",),
    ),
    Mutant(
        "validation.token_outside_its_support",
        "asyncrl/wire/support.py",
        "        if not np.array_equal(held, cut):",
        "        if False:",
        ("tests/unit/test_supports.py",),
    ),
    Mutant(
        "hf.nucleus_without_its_first_token",
        "producers/engines/hf/sampling.py",
        "(before < top_p)",
        "(share < top_p)",
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
        "learners/algorithms/corrections.py",
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
        "permissions.producers_may_publish",
        "asyncrl/net/auth.py",
        "    wire.Publish: _OWNER,\n",
        "    wire.Publish: _PRODUCERS,\n",
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
    Mutant(
        "wire.checksum_ignored",
        "asyncrl/wire/codec.py",
        "    if checksum ^ xxhash.xxh3_64_intdigest(memoryview(frames[0])[: _HEAD.size]) != check:",
        "    if not checksum:",
        (
            "tests/unit/test_wire.py",
            "tests/unit/test_sockets.py",
        ),
    ),
    Mutant(
        "wire.other_schema_accepted",
        "asyncrl/wire/codec.py",
        "    if schema != SCHEMA:",
        "    if not schema:",
        ("tests/unit/test_wire.py",),
    ),
    Mutant(
        "wire.size_not_limited",
        "asyncrl/wire/codec.py",
        "header_bytes > MAX_HEADER_BYTES or payload_bytes > max_bytes",
        "header_bytes > MAX_HEADER_BYTES",
        ("tests/unit/test_wire.py",),
    ),
    Mutant(
        "audit.bound_ignored",
        "asyncrl/audit/verdict.py",
        "                if lag > max(group.bound, 0):",
        "                if lag > max(group.bound, 99):",
        ("tests/unit/test_audit.py",),
    ),
    Mutant(
        "audit.step_left_out",
        "asyncrl/audit/verdict.py",
        "            if step != before + 1:  #",
        "            if step < before + 1:  #",
        (
            "tests/unit/test_audit.py",
            "tests/unit/test_audit_order.py",
        ),
    ),
    Mutant(
        "audit.tokens_without_version",
        "asyncrl/audit/group_reader.py",
        "        if covered != length:",
        "        if covered > length:",
        (
            "tests/unit/test_audit.py",
            "tests/unit/test_audit_order.py",
        ),
    ),
    Mutant(
        "audit.digest_not_compared",
        "asyncrl/audit/verdict.py",
        "                        if digest and digest in right:",
        "                        if digest:",
        ("tests/unit/test_audit.py",),
    ),
    Mutant(
        "kl.k3_of_the_other_direction",
        "learners/algorithms/kl.py",
        "    return (torch.expm1(-close) + close).clamp",
        "    return (torch.expm1(close) - close).clamp",
        (
            "tests/unit/test_divergence.py",
            "tests/unit/test_reference_cases.py",
        ),
    ),
    Mutant(
        "kl.gradient_through_the_reference",
        "learners/algorithms/kl.py",
        "    delta = masked(log_probs, valid) - masked(reference.detach(), valid)",
        "    delta = masked(log_probs, valid) - masked(reference, valid)",
        (
            "tests/unit/test_divergence.py",
            "tests/unit/test_reference_cases.py",
        ),
    ),
    Mutant(
        "loss.rows_weighted_by_length",
        "learners/algorithms/aggregation.py",
        '    if mode == "seq-mean-token-mean":',
        '    if mode == "seq-mean":',
        (
            "tests/unit/test_losses.py",
            "tests/unit/test_reference_cases.py",
        ),
    ),
    Mutant(
        "preference.pair_reversed",
        "learners/algorithms/preference.py",
        "    apart = good - bad\n    if kind",
        "    apart = bad - good\n    if kind",
        (
            "tests/unit/test_preference.py",
            "tests/unit/test_reference_cases.py",
        ),
    ),
    Mutant(
        "rejection.upper_bound_ignored",
        "learners/algorithms/rejection.py",
        "keep & (values >= low) & (values <= high)",
        "keep & (values >= low)",
        (
            "tests/unit/test_corrections.py",
            "tests/unit/test_reference_cases.py",
        ),
    ),
    Mutant(
        "staleness.off_by_one",
        "learners/algorithms/staleness.py",
        "torch.where(mask, current_version - versions, 0)",
        "torch.where(mask, current_version - versions - 1, 0)",
        (
            "tests/unit/test_reference_cases.py",
            "tests/unit/test_lag_metrics.py",
        ),
    ),
    Mutant(
        "critic.clip_is_a_minimum",
        "learners/algorithms/values.py",
        "torch.maximum(error, clipped)",
        "torch.minimum(error, clipped)",
        (
            "tests/unit/test_losses.py",
            "tests/unit/test_reference_cases.py",
        ),
    ),
    Mutant(
        "bad_groups.second_half_not_searched",
        "learners/batch/bad_groups.py",
        "    for half in (groups[:middle], groups[middle:]):",
        "    for half in (groups[:middle],):",
        ("tests/unit/test_trial.py",),
    ),
    Mutant(
        "learner.gradients_not_clipped",
        "learners/backends/fsdp2/mesh.py",
        "    if norm > max_norm:",
        "    if norm < 0:",
        (
            "tests/distributed/test_fsdp2.py",
            "tests/distributed/test_backend_contract.py",
        ),
    ),
    Mutant(
        "buffer.restored_store_trusted",
        "buffers/main.py",
        "    if history.went_back or (history.found and not opened.rows):",
        "    if history.found and not opened.rows:",
        ("tests/contract/test_buffer_service.py",),
    ),
    Mutant(
        "history.lines_repeated",
        "buffers/service/event_log.py",
        "        if not self.went_back:",
        "        if last:",
        ("tests/unit/test_history.py",),
    ),
    Mutant(
        "history.unsealed_lines_forgotten",
        "buffers/service/event_log.py",
        "self._chain.add(data[end if place >= 0 else 0 :])",
        "self._chain.add(data[len(data) :])",
        ("tests/unit/test_history_chain.py",),
    ),
    Mutant(
        "audit.kept_heads_not_looked_for",
        "asyncrl/audit/chain.py",
        "            if anchor.head in gone:",
        "            if anchor.head in gone - self._missing:",
        ("tests/unit/test_history_chain.py",),
    ),
    Mutant(
        "audit.order_within_a_group_ignored",
        "asyncrl/audit/group_reader.py",
        "        if index not in group.lengths and group.forgot in (0, life):",
        "        if index not in group.lengths and group.forgot < 0:",
        ("tests/simulator/test_falsified_histories.py",),
    ),
    Mutant(
        "children.secrets_inherited",
        "asyncrl/runtime/child_environment.py",
        "name.startswith(PREFIXES) and SECRET.search(name) is None",
        "name.startswith(PREFIXES)",
        ("tests/unit/test_child_environment.py",),
    ),
    Mutant(
        "evaluation.older_weights_accepted",
        "buffers/evaluation/work.py",
        'if oldest < step else ""',
        'if oldest < 0 else ""',
        (
            "tests/unit/test_evaluations.py",
            "tests/contract/test_buffer_evaluation.py",
        ),
    ),
    Mutant(
        "filter.equal_rewards_kept",
        "buffers/groups/failure_budget.py",
        "len(rewards) > 1 and min(rewards) == max(rewards)",
        "len(rewards) > 1 and min(rewards) > max(rewards)",
        ("tests/unit/test_groups_filters.py",),
    ),
    Mutant(
        "keys.readable_by_others_accepted",
        "asyncrl/net/keys.py",
        "    if stat.S_IMODE(about.st_mode) & 0o077:",
        "    if stat.S_IMODE(about.st_mode) & 0o007:",
        (
            "tests/unit/test_sockets.py",
            "tests/security/test_keys.py",
        ),
    ),
    Mutant(
        "data.same_order_in_every_epoch",
        "producers/data/prompts.py",
        "np.array([self._seed & _MASK, epoch], dtype=np.uint64)",
        "np.array([self._seed & _MASK, 0], dtype=np.uint64)",
        ("tests/unit/test_prompts.py",),
    ),
    Mutant(
        "session.observations_trained",
        "producers/rollout/session.py",
        "np.full(count, sampled, np.uint8)",
        "np.ones(count, np.uint8)",
        ("tests/unit/test_sessions.py",),
    ),
    Mutant(
        "capacity.long_samples_count_once",
        "producers/rollout/capacity.py",
        "response * (prompt + response / 2) for",
        "prompt + response / 2 for",
        ("tests/unit/test_capacity.py",),
    ),
    Mutant(
        "sandbox.network_allowed",
        "producers/sandbox/bubblewrap.py",
        '        "--unshare-net",\n',
        "",
        (
            "tests/contract/test_sandboxes.py",
            "tests/security/test_sandbox_escapes.py",
        ),
    ),
    Mutant(
        "tools.unclosed_call_made",
        "producers/tools/parsers.py",
        "        call = None if not end else _call(body)",
        "        call = _call(body)",
        ("tests/unit/test_tools.py",),
    ),
    Mutant(
        "attestation.change_ignored",
        "weightsync/receiver/attestation.py",
        "        if digest and digest != manifest.digest:",
        "        if digest and not manifest.digest:",
        ("tests/contract/test_receiver_in_service.py",),
    ),
    Mutant(
        "fork.damaged_file_copied",
        "asyncrl/runs/fork.py",
        "            if _copy(source / name, target / name) != entry:",
        "            if not _copy(source / name, target / name):",
        ("tests/unit/test_replay.py",),
    ),
    Mutant(
        "retention.newest_not_kept",
        "learners/checkpoints/retention.py",
        "    stay = set(usable[:keep])",
        "    stay = set(usable[: keep - 1])",
        ("tests/unit/test_retention.py",),
    ),
)
