"""The tensors of a model's folder, for engines with their weights in another process.

Guarantees:
1. it reads `config.json` and the headers of safetensors files, no weights; no torch;
2. `check_tensors` refuses (`sync.plan`) a version with tensors that the folder does not have, with other shapes, or
   without some that it has. A tied output head is optional, and so are tensors that no learner trains (`is_trained`);
3. without safetensors files nothing is known, and nothing is refused.

Example: a folder holds `model.embed_tokens.weight` `[45, 128]`. A version that has it as `[44, 128]` is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.config import Config
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.wire import Tensor

LONGEST_HEADER = 64 << 20
HEAD = "lm_head.weight"
#: Model types whose folders have names from before transformers put tower and language part next to each other.
OLDER_NAMES = ("qwen2_vl", "qwen2_5_vl")


class _Entry(msgspec.Struct):
    shape: tuple[int, ...]


class _Text(msgspec.Struct):
    vocab_size: int = 0
    num_hidden_layers: int = 0


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Shape(msgspec.Struct):
    model_type: str = ""
    vocab_size: int = 0
    num_hidden_layers: int = 0
    tie_word_embeddings: bool = True
    text_config: _Text = msgspec.field(default_factory=_Text)


class ModelFacts(msgspec.Struct, frozen=True):
    """`vocab`: number of token ids, 0 if unknown. `shapes` by name, empty if unknown."""

    vocab: int
    shapes: dict[str, tuple[int, ...]]
    tied: bool
    layers: int = 0


def read_facts(path: str | Path) -> ModelFacts:
    """Facts of a folder in Hugging Face format. Raises `config.model` if it cannot be read."""
    folder = Path(path)
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        shape = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Shape)
        for file in weight_files(folder):
            shapes.update(_header(file))
    except (OSError, *UNREADABLE) as error:
        raise ConfigError("config.model", f"{type(error).__name__}: {error}", where=str(folder)) from None
    if shape.model_type in OLDER_NAMES:
        shapes = {published_name(name): known for name, known in shapes.items()}
    vocab = shape.vocab_size or shape.text_config.vocab_size
    layers = shape.num_hidden_layers or shape.text_config.num_hidden_layers
    return ModelFacts(vocab, shapes, shape.tie_word_embeddings, layers)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads: `model.safetensors`, else those of the index, else all. Folders of
    some models also have the same weights by other names (`consolidated.safetensors`).

    Raises:
        OSError, ValueError: the index cannot be read.
    """
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if whole.exists():
        return [whole]
    if index.exists():
        named = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()
        return [folder / name for name in sorted({*named})]
    return sorted(folder.glob("*.safetensors"))


def is_trained(name: str, layers: int) -> bool:
    """Whether a learner has this tensor of a folder: transformers leaves out layers that predict further tokens
    (`mtp.*`, or behind the last layer) and buffers of older conversions.

    >>> [is_trained(name, 2) for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.2.eh_proj.weight")]
    [True, False]
    """
    found = re.search(r"\blayers\.(\d+)\.", name)
    beyond = found is not None and name.startswith("model.layers.") and 0 < layers <= int(found[1])
    return not (beyond or name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq"))


def published_name(name: str) -> str:
    """The name of a tensor in transformers' model, by which a learner publishes it, from its name in a folder of
    `OLDER_NAMES`.

    >>> published_name("visual.merger.ln_q.weight"), published_name("model.norm.weight")
    ('model.visual.merger.ln_q.weight', 'model.language_model.norm.weight')
    """
    if name.startswith("visual."):
        return f"model.{name}"
    body = name.removeprefix("model.")
    return name if body == name or body.startswith(("visual.", "language_model.")) else f"model.language_model.{body}"


def folder_name(name: str) -> str:
    """The inverse of `published_name`: SGLang loads vision-language models by these names.

    >>> folder_name("model.visual.merger.ln_q.weight"), folder_name("model.language_model.norm.weight")
    ('visual.merger.ln_q.weight', 'model.norm.weight')
    """
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name of a safetensors file: 8 bytes with the length of a JSON object, then that object."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > LONGEST_HEADER:
            raise ValueError(f"{file.name}: a header of {size} bytes")
        entries = msgspec.json.decode(stream.read(size), type=dict[str, msgspec.Raw])
    return {
        name: msgspec.json.decode(raw, type=_Entry).shape for name, raw in entries.items() if name != "__metadata__"
    }


def check_tensors(facts: ModelFacts, tensors: Sequence[Tensor]) -> None:
    """Raise `sync.plan` if these are not the tensors of the model."""
    if not facts.shapes:
        return
    given = {tensor.name for tensor in tensors}
    for tensor in tensors:
        known = facts.shapes.get(tensor.name)
        if known is None and not (facts.tied and tensor.name == HEAD):
            raise AsyncRLError("sync.plan", f"this model has no parameter {tensor.name!r}")
        if known is not None and (known != tuple(tensor.shape)):
            raise AsyncRLError("sync.plan", f"{tensor.name}: {tuple(tensor.shape)} sent, {known} here")
    missing = [name for name in facts.shapes if name not in given and not (facts.tied and name == HEAD)]
    missing = [name for name in missing if is_trained(name, facts.layers)]
    if missing:
        values = sum(math.prod(facts.shapes[name]) for name in missing)
        what = f"the manifest lacks {len(missing)} parameters ({values} values), first {missing[0]!r}"
        raise AsyncRLError("sync.plan", what)


def weights_dtype(config: Config) -> str:
    """Name of the dtype of an engine's weights."""
    return config.producers.dtype if config.producers.dtype != "auto" else config.model.dtype
