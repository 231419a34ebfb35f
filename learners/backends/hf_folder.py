"""Writes a trained module as a Hugging Face folder.

Guarantees:
1. weights have the names and layout of `save_pretrained` (fused experts become single ones), each parameter once, in
   files of bounded size. Buffers that a model stores and never trains (the bias of DeepSeek's router) are those of the
   start weights;
2. the folder has config.json with the dtype of the weights, and the generation config, tokenizer, chat template and
   code of the start weights;
3. `write_folder` is collective: only rank 0 holds whole tensors and writes, and all ranks return after it.

Peak host memory of rank 0: one file (5 GB) and one tensor, with fused experts one layer.
Example: `mlp.experts.gate_up_proj` [4, 32, 32] of a Qwen3-MoE becomes 8 tensors [16, 32]: gate_proj and up_proj of 4
experts.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.runtime.model_folder import build_model
from learners.backends.safetensors_writer import MAX_BYTES, ShardFiles
from learners.gang.gang import Gang

#: Files copied from the folder of the start weights.
COPIED_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model*", "*.tiktoken", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "generation_config.json", "*preprocessor_config.json",
)  # fmt: skip
SCORER = "ForSequenceClassification"


def write_folder(
    weights: Iterable[tuple[str, Tensor]],
    folder: Path,
    *,
    dtype: torch.dtype,
    gang: Gang,
    config: Any,
    tokenizer: Path,
    trust_remote_code: bool,
    generation: Any = None,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Write the folder of a model with this config; `tokenizer`: folder of the start weights. Collective.

    `weights`: every parameter by its name in transformers, whole, valid until the next one; `generation`: its
    generation config if the start folder has none.
    """
    writer = None
    if gang.lead:
        writer = FolderWriter(
            folder,
            config,
            dtype=dtype,
            source=tokenizer,
            max_bytes=max_bytes,
            trust_remote_code=trust_remote_code,
        )
    for name, tensor in weights:
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.close(generation)
    gang.barrier()  # bounded: the timeout of the group


class FolderWriter:
    """Takes the tensors of a model one by one, in one process."""

    def __init__(
        self,
        folder: Path,
        config: Any,
        *,
        dtype: torch.dtype,
        source: Path,
        max_bytes: int,
        trust_remote_code: bool,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._source, self._dtype = folder, source, dtype
        self._config = config_for(config, source=source, dtype=dtype)
        self._skeleton = build_skeleton(self._config, trust_remote_code=trust_remote_code)
        self._pieces = Pieces(self._skeleton)
        self.files = ShardFiles(folder, max_bytes=max_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a whole parameter by its name in transformers; it is copied."""
        self._take(self._pieces.add(name, tensor.to(device="cpu", dtype=self._dtype, copy=True)))

    def _take(self, found: dict[str, Tensor]) -> None:
        for name, tensor in found.items():
            self.files.add(name, tensor)

    def close(self, generation: Any = None) -> list[Path]:
        """Write the rest and return the files of weights."""
        self._take(self._pieces.close())
        start = Path(getattr(self._config, "name_or_path", ""))  # of a companion: not the policy's
        start = start if (start / "config.json").exists() else self._source
        for name, tensor in stored_buffers(self._skeleton, start):
            self.files.add(name, tensor)
        written = self.files.close()
        self._config.save_pretrained(self._folder)
        self._copy(self._source, COPIED_FILES)
        if getattr(self._config, "auto_map", None):
            self._copy(start, ("*.py",))
        if generation is not None and not (self._folder / "generation_config.json").exists():
            generation.save_pretrained(self._folder)
        return written

    def _copy(self, source: Path, patterns: Sequence[str]) -> None:
        for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
            target = self._folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


class Pieces:
    """Converts parameters from their form in memory to the form in files. If a written tensor consists of several
    parameters, the parameters of a layer are held until the layer is complete.
    """

    def __init__(self, skeleton: Any) -> None:
        self._skeleton = skeleton
        self._by_layer = _joins(skeleton)
        self._held: dict[str, Tensor] = {}
        self._layer = ""

    def add(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Add a parameter and return the tensors that are ready."""
        if self._skeleton is None:
            return {name: tensor}
        if not self._by_layer:
            return self._revert({name: tensor})
        words = name.split(".")
        number = next((place for place, word in enumerate(words) if word.isdigit()), len(words) - 1)
        layer, ready = ".".join(words[: number + 1]), {}
        if layer != self._layer:
            ready, self._layer = self.close(), layer
        self._held[name] = tensor
        return ready

    def close(self) -> dict[str, Tensor]:
        held, self._held = self._held, {}
        return self._revert(held) if held else {}

    def _revert(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        made: dict[str, Tensor] = revert_weight_conversion(self._skeleton, found)
        # A slice would keep the whole fused tensor in memory.
        return {
            name: part.clone() if part.nbytes < part.untyped_storage().nbytes() else part for name, part in made.items()
        }


def _joins(skeleton: Any) -> bool:
    """Whether a written tensor consists of several parameters."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if skeleton is None:
        return False
    found = [one.reverse_transform() for one in get_model_conversion_mapping(skeleton, add_legacy=False)]
    return any(isinstance(one, WeightConverter) and len(one.source_patterns) > 1 for one in found)


def config_for(config: Any, *, source: Path, dtype: torch.dtype) -> Any:
    """Return the config to write: with the dtype of the weights, and the cache setting that the learner disables."""
    own = copy.deepcopy(config)
    try:
        given = json.loads((source / "config.json").read_text())
    except (OSError, *UNREADABLE):
        given = {}
    own.dtype = dtype
    own.use_cache = bool(given.get("use_cache", True)) if isinstance(given, dict) else True
    return own


def build_skeleton(config: Any, *, trust_remote_code: bool) -> Any:
    """Return the model of a config without memory for weights; None if its class does not support that.

    Raises:
        ConfigError: `config.trust`: its class is code of the folder.
    """
    kinds = getattr(config, "architectures", None) or [""]
    try:
        with torch.device("meta"):
            return build_model(
                config,
                "classifier" if kinds[0].endswith(SCORER) else "language",
                trust_remote_code=trust_remote_code,
            )
    except ConfigError:
        raise
    except Exception:  # a foreign class may raise anything; its tensors keep their names
        return None


def stored_buffers(skeleton: Any, source: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the start weights that a model stores and that are not parameters."""
    from learners.backends.safetensors_writer import open_tensors

    if skeleton is None:
        return
    kept = {name for name, _ in skeleton.named_buffers()} & set(skeleton.state_dict())
    for path in sorted(source.glob("*.safetensors")) if kept else ():
        file = open_tensors(path)
        try:
            for name in sorted(kept & set(file.keys())):
                yield name, file.get_tensor(name)
        finally:
            file.__exit__(None, None, None)
