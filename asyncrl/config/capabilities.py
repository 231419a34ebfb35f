"""What back-ends, engines and devices can do of the features that a configuration asks for.

One table for `asyncrl check`, for the start of the roles (`refuse`) and for docs/capabilities.md. Guarantees:
1. a part refuses exactly what `REFUSED` (or the list of features of a device) says, with the setting, the reason and a
   remedy; parts of plugins refuse nothing here;
2. nothing is imported and no file is read: a model is its config.json, a device its type.

`tests/unit/test_capabilities.py` builds every pair and compares check, start and table.
Example: `learner.backend = "megatron"` with a Gemma-2: config.model at `model.path`, "model_type 'gemma2': backend
'megatron' builds llama, qwen2, ..".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from asyncrl.config.features import FEATURES, NO_MODEL, OF_ENGINES, OF_LEARNERS, SENSES, get_setting
from asyncrl.config.model_facts import MEGATRON_MODELS, VISION_MODELS, Model
from asyncrl.config.sections.lora import TAKE_WHOLE
from asyncrl.config.tree import Config
from asyncrl.device_features import DEVICES
from asyncrl.errors import ConfigError

Role = Literal["learner", "producer"]
#: Ranks that send a version by transport `direct`: a large host has eight network cards.
MOST_SENDERS = 8

#: Names of devices that torch calls differently.
OTHER_NAMES = {"rocm": "cuda", "hip": "cuda", "amd": "cuda", "gpu": "cuda", "nvidia": "cuda", "ascend": "npu"}
ENGINES = ("hf", "vllm", "vllm_http", "sglang", "dataset")
BACKENDS = ("fsdp2", "megatron")

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
    if config.training_sampling.wants_support and not able:
        asked, value = FEATURES["exact_truncation"].asks(config, NO_MODEL), get_setting(config, key)
        what = f"{asked}: {key} = {value!r} {NO_SUPPORT[0]}"
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
