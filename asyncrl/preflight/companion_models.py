"""Checks the folders of further models: critic, process reward model, reference, judges.

Guarantees:
1. a folder without a configuration or weights is `config.model`, with the setting that names it;
2. so are a process reward model that is not a language model, and a vocabulary smaller than the policy's. It reads only
   config.json and loads no weights.

Example: `learner.process_reward.model` names the export of a reward model: it has a scalar head, no log-probs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError

if TYPE_CHECKING:
    from asyncrl.config.tree import Config


def check_companions(config: Config) -> Iterator[AsyncRLError]:
    """Mistakes in the folders of the critic and of the process reward model."""
    learner = config.learner
    folders = {
        "critic.model": learner.critic.model,
        "process_reward.model": learner.process_reward.model,
        "process_reward.reference": learner.process_reward.reference,
    }
    vocabulary = model_json(config.model.path).get("vocab_size")
    for key, folder in folders.items():
        if folder and (problem := _problem(key, Path(folder), vocabulary)):
            yield ConfigError("config.model", problem, where=f"learner.{key} = {folder!r}")


def _problem(key: str, folder: Path, vocabulary: Any) -> str:
    found = model_json(folder)
    if not found or not list(folder.glob("*.safetensors")):
        return "no such folder, or it has no config.json or no *.safetensors"
    kinds = found.get("architectures") or ()
    if key.startswith("process_reward") and any("Classification" in str(kind) for kind in kinds):
        return "it is a classifier; process rewards come from a language model: name the one that it was made from"
    own = found.get("vocab_size")
    if isinstance(own, int) and isinstance(vocabulary, int) and own < vocabulary:
        return f"its vocabulary has {own} tokens, that of model.path {vocabulary}: they must share a tokenizer"
    return ""


def model_json(folder: str | Path) -> dict[str, Any]:
    """The config.json of a model folder; empty if it cannot be read."""
    try:
        found = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, *UNREADABLE):
        return {}
    return found if isinstance(found, dict) else {}


def check_models(config: Config) -> Iterator[AsyncRLError]:
    """The folders and key files that judges name exist."""
    for table in config.judge:
        where = f"judge {table.name!r}"
        if table.kind in ("classifier", "generative"):
            folder = Path(table.model)
            if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
                yield ConfigError("config.model", f"{table.model!r} has no config.json or no weights", where=where)
        if table.api_key_file and not Path(table.api_key_file).is_file():
            yield ConfigError("config.file", f"api_key_file {table.api_key_file!r} is missing", where=where)
