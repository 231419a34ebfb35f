"""The only module that lets transformers read a model folder: configurations, tokenizers, models.

A folder may bring Python of its own (`auto_map` of config.json and tokenizer_config.json). Guarantees:
1. it runs only with `trust_remote_code = true`, which every caller takes from the configuration (`[model]` or a
   `[[judge]]`); without it transformers' own classes are used, and a folder of another kind is refused
   (`config.trust`);
2. nothing is fetched: files come from the folder alone, and no question is asked at a terminal.

`tests/unit/test_model_folders.py` forbids other calls of transformers that read a folder. It is imported when it is
needed. Example: a folder with `model_type = "llama"` and an `auto_map` loads as transformers' Llama.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError

#: A language model, or a sequence classifier: a body with a head of scores.
Kind = Literal["language", "classifier"]
#: Fields of `config.json` that tools rewrite without changing the model.
IGNORED = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "_attn_implementation"}
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja")


def model_json(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model folder; empty if it cannot be read."""
    try:
        found = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, *UNREADABLE):
        return {}
    return found if isinstance(found, dict) else {}


def model_fingerprint(path: str | Path, *, dtype: str) -> str:
    """Digest of a model folder that both ends of a run must agree on before they exchange tokens or weights.

    It covers the model's shape (`config.json` without fields that change no tensor), the tokenizer with its chat
    template, and the run's dtype (`model.dtype`); weights have digests of their own. 32 hex digits, the same on every
    host and Python version.

    Raises:
        ConfigError: `config.model`: there is no readable config.json.
    """
    folder = Path(path)
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, *UNREADABLE) as error:
        raise ConfigError("config.model", f"config.json: {error}", where=str(folder)) from None
    shape = {key: value for key, value in config.items() if key not in IGNORED}
    digest = hashlib.blake2b(msgspec.json.encode(shape, order="deterministic"), digest_size=16)
    digest.update(dtype.encode())
    for name in TOKENIZER_FILES:
        file = folder / name
        if file.exists():
            digest.update(name.encode() + b"\0" + hashlib.blake2b(file.read_bytes(), digest_size=16).digest())
    return digest.hexdigest()


#: What to do about too few positions.
POSITIONS_REMEDY = "lower data.max_prompt_tokens or sampling.max_new_tokens, or train a model with more positions"


def find_positions(model: Mapping[str, Any]) -> int | None:
    """Positions that a model can read, by its config.json; None if it does not say, or if they are stretched.

    >>> find_positions({"n_positions": 1024}), find_positions({"n_positions": 64, "rope_scaling": {"type": "yarn"}})
    (1024, None)
    """
    inner = model.get("text_config") or model
    limit = inner.get("max_position_embeddings") or inner.get("n_positions")
    rope = inner.get("rope_parameters") or inner.get("rope_scaling") or {}
    each = [part for part in rope.values() if isinstance(part, dict)] or [rope]  # by type of layer, or one for all
    # yarn and others reach beyond the stated limit
    stretched = any(part.get("rope_type", part.get("type", "default")) != "default" for part in each)
    return None if stretched or not isinstance(limit, int) else limit


def positions_problem(model: Mapping[str, Any], longest: int) -> str:
    """Why a model cannot read `longest` tokens; empty if it can, or does not say.

    >>> positions_problem({"max_position_embeddings": 64}, 96)
    'max_position_embeddings = 64, below prompt + response = 96'
    """
    limit = find_positions(model)
    if limit is None or limit >= longest:
        return ""
    return f"max_position_embeddings = {limit}, below prompt + response = {longest}"


def load_config(folder: str | Path, *, trust_remote_code: bool, **fields: Any) -> Any:
    """The configuration of a model; `fields` override its own.

    Raises:
        ConfigError: `config.trust`.
        OSError, ValueError: the folder cannot be read.
    """
    import transformers

    with _refusals(folder):
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **fields
        )


def load_generation_config(folder: str | Path) -> Any:
    """The generation config of a folder. Raises `OSError` if it has none. It cannot bring code."""
    import transformers

    return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)


def load_tokenizer(folder: str | Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder, with the errors of `load_config`."""
    import transformers

    auto: Any = transformers.AutoTokenizer
    with _refusals(folder):
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


def load_image_processor(folder: str | Path, *, trust_remote_code: bool) -> Any:
    """The image processor of a folder that needs Pillow alone, with the errors of `load_config`."""
    import transformers

    auto: Any = transformers.AutoImageProcessor
    with _refusals(folder):
        return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, backend="pil")


def load_model(folder: str | Path, kind: Kind, *, trust_remote_code: bool, **options: Any) -> Any:
    """What `from_pretrained` of this kind returns with these options, with the errors of `load_config`."""
    with _refusals(folder):
        return _auto_class(kind, sees=model_json(folder).get("vision_config") is not None).from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **options
        )


def build_model(config: Any, kind: Kind, *, trust_remote_code: bool, **options: Any) -> Any:
    """A model of a configuration, with new weights; its code is that of the folder that the configuration is from."""
    with _refusals(getattr(config, "name_or_path", "")):
        sees = getattr(config, "vision_config", None) is not None
        return _auto_class(kind, sees=sees).from_config(config, trust_remote_code=trust_remote_code, **options)


def _auto_class(kind: Kind, *, sees: bool) -> Any:
    """`sees`: a language model with a vision tower, which transformers lists elsewhere."""
    import transformers

    language = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    return getattr(transformers, {"language": language, "classifier": "AutoModelForSequenceClassification"}[kind])


@contextmanager
def _refusals(folder: str | Path) -> Iterator[None]:
    """Turn the refusal of transformers to run code into `config.trust`. It has no class of its own."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            "config.trust",
            "it can only be read by Python code that the folder brings, and that code may not run",
            where=str(folder),
        ) from error
