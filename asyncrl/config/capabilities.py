"""What back-ends, engines, devices and readers of data can do, and what a configuration asks of them.

One table for `asyncrl check`, for the start of the roles (`refuse`) and for docs/capabilities.md. Guarantees:
1. a part refuses exactly what `REFUSED` (or the list of features of a device) says, with the setting, the reason and a
   remedy; parts of plugins refuse nothing here;
2. nothing is imported and no file is read: a model is its config.json, a device its type.

`tests/unit/test_capabilities.py` builds every pair and compares check, start and table.
Example: `learner.backend = "megatron"` with a Gemma-2: config.model at `model.path`, "model_type 'gemma2': backend
'megatron' builds llama, qwen2, ..".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from asyncrl.config.model_facts import (
    ATTENTION_CAP,
    HEAD_CAP,
    MEGATRON_MODELS,
    MROPE_MODELS,
    TILE_MODELS,
    VISION_MODELS,
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
from asyncrl.config.sections.lora import TAKE_WHOLE
from asyncrl.config.tree import Config
from asyncrl.device_features import DEVICES
from asyncrl.errors import ConfigError

Role = Literal["learner", "producer"]
#: Ranks that send a version by transport `direct`: a large host has eight network cards.
MOST_SENDERS = 8
NO_MODEL: Model = {}

#: Names of devices that torch calls differently.
OTHER_NAMES = {"rocm": "cuda", "hip": "cuda", "amd": "cuda", "gpu": "cuda", "nvidia": "cuda", "ascend": "npu"}
ENGINES = ("hf", "vllm", "vllm_http", "sglang", "dataset")
BACKENDS = ("fsdp2", "megatron")

# ---------------------------------------------------------------- features


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


def _get(config: Config, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found


def _switch(key: str, *, needs: str = "") -> Feature:
    return Feature(f"`{key}`", key, lambda config, _: f"{key} = true" if _get(config, key) else "", needs)


def _value(key: str, value: str, title: str = "", *, needs: str = "") -> Feature:
    words = f"{key} = {value!r}"
    return Feature(title or f'`{key} = "{value}"`', key, lambda c, _: words if _get(c, key) == value else "", needs)


def _number(key: str, least: int) -> Feature:
    return Feature(f"`{key}`", key, lambda c, _: f"{key} = {_get(c, key)}" if _get(c, key) > least else "")


def _needs_model(name: str, title: str) -> Feature:
    key = "learner.algorithm.advantage"

    def asks(config: Config, _: Model) -> str:
        entry = algorithms.ADVANTAGES.get(_get(config, key)) if config.learner.mode == "rl" else None
        return f"{key} = {_get(config, key)!r}, which needs a {title}" if entry and name in entry.needs else ""

    return Feature(title, key, asks)


def _model(title: str, words: Callable[[Model], str]) -> Feature:
    return Feature(title, "model.path", lambda _, model: words(model))


def _head(what: str, words: Callable[[Model], str]) -> Feature:
    title = f"logits that are {what} after the head"
    return Feature(title, "model.path", lambda c, m: words(m) if c.learner.mode != "reward_model" else "")


def _capped(config: Config, model: Model, key: str) -> str:
    cap = find_cap(model, ATTENTION_CAP)
    return f"{key} = {_get(config, key)!r} with {ATTENTION_CAP} = {cap}" if cap else ""


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
        if (value := _get(config, f"learner.{name}")) != plain:
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
        lambda c, _: f"{c.sampling.cut} with sampling.truncation = 'exact'" if c.sampling.wants_support else ""),
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

# ---------------------------------------------------------------- refusals

FSDP2 = "use fsdp2"
TEXT_ALONE = ("trains on token ids alone", "use a language model without other inputs")
NO_IMAGES = ("gets no images of such a model", "set producers.engine = 'hf', or use a language model")
NO_FAMILY = ("has no inputs for it", f"use a language model, or one of {', '.join(VISION_MODELS)}")
KEEPS_FEATURES = ("keeps the features of an image when weights change", "set both to false, or use another engine")
ENCODES = ("trains decoders alone", "use a decoder")
HEAD = ("computes log-probs from the head itself", "use a model without it")
NO_SUPPORT = (
    "does not record the tokens that a cut leaves: gradients would be biased",
    "set sampling.truncation = 'biased' if you accept the bias, or sample without a cut",
)
NO_SECOND = ("keeps no version next to a newer one", "set evaluation.lane = 'before_swap' or 'evaluators'")
NO_CHOICES = ("does not record the experts of a token", "set learner.router_replay = false, or use the engine hf")
NO_DRAFTS = ("drafts no tokens of earlier text", "set producers.speculative_tokens = 0, or use the engine hf")
SPLIT = "cannot split so; it has "

#: Part -> feature -> reason and remedy. What is neither here nor in `UNUSED` works.
REFUSED: dict[str, dict[str, tuple[str, str]]] = {
    "fsdp2": {
        "pipeline": (f"{SPLIT}replicate, tensor, sequence, expert", "set it to 1, or use megatron"),
        "varlen_float32": ("computes it in half precision", "set model.dtype = 'bfloat16', or auto"),
        "other_senses": NO_FAMILY,
        "vision_layout": ("trains its policy alone, on whole rows", "leave it out, or use a language model"),
        "encoder_decoder": ENCODES,
        "head_scale": HEAD,
        "attention_cap": ("needs a kernel that caps", "leave it at auto, or set it to eager"),
        "attention_cap_split": (
            "cannot split the attention of auto and eager then",
            "set it to 1, or model.attn_implementation = 'flash_attention_2' (flash-attn 2.6 or later)",
        ),
    },
    "megatron": {
        "float16": ("has no loss scale for float16", "use bfloat16, or fsdp2"),
        "reward_model": ("trains no reward model", FSDP2),
        "iteration": ("keeps the start weights as the reference", FSDP2),
        "process": ("does not train", FSDP2),
        "lora": ("trains all weights: Megatron-core has no adapters", FSDP2),
        **dict.fromkeys(("replicate", "sequence"), (f"{SPLIT}tensor, pipeline, expert", "set it to 1, or use fsdp2")),
        **{name: (f"has no {name}", FSDP2) for name in ("cpu_offload", "reference_offload", "offload_idle", "liger")},
        "compile": ("does not compile layers", FSDP2),
        "muon": ("has no muon: Megatron-core's does not divide its states over shares", "use adamw, or fsdp2"),
        "adamw_8bit": ("has no adamw_8bit: Megatron-core keeps states in 16 bits or more", "use adamw, or fsdp2"),
        **dict.fromkeys((*SENSES, "vision_layout"), TEXT_ALONE),
        "encoder_decoder": ENCODES,
        "architecture": (f"builds {', '.join(MEGATRON_MODELS)}", FSDP2),
        "dense_variant": ("has no layers for it", FSDP2),
        "head_scale": HEAD,
        "head_cap": HEAD,
        **dict.fromkeys(("attention_cap", "attention_cap_split"), ("has no layers for it", FSDP2)),
    },
    "hf": {
        "speculation_by_caches": ("cannot forget a wrong draft in caches", "set producers.speculative_tokens = 0"),
        "other_senses": NO_FAMILY,
        "encoder_decoder": ("serves decoders alone", "use a decoder, or another engine (producers.engine)"),
    },
    **{
        name: {
            "adapter": ("takes whole weights alone", "set learner.lora.publish = 'auto'"),
            "exact_truncation": NO_SUPPORT,
            "second_weights": NO_SECOND,
            "router_replay": NO_CHOICES,
            **dict.fromkeys(("speculation", "speculation_by_caches"), NO_DRAFTS),
            **dict.fromkeys(SENSES[1:], NO_IMAGES),
            **({"moving_tower": KEEPS_FEATURES} if name == "sglang" else {}),
        }
        for name in TAKE_WHOLE
    },
    "dataset": {},
}  # fmt: skip
#: Part -> features that have no effect on it.
UNUSED: dict[str, tuple[str, ...]] = {"fsdp2": ("sequence_parallel",), "megatron": ("varlen", "varlen_float32")}


class Refusal(NamedTuple):
    """A request that a part refuses."""

    code: str
    key: str
    message: str
    remedy: str

    def error(self) -> ConfigError:
        return ConfigError(self.code, self.message, where=self.key, remedy=self.remedy)


def find_refusals(
    config: Config, model: Model = NO_MODEL, *, role: Role | None = None, device: str = ""
) -> Iterator[Refusal]:
    """What the parts of this configuration refuse. `role`: only its part; `device`: the type behind `auto`."""
    if role != "producer":
        yield from _find(config, model, config.learner.backend, OF_LEARNERS, what="backend")
        yield from _find_on_device(config, model, device)
    if role != "learner":
        yield from _find(config, model, config.producers.engine, OF_ENGINES, what="engine")
    yield from _find_unknown_devices(config, role)


def find_folder_refusals(
    config: Config, model: Model, part: str, *, key: str, scores: bool = False
) -> Iterator[Refusal]:
    """What a part refuses about a further model folder, named by `key`: of a critic, a judge. `scores`: its head gives
    scores, not log-probs.
    """
    what = "backend" if part in BACKENDS else "engine"
    names = OF_LEARNERS if part in BACKENDS else OF_ENGINES
    asked = tuple(
        name for name in names if FEATURES[name].of_model and not (scores and name in ("head_scale", "head_cap"))
    )
    yield from (one._replace(key=key) for one in _find(config, model, part, asked, what=what))


def _find(config: Config, model: Model, part: str, names: tuple[str, ...], *, what: str) -> Iterator[Refusal]:
    for name in names:
        feature, refused = FEATURES[name], REFUSED.get(part, {}).get(name)
        if refused and (asked := feature.asks(config, model)):
            code = "config.model" if feature.of_model else "config.conflict"
            yield Refusal(code, feature.key, f"{asked}: {what} {part!r} {refused[0]}", refused[1])


def _find_on_device(config: Config, model: Model, device: str) -> Iterator[Refusal]:
    kind = device_type(config.learner.device)
    kind = device if kind == "auto" else kind
    for name in OF_LEARNERS:
        feature = FEATURES[name]
        own = (*REFUSED.get(config.learner.backend, {}), *UNUSED.get(config.learner.backend, ()))
        if not feature.needs or name in own or kind not in DEVICES:
            continue
        if feature.needs not in DEVICES[kind] and (asked := feature.asks(config, model)):
            able = [one for one, features in DEVICES.items() if feature.needs in features]
            here = f"learner.device = {config.learner.device!r}"
            if device_type(config.learner.device) == "auto":
                here += f", which is {kind} here"
            what = f"{asked} needs a device with {feature.needs} ({', '.join(able)}), and {here}"
            yield Refusal("config.conflict", feature.key, what, f"leave it out, or set learner.device = {able[0]!r}")


def _find_unknown_devices(config: Config, role: Role | None) -> Iterator[Refusal]:
    places = [
        ("learner.device", config.learner.device, "learner", config.learner.backend in BACKENDS),
        ("producers.device", config.producers.device, "producer", config.producers.engine in ENGINES),
        *((f"judge[{number}].device", one.device, "reward", one.kind == "classifier" or one.engine in ENGINES)
          for number, one in enumerate(config.judge)),
    ]  # fmt: skip
    for key, setting, owner, ours in places:
        kind = device_type(setting)
        if ours and role in (None, owner) and kind != "auto" and kind not in DEVICES:
            other = OTHER_NAMES.get(kind.lower())
            remedy = f"torch calls these devices {other}: set it to {other!r}" if other else "use one of these, or auto"
            what = f"{key} = {setting!r} is not auto or one of {', '.join(DEVICES)}, with a number such as cuda:1"
            yield Refusal("config.type", key, what, remedy)


def device_type(setting: str) -> str:
    """The type in a setting such as `cuda:1`; anything else than a number behind the colon belongs to the type.

    >>> device_type("cuda:1"), device_type("auto"), device_type("cuda:one")
    ('cuda', 'auto', 'cuda:one')
    """
    kind, colon, number = setting.partition(":")
    return kind if not colon or (number.isdigit() and kind != "auto") else setting


def refuse_cuts(config: Config, *, able: bool, key: str) -> None:
    """Raise `config.conflict` if draws are cut exactly and a part that `key` names, of any package, is not able to."""
    if config.sampling.wants_support and config.producers.engine != "dataset" and not able:
        what = f"{FEATURES['exact_truncation'].asks(config, NO_MODEL)}: {key} = {_get(config, key)!r} {NO_SUPPORT[0]}"
        raise ConfigError("config.conflict", what, where="sampling.truncation", remedy=NO_SUPPORT[1])


def refuse(config: Config, model: Model, *, role: Role, device: str = "") -> None:
    """Raise the first refusal of a role at its start, with the others in its message.

    Raises:
        ConfigError: `config.conflict`, `config.model` or `config.type`.
    """
    found = list(find_refusals(config, model, role=role, device=device))
    if found:
        first = found[0]
        raise first._replace(message="; ".join(one.message for one in found)).error()
