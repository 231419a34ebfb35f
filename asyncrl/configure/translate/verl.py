"""verl: values that depend on several settings, fully asynchronous recipe included."""

from __future__ import annotations

from asyncrl.config.suggestions import translation_table
from asyncrl.configure.translate.given import Given

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
ALGORITHM = "learner.algorithm"
#: verl's loss -> (ours, its options: verl's name -> ours).
LOSSES: dict[str, tuple[str, dict[str, str]]] = {
    "vanilla": ("ppo", {"clip_ratio_c": "dual_clip"}),
    "gspo": ("gspo", {}),
    "sapo": ("sapo", {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}),
    "gpg": ("reinforce", {}),
    "geo_mean": ("gmpo", {}),
    "cispo": ("cispo", {}),
    "clip_cov": (
        "clip_cov",
        {
            "policy_loss.clip_cov_ratio": "ratio",
            "policy_loss.clip_cov_lb": "lower",
            "policy_loss.clip_cov_ub": "upper",
        },
    ),
    "kl_cov": ("kl_cov", {"policy_loss.kl_cov_ratio": "ratio", "policy_loss.ppo_kl_coef": "coeff"}),
}
#: Arguments of vLLM that verl has under names of its own.
ENGINE_ARGS = (
    "data_parallel_size", "dtype", "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager",
    "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "quantization",
)  # fmt: skip


def take(given: Given) -> None:
    """Take what the table of names cannot translate."""
    _batch(given)
    _kl(given)
    _loss(given)
    _advantage(given)
    _correction(given)
    _rewards(given)
    _engine(given)
    _schedules(given)
    top_k = given.whole(f"{ROLLOUT}top_k", -1)
    if top_k > 0:
        given.settings["sampling.top_k"] = top_k
    if given.left.get(f"{ACTOR}router_replay.mode") == "R3":
        given.take(f"{ACTOR}router_replay.mode")
        given.take(f"{ROLLOUT}enable_rollout_routing_replay")
        given.settings["learner.router_replay"] = True
    given.trackers(given.take("trainer.logger", []))
    gpus = given.take("trainer.n_gpus_per_node")
    if gpus:
        given.notes.append(f"trainer.n_gpus_per_node = {gpus}: set learner.ranks and producers.count, which share them")


def _batch(given: Given) -> None:
    """Groups of a step, and mini-batches; the asynchronous recipe counts in mini-batches."""
    mini = given.take(f"{ACTOR}ppo_mini_batch_size", 0)
    required = given.whole("async_training.require_batches")
    if required and isinstance(mini, int) and mini:
        given.take("data.train_batch_size")
        given.settings["buffer.batch_groups"] = required * mini
        given.settings["learner.algorithm.minibatches"] = required
        return
    if given.left.get("data.train_batch_size") == 0:
        given.take("data.train_batch_size")
        given.settings["buffer.batch_groups"] = mini or 1
        return
    given.minibatches(
        given.number("data.train_batch_size"),
        mini,
        "data.train_batch_size / actor_rollout_ref.actor.ppo_mini_batch_size",
    )


def _kl(given: Given) -> None:
    loss, reward = given.take(f"{ACTOR}use_kl_loss"), given.take("algorithm.use_kl_in_reward")
    left_out = {"algorithm": ("algorithm.kl_penalty", "algorithm.kl_ctrl."), "actor": (f"{ACTOR}kl_loss",)}
    if loss is True:
        given.settings[f"{ALGORITHM}.kl.where"] = "loss"
        unused = left_out["algorithm"]
    elif reward is True:
        given.settings[f"{ALGORITHM}.kl.where"] = "reward"
        unused = left_out["actor"]
    else:
        unused = left_out["algorithm"] + left_out["actor"]
    for key in [key for key in given.left if key.startswith(unused)]:
        value = given.take(key)
        if value is not None and not key.endswith("_target_"):
            given.note(key, value, "the KL divergence is not used at this place")


def _loss(given: Given) -> None:
    given.both_clips(f"{ACTOR}clip_ratio")
    for side in ("low", "high"):
        clip = given.take(f"{ACTOR}clip_ratio_{side}")
        if clip is not None:
            given.settings[f"{ALGORITHM}.clip_{side}"] = clip
    mode = given.take(f"{ACTOR}policy_loss.loss_mode")
    known = LOSSES.get(mode or "vanilla")
    if known is None:
        given.note(f"{ACTOR}policy_loss.loss_mode", mode, "see docs/algorithms.md for the losses here")
        return
    if mode:
        given.settings[f"{ALGORITHM}.loss"] = known[0]
    given.options(f"{ALGORITHM}.loss_options", {ours: given.take(f"{ACTOR}{name}") for name, ours in known[1].items()})


def _advantage(given: Given) -> None:
    theirs = given.take("algorithm.adv_estimator")
    if theirs is not None:
        names = translation_table()["values"][f"{ALGORITHM}.advantage"]
        given.settings[f"{ALGORITHM}.advantage"] = names.get(theirs, theirs)
    takes = {"gae": ("gamma", "lam"), "reinforce_plus_plus": ("gamma",)}.get(str(theirs), ())
    for name in ("gamma", "lam"):
        value = given.take(f"algorithm.{name}")
        if value is not None and name in takes:
            given.options(f"{ALGORITHM}.advantage_options", {name: value})
        elif value is not None:
            given.note(f"algorithm.{name}", value, f"{theirs or 'the estimator'} does not use it")
    if given.take("algorithm.norm_adv_by_std_in_grpo") is False and theirs == "grpo":
        given.settings[f"{ALGORITHM}.advantage"] = "dr_grpo"
    if given.take("algorithm.use_pf_ppo") is True:
        given.settings[f"{ALGORITHM}.shaping.resample"] = given.take("algorithm.pf_ppo.reweight_method", "pow")
        given.settings[f"{ALGORITHM}.shaping.resample_power"] = float(given.take("algorithm.pf_ppo.weight_pow", 2.0))
    if given.take("algorithm.filter_groups.enable") is True:
        given.settings["buffer.filters"] = ["zero_variance"]


def _correction(given: Given) -> None:
    """Weights for the difference between the policies of generation and of training."""
    prefix = "algorithm.rollout_correction."
    level, upper = given.take(f"{prefix}rollout_is"), given.take(f"{prefix}rollout_is_threshold")
    batch = given.take(f"{prefix}rollout_is_batch_normalize")
    if level in ("token", "sequence"):
        given.settings[f"{ALGORITHM}.correction"] = "tis"
        values = {"level": level, "upper": upper, "batch_normalize": batch}
        given.options(f"{ALGORITHM}.correction_options", values)
    if given.take(f"{prefix}bypass_mode") is True:
        given.bypass()


def _rewards(given: Given) -> None:
    """verl's function with its keyword arguments, and DAPO's penalty for overlong responses."""
    path, name = given.take("custom_reward_function.path"), given.take("custom_reward_function.name", "compute_score")
    if path:
        given.settings["reward.function"] = f"{path}:{name}"
        given.options("reward.args", given.take_table("custom_reward_function.reward_kwargs."))
    for prefix in ("reward_model.reward_kwargs.overlong_buffer_cfg.", "reward_model.overlong_buffer."):
        length, factor = given.take(f"{prefix}len"), given.take(f"{prefix}penalty_factor")
        if given.take(f"{prefix}enable") is True and length:
            given.settings[f"{ALGORITHM}.shaping.overlong_buffer"] = length
            if factor is not None:
                given.settings[f"{ALGORITHM}.shaping.overlong_factor"] = factor
    judge = given.take("reward_model.model.path")
    if given.take("reward_model.enable") is True and judge:
        given.note("reward_model.model.path", judge, 'write a [[judge]] with kind = "classifier" (docs/judges.md)')
    server = given.take("reward_model.sandbox_fusion.url")
    if server:
        given.settings["sandbox.kind"] = server


def _engine(given: Given) -> None:
    """vLLM's own arguments are kept as they are."""
    names = {name: name for name in ENGINE_ARGS}
    names |= {
        "tensor_model_parallel_size": "tensor_parallel_size",
        "pipeline_model_parallel_size": "pipeline_parallel_size",
    }
    if given.left.get(f"{ROLLOUT}name") == "vllm":
        args = {ours: given.take(f"{ROLLOUT}{name}") for name, ours in names.items()}
        given.options("producers.engine_args", args | given.take_table(f"{ROLLOUT}engine_kwargs.vllm."))
        return
    why = "an argument of vLLM"
    if given.left.get(f"{ROLLOUT}name") == "sglang":
        why = "a flag of your SGLang server, which producers.url names (docs/engines.md)"
        given.settings["producers.url"] = ["http://127.0.0.1:30000"]
    given.unused([f"{ROLLOUT}{name}" for name in names], why)


def _schedules(given: Given) -> None:
    if any(key.startswith(f"{ACTOR}megatron.") for key in given.left) and not given.left.get(f"{ACTOR}strategy"):
        given.settings["learner.backend"] = "megatron"
    steps = given.number("trainer.total_training_steps")
    for prefix, section in ((f"{ACTOR}optim.", "learner.optim"), ("critic.optim.", "learner.critic")):
        warmup = given.left.get(f"{prefix}lr_warmup_steps")
        if isinstance(warmup, int) and warmup < 0:
            given.take(f"{prefix}lr_warmup_steps")
        given.warmup(f"{prefix}lr_warmup_steps_ratio", section, steps)
        given.betas(f"{prefix}betas", section)
