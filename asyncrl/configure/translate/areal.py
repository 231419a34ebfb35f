"""AReaL: allocations such as `sglang:d4p1t1`, norms of rewards and advantages, timers."""

from __future__ import annotations

import re
from typing import Any

from asyncrl.configure.translate.given import Given

ALGORITHM = "learner.algorithm"
PART = re.compile(r"([a-z])(\d+)")
#: Letters of an allocation -> our settings of the learner.
LEARNER = {
    "t": "learner.parallel.tensor",
    "p": "learner.parallel.pipeline",
    "c": "learner.parallel.sequence",
    "e": "learner.parallel.expert",
}
BACKENDS = {"fsdp": "fsdp2", "megatron": "megatron"}
NORM = "actor.reward_norm."
#: Levels of mean and deviation, and whether a sample is left out of its own mean -> our estimator.
ADVANTAGES = {
    ("group", "group", False): "grpo",
    ("group", None, False): "dr_grpo",
    ("group", None, True): "rloo",
}
#: Modes of the weights of old samples -> our correction. None: the default.
MODES = {None: "icepop", "token_mask": "icepop", "token_truncate": "tis", "disabled": "none"}


def take(given: Given) -> None:
    """Take what the table of names cannot translate."""
    both = given.take("allocation_mode")
    engine, _, learner = str(both or "").partition("+")
    _engine(given, given.take("rollout.backend") or engine)
    _learner(given, given.take("actor.backend") or learner)
    weight = given.number("actor.kl_ctl")
    if weight:
        given.settings[f"{ALGORITHM}.kl.where"] = "reward"
    elif given.take("actor.kl_ctl") is not None:
        given.notes.append("actor.kl_ctl = 0: no KL divergence, as by default here")
    given.both_clips("actor.eps_clip")
    given.settings |= {f"{ALGORITHM}.clip_high": high} if (high := given.take("actor.eps_clip_higher")) else {}
    dual = given.take("actor.c_clip")
    if dual is not None:
        given.options(f"{ALGORITHM}.loss_options", {"dual_clip": dual})
    _advantage(given)
    _loss(given)
    steps = given.number("total_train_steps")
    given.warmup("actor.optimizer.warmup_steps_proportion", steps=steps)
    given.warmup("critic.optimizer.warmup_steps_proportion", "learner.critic", steps)
    if given.take("gconfig.greedy") is True:
        given.settings["sampling.temperature"] = 0.0
    if given.take("actor.use_lora") is not True:
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            value = given.take(f"actor.{name}")
            if value is not None:
                given.note(f"actor.{name}", value, "used only with actor.use_lora")
    for name in ("wandb", "swanlab", "trackio"):
        mode = given.take(f"stats_logger.{name}.mode")
        if mode == "disabled":
            given.note(f"stats_logger.{name}.mode", mode, "as without it in trackers.use")
        elif mode:
            given.trackers(name)


def _letters(text: Any) -> tuple[str, dict[str, int]]:
    """Name and sizes of an allocation.

    >>> _letters("sglang:d4p1t2")
    ('sglang', {'d': 4, 'p': 1, 't': 2})
    """
    name, _, sizes = str(text).rpartition(":")
    return name, {letter: int(size) for letter, size in PART.findall(sizes)}


def _engine(given: Given, text: Any) -> None:
    if not text:
        return
    args, flags = given.take_table("vllm."), given.take_table("sglang.")
    name, sizes = _letters(text)
    given.settings |= {"producers.engine": "sglang" if "sglang" in name else "vllm"}
    given.settings["producers.count"] = sizes.get("d", 1)
    if "sglang" in name:
        port = 30000
        given.settings["producers.url"] = [f"http://127.0.0.1:{port + number}" for number in range(sizes.get("d", 1))]
        given.notes.append(
            f"rollout.backend = {text!r}: start {sizes.get('d', 1)} SGLang servers with --tp "
            f"{sizes.get('t', 1)} at the addresses in producers.url (docs/engines.md)"
        )
        _say(given, "sglang", flags, "flags of your SGLang servers")
        _say(given, "vllm", args, "arguments of vLLM, which is not the engine of this run")
        return
    _say(given, "sglang", flags, "flags of SGLang, which is not the engine of this run")
    mine = {key: value for key, value in args.items() if key not in ("model", "skip_tokenizer_init", "lora_modules")}
    given.options("producers.engine_args", mine | {"tensor_parallel_size": sizes.get("t", 1)})


def _say(given: Given, table: str, values: dict[str, Any], why: str) -> None:
    given.notes += [f"{table}.{key} = {value!r}: {why}" for key, value in values.items()]


def _learner(given: Given, text: Any) -> None:
    if not text:
        return
    name, sizes = _letters(text)
    given.settings |= {LEARNER[letter]: size for letter, size in sizes.items() if size > 1 and letter in LEARNER}
    ranks = 1
    for letter in ("d", "t", "p", "c"):
        ranks *= sizes.get(letter, 1)
    given.settings["learner.ranks"] = ranks
    if name in BACKENDS:
        given.settings["learner.backend"] = BACKENDS[name]
    elif name:
        given.note("actor.backend", text, "the backends here are fsdp2 and megatron")


def _advantage(given: Given) -> None:
    """With a critic GAE, else by the group's rewards."""
    critic = any(key.startswith("critic.") for key in given.left)
    options = {"gamma": given.take("actor.discount"), "lam": given.take("actor.gae_lambda")}
    names = [f"{NORM}{key}" for key in ("mean_level", "std_level", "mean_leave1out", "group_size")]
    # A level that is left out is "batch", one that is null is none.
    mean, deviation = (given.left.get(name, "batch") for name in names[:2])
    found = ADVANTAGES.get((mean, deviation, given.left.get(names[2]) is True))
    if critic:
        given.settings[f"{ALGORITHM}.advantage"] = "gae"
        given.options(f"{ALGORITHM}.advantage_options", options)
    elif found:
        given.settings[f"{ALGORITHM}.advantage"] = found
        for name in names:
            given.take(name)
    given.unused(names, "no estimator here has exactly these levels: see learner.algorithm.advantage")
    if not critic:
        for name, theirs in (("gamma", "discount"), ("lam", "gae_lambda")):
            if options[name] is not None:
                given.note(f"actor.{theirs}", options[name], "of GAE, with a critic")


def _loss(given: Given) -> None:
    if given.take("actor.use_sapo_loss") is True:
        given.settings[f"{ALGORITHM}.loss"] = "sapo"
        values = {"tau_pos": given.take("actor.sapo_tau_pos"), "tau_neg": given.take("actor.sapo_tau_neg")}
        given.options(f"{ALGORITHM}.loss_options", values)
    elif given.take("actor.importance_sampling_level") == "sequence":
        given.settings[f"{ALGORITHM}.loss"] = "gspo"
    if given.take("actor.overlong_reward_penalty") is True:
        given.settings[f"{ALGORITHM}.shaping.overlong_buffer"] = given.take("actor.overlong_tokens", 0)
        factor = given.take("actor.overlong_penalty_factor", 1.0)
        given.settings[f"{ALGORITHM}.shaping.overlong_factor"] = factor
    decoupled, again = given.take("actor.use_decoupled_loss"), given.take("actor.recompute_logprob")
    if decoupled is False and f"{ALGORITHM}.loss" not in given.settings:
        given.settings[f"{ALGORITHM}.loss"] = "ppo"
    if again is False:
        given.bypass()
    _correction(given)


def _correction(given: Given) -> None:
    """Weights of old samples. AReaL leaves out tokens above the cap (its default mode), or truncates their weights."""
    names = ("actor.behave_imp_weight_mode", "actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")
    mode, *caps = (given.take(name) for name in names)
    cap = next((one for one in caps if one), 5.0 if mode else None)
    if cap is None:
        return
    if mode in MODES and given.settings.get(f"{ALGORITHM}.correction") != "none":
        given.settings[f"{ALGORITHM}.correction"] = MODES[mode]
        values = {"icepop": {"lower": 0.0, "upper": cap}, "tis": {"upper": cap}}
        given.options(f"{ALGORITHM}.correction_options", values.get(MODES[mode], {}))
        return
    for name, value in zip(names, (mode, *caps), strict=True):
        if value is not None:
            given.note(name, value, "see learner.algorithm.correction (docs/algorithms.md)")
