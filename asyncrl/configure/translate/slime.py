"""slime: batches in samples, rewards by type, held-out prompts as pairs of name and file."""

from __future__ import annotations

from asyncrl.configure.translate.given import Given

ALGORITHM = "learner.algorithm"
SCORERS = {"math": "builtin:math", "dapo": "builtin:dapo"}
ADVANTAGES = {
    "grpo": "grpo",
    "gspo": "grpo",
    "ppo": "gae",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}


def take(given: Given) -> None:
    """Take what the table of names cannot translate."""
    samples = given.number("rollout_batch_size") * given.number("n_samples_per_prompt", 1)
    steps = given.take("num_steps_per_rollout")
    if isinstance(steps, int) and steps > 1:
        given.settings[f"{ALGORITHM}.minibatches"] = steps
        given.take("global_batch_size")
    else:
        given.minibatches(
            samples,
            given.take("global_batch_size", 0),
            "rollout_batch_size * n_samples_per_prompt / global_batch_size",
        )
    _kl(given)
    _advantage(given)
    _loss(given)
    _rewards(given)
    given.betas("adam_betas", "learner.optim")
    given.warmup("lr_warmup_fraction", steps=given.number("num_rollout"))
    if given.take("recompute_granularity"):
        given.settings["learner.gradient_checkpointing"] = True
    files = given.take("eval_prompt_data")
    if isinstance(files, list):
        paths = files if any("/" in str(one) for one in files[::2]) else files[1::2]  # NAME FILE NAME FILE
        given.left["eval_prompt_data"] = [str(one) for one in paths]
    elif files:
        given.left["eval_prompt_data"] = files
    given.settings |= {
        "learner.backend": "megatron" if given.take("train_backend", "megatron") == "megatron" else "fsdp2",
        "producers.engine": "sglang",
        "producers.url": ["http://127.0.0.1:30000"],
    }
    given.notes.append("producers.url: start an SGLang server there (docs/engines.md), one for each producer")
    if given.take("use_wandb"):
        given.trackers("wandb")
    if given.left.get("skip_eval_before_train") is None and given.left.get("eval_interval"):
        given.settings["evaluation.at_start"] = True


def _kl(given: Given) -> None:
    in_loss = given.take("use_kl_loss")
    loss, reward = given.take("kl_loss_coef", 0), given.take("kl_coef", 0)
    if in_loss and loss:
        given.settings |= {f"{ALGORITHM}.kl.where": "loss", f"{ALGORITHM}.kl.coeff": loss}
    elif reward:
        given.settings |= {f"{ALGORITHM}.kl.where": "reward", f"{ALGORITHM}.kl.coeff": reward}
    elif in_loss:
        given.notes.append(f"use_kl_loss, kl_loss_coef = {loss}: no KL divergence, as by default here")


def _loss(given: Given) -> None:
    given.both_clips("eps_clip")
    high = given.take("eps_clip_high")
    if high is not None:
        given.settings[f"{ALGORITHM}.clip_high"] = high
    dual = given.take("eps_clip_c")
    if dual is not None:
        given.options(f"{ALGORITHM}.loss_options", {"dual_clip": dual})
    token_mean = given.take("calculate_per_token_loss")
    given.settings[f"{ALGORITHM}.aggregation"] = "token-mean" if token_mean else "seq-mean-token-mean"
    if given.take("use_tis"):
        given.settings[f"{ALGORITHM}.correction"] = "tis"
    cap, low = given.take("tis_clip"), given.take("tis_clip_low")
    given.options(f"{ALGORITHM}.correction_options", {"upper": cap, "floor": low} if cap is not None else {})
    if given.take("use_rollout_logprobs"):
        given.bypass()
    path = given.take("dynamic_sampling_filter_path")
    if isinstance(path, str) and path.endswith("check_reward_nonzero_std"):
        given.settings["buffer.filters"] = ["zero_variance"]
    elif path:
        given.note("dynamic_sampling_filter_path", path, "write it as a filter of groups (buffer.filters)")


def _advantage(given: Given) -> None:
    estimator = given.take("advantage_estimator", "grpo")
    if estimator in ADVANTAGES:
        given.settings[f"{ALGORITHM}.advantage"] = ADVANTAGES[estimator]
    else:
        given.note("advantage_estimator", estimator, "see docs/algorithms.md")
    if estimator == "gspo":
        given.settings[f"{ALGORITHM}.loss"] = "gspo"
    if given.take("disable_grpo_std_normalization") and estimator == "grpo":
        given.settings[f"{ALGORITHM}.advantage"] = "dr_grpo"
    for ours, theirs in (("gamma", "gamma"), ("lam", "lambd")):
        value = given.take(theirs)
        if value is not None and estimator == "ppo":
            given.options(f"{ALGORITHM}.advantage_options", {ours: value})
        elif value is not None:
            given.note(theirs, value, f"{estimator} does not use it")


def _rewards(given: Given) -> None:
    path, kind = given.take("custom_rm_path"), given.take("rm_type")
    address = given.take("rm_url")
    if isinstance(path, str):
        module, _, name = path.rpartition(".")
        given.settings["reward.function"] = f"{module}:{name}"
        given.notes.append(
            f"custom_rm_path = {path!r}: its arguments differ: give it the signature of verl or TRL (docs/rewards.md)"
        )
    elif kind == "remote_rm" and address:
        given.settings["reward.function"] = address
    elif kind in SCORERS:
        given.settings["reward.function"] = SCORERS[kind]
    elif kind:
        given.settings["reward.function"] = "builtin:math"
        given.notes.append(
            f"rm_type = {kind!r}: a scorer of slime; builtin:math compares the last answer (docs/rewards.md)"
        )
