"""OpenRLHF: flags with dots (0.9 and later); older names are renamed by the table."""

from __future__ import annotations

from asyncrl.configure.translate.given import Given, Values

ALGORITHM = "learner.algorithm"
ADVANTAGES = {
    "group_norm": "grpo",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}

#: Bounds of the weights of old samples where the run sets none.
THRESHOLD = (0.5, 5.0)


def take(given: Given) -> None:
    """Take what the table of names cannot translate."""
    prompts, group = given.number("rollout.batch_size"), given.number("rollout.n_samples_per_prompt", 1)
    given.minibatches(
        prompts * group,
        given.take("train.batch_size", 0),
        "rollout.batch_size * rollout.n_samples_per_prompt / train.batch_size",
    )
    in_loss, weight = given.take("algo.kl.use_loss"), given.number("algo.kl.init_coef")
    if weight:
        given.settings[f"{ALGORITHM}.kl.where"] = "loss" if in_loss else "reward"
    elif given.take("algo.kl.init_coef") is not None:
        given.notes.append("algo.kl.init_coef = 0: no KL divergence, as by default here")
    _loss(given)
    _corrections(given)
    rewards = given.take("reward.remote_url")
    rewards = rewards if isinstance(rewards, str) else ""
    if rewards:
        given.settings["reward.function"] = f"{rewards}:reward_func" if rewards.endswith(".py") else rewards
    judge = given.take("reward.model_name_or_path")
    if judge:
        given.note("reward.model_name_or_path", judge, 'write a [[judge]] with kind = "classifier" (docs/judges.md)')
    _engine(given)
    if given.take("bf16"):
        given.settings["model.dtype"] = "bfloat16"
    if given.take("logger.wandb.key"):
        given.settings["trackers.use"] = ["wandb"]
    for section, prefix in (("learner.optim", "actor.adam."), ("learner.critic", "critic.adam.")):
        given.betas(f"{prefix}betas", section)
    given.warmup("actor.lr_warmup_ratio")
    given.warmup("critic.lr_warmup_ratio", "learner.critic")
    penalty, buffer = given.take("reward.overlong_penalty_factor"), given.take("reward.overlong_buffer_len")
    if buffer:
        given.settings[f"{ALGORITHM}.shaping.overlong_buffer"] = buffer
        given.settings[f"{ALGORITHM}.shaping.overlong_factor"] = float(penalty or 1.0)


def _loss(given: Given) -> None:
    given.both_clips("actor.eps_clip")
    clips = given.take("actor.eps_clip_low_high")
    if isinstance(clips, list) and len(clips) == 2:
        given.settings |= {f"{ALGORITHM}.clip_low": clips[0], f"{ALGORITHM}.clip_high": clips[1]}
    dual = given.take("actor.dual_clip")
    if dual is not None:
        given.options(f"{ALGORITHM}.loss_options", {"dual_clip": dual})
    estimator = given.take("algo.advantage.estimator", "gae")
    given.settings[f"{ALGORITHM}.advantage"] = ADVANTAGES.get(estimator, estimator)
    if given.take("algo.advantage.no_std_norm") is True and estimator == "group_norm":
        given.settings[f"{ALGORITHM}.advantage"] = "dr_grpo"
    for ours, theirs in (("gamma", "algo.advantage.gamma"), ("lam", "algo.advantage.lambd")):
        value = given.take(theirs)
        if value is not None and estimator == "gae":
            given.options(f"{ALGORITHM}.advantage_options", {ours: value})
        elif value is not None:
            given.note(theirs, value, f"{estimator} does not use it")
    if given.take("algo.dynamic_filtering_enable") is True:
        given.settings["buffer.filters"] = ["zero_variance"]
        bounds = given.take("algo.dynamic_filtering_range")
        if bounds:
            given.note("algo.dynamic_filtering_range", bounds, "groups with equal rewards are left out")


def _corrections(given: Given) -> None:
    on, kind = given.take("algo.advantage.is_correction_enable"), given.take("algo.advantage.is_correction_type", "tis")
    bounds = given.take("algo.advantage.is_correction_threshold")
    if not on:
        return
    numbers = [one for one in (bounds if isinstance(bounds, list) else [bounds]) if isinstance(one, int | float)]
    low, high = numbers if len(numbers) == 2 else (0.0, numbers[0]) if numbers else THRESHOLD  # one is the upper bound
    if bounds is not None and not numbers:
        given.note("algo.advantage.is_correction_threshold", bounds, "no numbers")
    options: Values
    if kind == "tis":
        known, options = "tis", {"upper": high, "floor": low}
    elif kind == "icepop":
        known, options = "icepop", {"lower": low, "upper": high}
    elif kind == "seq-mask-tis" and 0 < low <= high:
        # Whole rows are left out by the mean log-ratio of sampling to training; the weights of the others are not cut.
        rows = {"reject": ["seq_mean_k1"], "thresholds": [[1 / high, 1 / low]]}
        known, options = "tis", {"upper": "off", **rows}
    else:
        given.note("algo.advantage.is_correction_type", kind, "see docs/algorithms.md, corrections")
        if bounds is not None:
            given.note("algo.advantage.is_correction_threshold", bounds, "of this correction")
        return
    given.settings[f"{ALGORITHM}.correction"] = known
    given.options(f"{ALGORITHM}.correction_options", options)


def _engine(given: Given) -> None:
    names = ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")
    if given.left.get("vllm.num_engines"):
        given.settings["producers.engine"] = "vllm"
        given.options("producers.engine_args", {name: given.take(f"vllm.{name}") for name in names})
