"""The features that a configuration and its models ask of back-ends, engines and devices, by name.

Nothing is imported and no file is read: a model is its config.json. What each part refuses of it is in
`asyncrl.config.capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from asyncrl.config.model_facts import (
    ATTENTION_CAP,
    HEAD_CAP,
    MEGATRON_MODELS,
    MROPE_MODELS,
    TILE_MODELS,
    Model,
    count_experts,
    find_cap,
    find_head_scale,
    find_senses,
    find_state,
    find_variant,
    list_senses,
)
from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.tree import Config

NO_MODEL: Model = {}


class Feature(NamedTuple):
    """Something that a configuration asks for. `asks`: its words, empty if it does not; `key`: the setting to name;
    `needs`: a feature of the learner's device.
    """

    title: str
    key: str
    asks: Callable[[Config, Model], str]
    needs: str = ""

    @property
    def of_model(self) -> bool:
        return self.key == "model.path"


def get_setting(config: Config, key: str) -> Any:
    """The value of a setting by its dotted name."""
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def _switch(key: str, *, needs: str = "") -> Feature:
    return Feature(f"`{key}`", key, lambda config, _: f"{key} = true" if get_setting(config, key) else "", needs)


def _value(key: str, value: str, title: str = "", *, needs: str = "") -> Feature:
    words, title = f"{key} = {value!r}", title or f'`{key} = "{value}"`'
    return Feature(title, key, lambda c, _: words if get_setting(c, key) == value else "", needs)


def _number(key: str, least: int) -> Feature:
    def asks(config: Config, _: Model) -> str:
        value = get_setting(config, key)
        return f"{key} = {value}" if value > least else ""

    return Feature(f"`{key}`", key, asks)


def _needs_model(name: str, title: str) -> Feature:
    key = "learner.algorithm.advantage"

    def asks(config: Config, _: Model) -> str:
        entry = algorithms.ADVANTAGES.get(get_setting(config, key)) if config.learner.mode == "rl" else None
        return f"{key} = {get_setting(config, key)!r}, which needs a {title}" if entry and name in entry.needs else ""

    return Feature(title, key, asks)


def _model(title: str, words: Callable[[Model], str]) -> Feature:
    return Feature(title, "model.path", lambda _, model: words(model))


def _head(what: str, words: Callable[[Model], str]) -> Feature:
    title = f"logits that are {what} after the head"
    return Feature(title, "model.path", lambda c, m: words(m) if c.learner.mode != "reward_model" else "")


def _capped(config: Config, model: Model, key: str) -> str:
    cap = find_cap(model, ATTENTION_CAP)
    return f"{key} = {get_setting(config, key)!r} with {ATTENTION_CAP} = {cap}" if cap else ""


#: What no learner does with a vision-language model: settings of `[learner]` and the value that they must have.
_NOT_SEEING: dict[str, Any] = {
    **dict.fromkeys(("parallel.tensor", "parallel.sequence", "parallel.expert"), 1),
    "compile": False,
    "liger": False,
}


def _find_beside_vision(config: Config, model: Model) -> str:
    if not list_senses(model):
        return ""
    found = [FEATURES[name].asks(config, NO_MODEL) for name in ("critic", "process", "reward_model")]
    for name, plain in _NOT_SEEING.items():
        if (value := get_setting(config, f"learner.{name}")) != plain:
            found.append(f"learner.{name} = {value!r}")
    return next((f"{one}, and a vision-language model" for one in found if one), "")


def _is_plain(model: Model) -> bool:
    """A decoder of token ids."""
    return bool(model.get("model_type")) and not (list_senses(model) or _encodes(model))


def _encodes(model: Model) -> bool:
    return bool(model.get("is_encoder_decoder"))


def _architecture(model: Model) -> str:
    other = _is_plain(model) and model["model_type"] not in MEGATRON_MODELS
    return f"model_type {model['model_type']!r}" if other else ""


FEATURES: dict[str, Feature] = {
    # of a learner
    "float16": _value("model.dtype", "float16"),
    "reward_model": _value("learner.mode", "reward_model"),
    "iteration": _number("learner.preference.iteration", 0),
    "critic": _needs_model("critic", "critic model"),
    "process": _needs_model("process", "process model"),
    "lora": _number("learner.lora.rank", 0),
    **{one: _number(f"learner.parallel.{one}", 1) for one in ("replicate", "tensor", "sequence", "pipeline", "expert")},
    "cpu_offload": _switch("learner.cpu_offload"),
    "reference_offload": _switch("learner.reference_offload"),
    "offload_idle": _switch("learner.offload_idle"),
    "compile": _switch("learner.compile"),
    "liger": _switch("learner.liger", needs="triton"),
    "muon": _value("learner.optim.name", "muon"),
    "adamw_8bit": _value("learner.optim.name", "adamw_8bit"),
    "varlen": _value("model.attn_implementation", "varlen", needs="varlen_attention"),
    "varlen_float32": Feature(
        "`model.attn_implementation = \"varlen\"` in float32", "model.attn_implementation",
        lambda c, _: "model.attn_implementation = 'varlen' with model.dtype = 'float32'"
        if (c.model.attn_implementation, c.model.dtype) == ("varlen", "float32") else ""),
    "sequence_parallel": _switch("learner.megatron.sequence_parallel"),
    # of an engine
    "adapter": Feature(
        "`learner.lora.publish = \"adapter\"`", "learner.lora.publish",
        lambda c, _: "learner.lora.publish = 'adapter'"
        if c.learner.lora.rank and c.learner.lora.publish == "adapter" else ""),
    "exact_truncation": Feature(
        "`sampling.top_p`, `top_k` or `min_p` with `sampling.truncation = \"exact\"`", "sampling.truncation",
        lambda c, _: f"{c.sampling.cut} with sampling.truncation = 'exact'"
        if c.training_sampling.wants_support else ""),
    "second_weights": _value("evaluation.lane", "second_weights"),
    "router_replay": _switch("learner.router_replay"),
    "speculation": _number("producers.speculative_tokens", 0),
    "speculation_by_caches": Feature(
        "`producers.speculative_tokens` with a model that decodes by caches", "producers.speculative_tokens",
        lambda c, m: f"producers.speculative_tokens = {c.producers.speculative_tokens} with {found}"
        if c.producers.speculative_tokens and (found := find_state(m)) else ""),
    "moving_tower": Feature(
        "a vision-language model whose vision tower or projector trains", "learner.vision",
        lambda c, m: "learner.vision.tower or learner.vision.projector = true"
        if list_senses(m) and c.learner.trains_vision else ""),
    # of a model folder
    "mixture_of_experts": _model(
        "a mixture of experts", lambda m: f"mixture of experts ({n})" if (n := count_experts(m)) else ""),
    "senses": _model(f"vision-language models {', '.join(MROPE_MODELS)}", lambda m: find_senses(m, MROPE_MODELS)),
    "tile_senses": _model(f"vision-language models {', '.join(TILE_MODELS)}", lambda m: find_senses(m, TILE_MODELS)),
    "other_senses": _model("another vision-language model, or audio", find_senses),
    "vision_layout": Feature(
        "a vision-language model with a critic, process rewards, mode reward_model, `compile`, `liger`, or split "
        "matrices, rows or experts", "learner.vision", _find_beside_vision,
    ),
    "encoder_decoder": _model("an encoder-decoder", lambda m: "encoder-decoder" if _encodes(m) else ""),
    "architecture": _model(f"a decoder other than {', '.join(MEGATRON_MODELS)}", _architecture),
    "dense_variant": _model(
        "other activations, biases, attention windows, rotary scaling or ways to choose experts",
        lambda m: find_variant(m) if _is_plain(m) and not _architecture(m) else ""),
    "head_scale": _head("scaled", find_head_scale),
    "head_cap": _head("capped", lambda m: f"{HEAD_CAP} = {find_cap(m, HEAD_CAP)}" if find_cap(m, HEAD_CAP) else ""),
    "attention_cap": Feature(
        "capped attention scores, `model.attn_implementation = \"sdpa\"` or `\"varlen\"`", "model.attn_implementation",
        lambda c, m: _capped(c, m, "model.attn_implementation")
        if c.model.attn_implementation in ("sdpa", "varlen") else ""),
    "attention_cap_split": Feature(
        "capped attention scores, `learner.parallel.sequence`, no kernel named", "learner.parallel.sequence",
        lambda c, m: _capped(c, m, "learner.parallel.sequence")
        if c.learner.parallel.sequence > 1 and c.model.attn_implementation in ("auto", "eager") else ""),
}  # fmt: skip
SENSES = ("senses", "tile_senses", "other_senses")
#: Features that a learner or an engine is asked for.
ENGINES_ALONE = (
    "adapter", "exact_truncation", "second_weights", "router_replay", "speculation", "speculation_by_caches",
    "moving_tower",
)  # fmt: skip
OF_ENGINES = (*ENGINES_ALONE, *SENSES, "encoder_decoder")
OF_LEARNERS = tuple(name for name in FEATURES if name not in ENGINES_ALONE)
