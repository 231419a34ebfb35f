"""Checks the files that a configuration names: model, rows, keys.

Guarantees:
1. of a model it reads config.json and file names, of every data file the first row (in files up to `COUNT_LIMIT_BYTES`
   all lines are counted, and searched for images, videos and audio; images of a model that sees them are looked at in
   the first rows alone);
2. it writes nothing and reads no weights.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.config.media import MEDIA_REMEDY, MEDIA_WORDS, find_media
from asyncrl.config.mode import answer_columns, derive_steps, evaluation_data, streams
from asyncrl.config.rules import learner
from asyncrl.config.sections.environment import REQUESTS
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError, ConfigErrors, error_for
from asyncrl.images.rows import takes_images
from asyncrl.net.keys import read_keys
from asyncrl.preflight.code import check_companions, import_problem
from asyncrl.preflight.images import check_images
from asyncrl.runtime.data_files import KINDS, count_arrow, list_files, look, media_rows, split_paths, unknown_kind
from asyncrl.runtime.model_folder import POSITIONS_REMEDY, model_json, positions_problem

COUNT_LIMIT_BYTES = 1 << 30  # larger files are not counted
#: Prompt columns of known data sets, the likeliest first.
PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "messages", "input", "text", REQUESTS)
HUB_NAME = re.compile(r"[\w.\-]+/[\w.\-]+")
ON_THE_HUB = "nothing is fetched by itself; if it is a name of the Hugging Face hub"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def check_model(config: Config) -> Iterator[AsyncRLError]:
    """The model folder has a configuration, weights and a tokenizer; other model folders have the first two."""
    yield from check_companions(config)
    yield from check_model_folder(config)
    folder = Path(config.model.path)
    if not folder.is_dir():
        return
    longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if not streams(config) and (problem := positions_problem(model_json(folder), longest)):
        where = f"model.path = {config.model.path!r}"
        yield ConfigError("config.model", problem, where=where, remedy=POSITIONS_REMEDY)
    yield from check_layout(config, folder / "config.json")


def check_model_folder(config: Config) -> Iterator[AsyncRLError]:
    """`model.path` is a folder with a configuration, weights and a tokenizer."""
    folder = Path(config.model.path)
    where = f"model.path = {config.model.path!r}"
    if not folder.is_dir():
        name = config.model.path
        remedy = f"{ON_THE_HUB}: hf download {name} --local-dir models/{folder.name}, and name that folder"
        yield ConfigError(
            "config.model", "no such folder", where=where, remedy=remedy if HUB_NAME.fullmatch(name) else ""
        )
        return
    if not (folder / "config.json").is_file():
        yield ConfigError("config.model", "it has no config.json", where=where)
    if not list(folder.glob("*.safetensors")):
        yield ConfigError("config.model", "it has no *.safetensors (weights)", where=where)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        yield ConfigError("config.tokenizer", f"it has none of {', '.join(TOKENIZERS)}", where=where)


def check_layout(config: Config, path: Path) -> Iterator[AsyncRLError]:
    """Heads and experts of the model divide by `[learner.parallel]`."""
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, *UNREADABLE):  # reported when the model is loaded
        return
    if isinstance(model, dict):
        for code, message, key, _ in learner.model_problems(config, model):
            yield error_for(code, message, where=".".join(key))


def data_paths(paths: str) -> list[Path]:
    """The files of a `data.path`; a part without files stays as it is, for `check_data` to report."""
    found: list[Path] = []
    for part in split_paths(paths):
        try:
            found += list_files(part)
        except ConfigError:
            found.append(Path(part))
    return found


def check_data(config: Config, section: str = "data") -> Iterator[AsyncRLError]:
    """The first row of every file has the prompt column; a source can be imported."""
    if section == "data" and config.evaluation.enabled:
        held_out = msgspec.structs.replace(config, data=evaluation_data(config))
        yield from check_data(held_out, "evaluation")
    if config.data.source:
        problem = import_problem(config.data.source, env=config.environment_variables)
        if problem:
            yield ConfigError("config.data", problem, where=f"{section}.source = {config.data.source!r}")
    for part in split_paths(config.data.path):
        try:
            paths = list_files(part)
        except ConfigError as error:
            yield ConfigError("config.data", error.message, where=f"{section}.path = {part!r}", remedy=error.remedy)
            continue
        for path in paths:
            yield from _check_file(config, path, where=f"{section}.path = {str(path)!r}")


def _check_file(config: Config, path: Path, *, where: str) -> Iterator[AsyncRLError]:
    """The first row has the columns."""
    if not path.exists():
        fetch = f"hf download {path} --repo-type dataset --local-dir data/{path.name}"
        remedy = f"{ON_THE_HUB}: {fetch}, and name its files" if HUB_NAME.fullmatch(str(path)) else ""
        yield ConfigError("config.data", "no such file", where=where, remedy=remedy if path.suffix not in KINDS else "")
        return
    try:
        row = first_row(path)
    except (OSError, ValueError) as error:
        yield ConfigError("config.data", getattr(error, "strerror", None) or str(error), where=where)
        return
    if row is None:
        yield ConfigError("config.data", "it has no rows", where=where)
        return
    if takes_images(config.model.path):
        yield from check_images(config, path, where=where)
    elif media := find_media_row(path):
        yield ConfigError("config.data", f"{media}: rows are text alone", where=where, remedy=MEDIA_REMEDY)
    wanted, preference = {"data.prompt_key": config.data.prompt_key}, config.learner.preference
    if where.startswith("data."):  # held-out rows need no answers
        wanted |= {f"data.{setting}": column for setting, column in answer_columns(config, row).items()}
        if config.learner.mode == "reward_model" and preference.margin_key:
            wanted["learner.preference.margin_key"] = preference.margin_key  # a missing one is a margin of 0
    for setting, column in wanted.items():
        if column not in row:
            columns = ", ".join(sorted(row)) or "none"
            message = f"no column {column!r} ({setting}); it has: {columns}"
            likely = next((name for name in PROMPT_COLUMNS if name in row), "") if setting == "data.prompt_key" else ""
            yield ConfigError(
                "config.data",
                message,
                where=where,
                remedy=f"set data.prompt_key = {json.dumps(likely)}" if likely else "",
            )


def prompt_column(paths: Sequence[Path]) -> str:
    """The column with the prompts: `prompt`, or the likeliest one of the rows."""
    try:
        row = first_row(paths[0]) or {} if paths else {}
    except (OSError, ValueError):  # reported by the check
        row = {}
    return next((column for column in PROMPT_COLUMNS if column in row), "prompt")


def has_template(folder: Path) -> bool:
    """Whether the tokenizer of a model folder has a chat template, according to its files."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        tree = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, *UNREADABLE):
        return False
    return isinstance(tree, dict) and bool(tree.get("chat_template"))


def has_texts(paths: Sequence[Path], column: str) -> bool:
    """Whether the prompts of the first file are plain texts."""
    try:
        row = first_row(paths[0]) if paths else None
    except (OSError, ValueError):  # reported by `check_data`
        return False
    return isinstance((row or {}).get(column), str)


def data_notes(config: Config) -> Iterator[str]:
    """Note on plain texts for a chat model: they skip its template."""
    data = config.data
    if data.as_chat or not data.chat_template or not config.environment.is_single_turn:
        return
    if has_template(Path(config.model.path)) and has_texts(data_paths(config.data.path), data.prompt_key):
        yield (
            "the prompts are plain text, which the model's chat template does not touch; "
            "data.as_chat = true makes a message of the user of each"
        )


def settle_steps(config: Config) -> Config:
    """Derive `learner.steps` from `data.epochs`, if that is set."""
    if not config.data.epochs:
        return config
    if not all(path.exists() for path in data_paths(config.data.path)):
        return config  # reported by `check_data`
    counts = [count_rows(path) for path in data_paths(config.data.path)]
    try:
        return derive_steps(config, sum(filter(None, counts)) if counts and all(counts) else None)
    except ConfigError as error:
        raise ConfigErrors([error]) from None


def first_row(path: Path) -> dict[str, Any] | None:
    """The first row of a file, or None; .parquet and .arrow give empty texts, and None for other types."""
    if path.suffix in (".parquet", ".arrow"):
        columns, rows = look(path)
        return None if rows == 0 else columns
    if path.suffix not in KINDS:
        raise ValueError(unknown_kind(path))
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".json":
            rows_of = json.load(file)
            if not isinstance(rows_of, list):
                raise ValueError("it is not a list of rows")
            row = rows_of[0] if rows_of else None
        else:
            line = next((line for line in file if line.strip()), "")
            row = json.loads(line) if line else None
    if row is not None and not isinstance(row, dict):
        raise ValueError("its first row is not an object")
    return row


def find_media_row(path: Path) -> str:
    """The first row of a file with images, videos or audio, and where; empty without one, or if the file is too large
    or cannot be read (the readers look again).
    """
    try:
        if path.stat().st_size > COUNT_LIMIT_BYTES:
            return ""
        for number, row in enumerate(_rows_with_media_words(path)):
            if isinstance(row, dict) and (media := find_media(row)):
                return f"row {number} has {media}"
    except (OSError, ValueError, ImportError):
        return ""
    return ""


def _rows_with_media_words(path: Path) -> Iterator[Any]:
    """Every row; None for those that cannot hold media, which are not decoded."""
    if path.suffix in (".parquet", ".arrow"):
        yield from media_rows(path)
    elif path.suffix == ".json":
        yield from msgspec.json.decode(path.read_bytes())
    else:
        words = [word.encode() for word in MEDIA_WORDS]
        with path.open("rb") as lines:
            for line in filter(bytes.strip, lines):
                yield msgspec.json.decode(line) if any(word in line for word in words) else None


def count_rows(path: Path) -> int | None:
    """Number of rows of a file; None if counting would take long or the file cannot be read."""
    try:
        if path.stat().st_size > COUNT_LIMIT_BYTES:
            return None
        if path.suffix == ".parquet":
            return look(path)[1]
        if path.suffix == ".arrow":
            return count_arrow(path)
        if path.suffix == ".json":
            return len(json.loads(path.read_text(encoding="utf-8")))
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except (OSError, ValueError, ImportError):  # only informative; `check_data` reports mistakes in the file
        return None


def check_folders(config: Config) -> Iterator[AsyncRLError]:
    """The folders that the run writes can be made."""
    for key, text in (("run.dir", config.run.dir), ("weightsync.disk_dir", config.weightsync.disk_dir)):
        if not text or "://" in text:
            continue
        there = next(folder for folder in (Path(text).resolve(), *Path(text).resolve().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            what = "is no folder" if not there.is_dir() else "cannot be written by this user"
            yield error_for("file.refused", f"{there} {what}", where=f"{key} = {text!r}")


def check_keys(config: Config, *, joining: bool) -> Iterator[AsyncRLError]:
    """The key file is readable and private; the owner of the buffer may still have to create it."""
    path = Path(config.network.key_file)
    if not config.network.key_file or (not joining and not path.exists() and path.parent.is_dir()):
        return
    try:
        read_keys(path)
    except AsyncRLError as error:
        where = f"network.key_file = {config.network.key_file!r}"
        yield error_for(error.code, error.message, where=where, remedy=error.remedy)
