"""TRL: batch size, loss and engine of a `GRPOConfig`, in Python, on a command line or in YAML."""

from __future__ import annotations

from asyncrl.configure.translate.given import Given

ALGORITHM = "learner.algorithm"
LOSSES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
#: Losses of their own, and their options: TRL's name -> ours.
OTHER_LOSSES: dict[str, dict[str, str]] = {
    "cispo": {},
    "sapo": {"sapo_temperature_pos": "tau_pos", "sapo_temperature_neg": "tau_neg"},
    "vespo": {f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}
SCORERS = {"accuracy_reward": "builtin:math"}


def take(given: Given) -> None:
    """Take what the table of names cannot translate."""
    _batch(given)
    _loss(given)
    _advantage(given)
    _engine(given)
    _corrections(given)
    _rewards(given)
    steps = given.number("max_steps")
    given.warmup("warmup_ratio", steps=steps)
    share = given.left.get("warmup_steps")
    if isinstance(share, float) and 0 < share < 1:  # newer versions of transformers take a share as well
        given.warmup("warmup_steps", steps=steps)
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if given.take(name):
            given.settings["model.dtype"] = dtype
    for name, steps_of, ours in (
        ("eval_strategy", "eval_steps", "evaluation.every"),
        ("save_strategy", "save_steps", "learner.checkpoint_every"),
    ):
        strategy = given.take(name)
        if strategy == "no":
            given.unused([steps_of], f"{name} = 'no'")
        elif strategy is not None:
            given.note(name, strategy, f"{ours} counts steps")
    given.trackers(given.take("report_to", []))


def _batch(given: Given) -> None:
    device = given.whole("per_device_train_batch_size", 8)
    passes = given.whole("gradient_accumulation_steps", 1)
    group = int(given.number("num_generations", 8)) or 8
    given.settings.setdefault("sampling.group_size", group)
    samples = given.whole("generation_batch_size") or device * passes
    if samples % group:
        given.notes.append(
            f"per_device_train_batch_size * gradient_accumulation_steps = {samples} is no multiple of "
            f"num_generations = {group:g}; buffer.batch_groups is rounded up"
        )
    groups = max(1, -(-samples // group))
    given.settings["buffer.batch_groups"] = groups
    given.notes.append(f"buffer.batch_groups = {groups} is of one device: multiply it by their number")


def _loss(given: Given) -> None:
    beta = given.number("beta")
    if beta:
        given.settings[f"{ALGORITHM}.kl.where"] = "loss"
    elif given.take("beta") is not None:
        given.note("beta", beta, "no KL divergence, as by default here")
    loss = given.take("loss_type", "dapo")
    if loss in LOSSES:
        given.settings[f"{ALGORITHM}.aggregation"] = LOSSES[loss]
    if loss in OTHER_LOSSES or loss == "luspo":
        given.settings[f"{ALGORITHM}.loss"] = loss
        names = OTHER_LOSSES.get(loss, {})
        given.options(f"{ALGORITHM}.loss_options", {ours: given.take(name) for name, ours in names.items()})
        if loss == "cispo":
            _cispo(given)
    elif loss not in LOSSES:
        given.note("loss_type", loss, "see docs/algorithms.md")
    level = given.take("importance_sampling_level")
    if level == "sequence" and loss in OTHER_LOSSES:
        given.note("importance_sampling_level", level, f"the loss {loss} has a level of its own here")
    elif level == "sequence":
        given.settings[f"{ALGORITHM}.loss"] = "gspo"
    elif level is not None:
        given.note("importance_sampling_level", level, "as by default here")
    delta = given.take("delta")
    if delta is not None and f"{ALGORITHM}.loss" in given.settings:
        given.note("delta", delta, "an option of the losses ppo and decoupled_ppo")
    elif delta is not None:
        given.options(f"{ALGORITHM}.loss_options", {"delta": delta})


def _cispo(given: Given) -> None:
    """TRL's epsilon_high is the largest ratio itself, and there is no smallest one."""
    high = given.take("epsilon_high")
    options = {"clip_low": 1.0}
    if isinstance(high, int | float) and high >= 1:
        options["clip_high"] = high - 1
    elif high is not None:
        given.note("epsilon_high", high, "the largest ratio of cispo in TRL, and below 1; it stays at 1.2")
    given.options(f"{ALGORITHM}.loss_options", options)
    given.unused(["epsilon"], "cispo has no smallest ratio in TRL")


def _advantage(given: Given) -> None:
    scale = given.take("scale_rewards", "group")
    if scale in (False, "none"):
        given.settings[f"{ALGORITHM}.advantage"] = "dr_grpo"
    elif scale == "batch":
        given.note("scale_rewards", scale, "advantages are scaled by the group here")
    if given.take("multi_objective_aggregation") == "normalize_then_sum":
        given.settings[f"{ALGORITHM}.advantage"] = "gdpo"
    if given.take("use_adaptive_entropy") is not True:
        for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_max"):
            value = given.take(name)
            if value is not None:
                given.note(name, value, "used only with use_adaptive_entropy")


def _engine(given: Given) -> None:
    mode, wanted = given.take("vllm_mode"), given.take("use_vllm")
    if mode is not None:
        given.note("vllm_mode", mode, "the engine has processes of its own")
    names = {
        "vllm_gpu_memory_utilization": "gpu_memory_utilization",
        "vllm_max_model_length": "max_model_len",
        "vllm_model_impl": "model_impl",
        "vllm_tensor_parallel_size": "tensor_parallel_size",
    }
    server = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
    if wanted and mode == "server":
        host, port, address = map(given.take, server)
        given.settings["producers.engine"] = "vllm_http"
        given.settings["producers.url"] = [address or f"http://{host or '127.0.0.1'}:{port or 8000}"]
        given.unused(names, "a flag of your vLLM server")
    elif wanted:
        given.settings["producers.engine"] = "vllm"
        given.options("producers.engine_args", {ours: given.take(name) for name, ours in names.items()})
    given.unused((*names, *server), "used with vLLM only, in another mode")


def _corrections(given: Given) -> None:
    """Weights for the difference between the policies of vLLM and of training."""
    on, mode = given.take("vllm_importance_sampling_correction"), given.take("vllm_importance_sampling_mode")
    upper = given.take("vllm_importance_sampling_clip_max")
    lower = given.take("vllm_importance_sampling_clip_min")
    if on is False:
        given.settings[f"{ALGORITHM}.correction"] = "none"
    elif mode or upper is not None:
        level, _, kind = str(mode or "sequence_mask").partition("_")
        given.settings[f"{ALGORITHM}.correction"] = "tis" if kind == "truncate" else "mis"
        values = {"level": level, "upper": upper}
        given.options(f"{ALGORITHM}.correction_options", values | ({} if kind == "truncate" else {"lower": lower}))


def _rewards(given: Given) -> None:
    """Names and import paths of a command line; functions in Python were noted."""
    functions = given.take("reward_funcs")
    functions = [functions] if isinstance(functions, str) else functions
    if not isinstance(functions, list) or not functions:
        return
    first = str(functions[0])
    module, _, name = first.rpartition(".")
    if first in SCORERS:
        given.settings["reward.function"] = SCORERS[first]
    elif "/" in first:
        given.note("reward_funcs", first, 'write a [[judge]] with kind = "classifier" (docs/judges.md)')
    elif module:
        given.settings["reward.function"] = f"{module}:{name}"
    else:
        given.note("reward_funcs", first, "a reward of TRL: write it as a function (docs/rewards.md)")
    if functions[1:]:
        given.note("reward_funcs", functions[1:], "add one [[reward]] for each")
