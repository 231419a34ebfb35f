"""Models and data sets by their names on the Hugging Face hub, fetched once into the hub's own cache.
`asyncrl.runtime.modelscope` does the same with ModelScope.

Guarantees:
1. a name is `owner/name`; a path that exists, or whose first folder exists here, or that names a file of rows, is never
   taken for one;
2. what is fetched of a model is its configuration, safetensors and tokenizer, never pickled weights; of a data set, the
   files of one split in one folder (`owner/name/FOLDER` names it);
3. the folder of a name has the commit in its path (`.../snapshots/COMMIT`), so the resolved configuration of a run, and
   every checkpoint, say which revision was used;
4. without a network, what is in the cache is used. `HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` have their
   usual meaning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from asyncrl.errors import ConfigError
from asyncrl.runtime.data_files import KINDS

Kind = Literal["model", "dataset"]
NAME = re.compile(r"(\w[\w.\-]*/[\w.\-]+)(?:/(.+))?")
FILES: dict[Kind, list[str]] = {
    "model": ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken", "*.py"],
    "dataset": [f"*{kind}" for kind in KINDS],
}
CODES: dict[Kind, str] = {"model": "config.model", "dataset": "config.data"}
ABSENT: dict[Kind, str] = {"model": "no such folder", "dataset": "no such file"}
ASK_S = 5.0  # for one answer of the hub


class OnHub(NamedTuple):
    """A name on the hub. `files`: name -> bytes that are not in the cache."""

    folder: Path
    files: dict[str, int]

    @property
    def revision(self) -> str:
        return self.folder.name


def is_hub_name(text: str, kind: Kind) -> bool:
    """Whether a path can only be a name on the hub: `owner/name`, or `owner/name/FOLDER` of a data set."""
    path = Path(text)
    if path.is_absolute() or path.suffix in KINDS or (kind == "model" and len(path.parts) > 2):
        return False
    return NAME.fullmatch(text) is not None and not Path(path.parts[0]).exists()


def look_up(text: str, kind: Kind, splits: Sequence[str] = ()) -> OnHub:
    """What the hub has under a name, of a data set the files of one of these splits; nothing is fetched. Without an
    answer, what the cache has, if that is whole. Raises `config.model` or `config.data`.
    """
    name, patterns = split_name(text, kind)
    try:
        found: Any = _download(name, kind, patterns, dry_run=True)
    except ConfigError as online:
        wanted = [f"*{split}*" for split in splits] or patterns
        try:
            folder = Path(_download(name, kind, wanted, local_files_only=True))
        except ConfigError:
            raise online from None
        return narrow(OnHub(folder, dict.fromkeys(_files_in(folder, patterns), 0)), text, kind, splits)
    folder = Path(found[0].local_path) if found else Path()
    for _ in PurePosixPath(found[0].filename).parts if found else ():
        folder = folder.parent
    files = {one.filename: one.file_size * one.will_download for one in found}
    return narrow(OnHub(folder, files), text, kind, splits)


def fetch(found: OnHub, text: str, kind: Kind) -> OnHub:
    """Get the files that were found, with a progress bar. Raises `config.model` or `config.data`."""
    name, _ = split_name(text, kind)
    folder = _download(name, kind, list(found.files))
    return OnHub(Path(folder), dict.fromkeys(found.files, 0))


def narrow(found: OnHub, text: str, kind: Kind, splits: Sequence[str]) -> OnHub:
    """With the files of one of these splits alone; no splits: with all. Raises `config.model` or `config.data`."""
    if not found.files:
        raise ConfigError(CODES[kind], f"{text} on the hub has no such files", where=text)
    names = split_files(found, text, splits) if splits else found.files
    return found._replace(files={name: found.files[name] for name in names})


def split_files(found: OnHub, text: str, splits: Sequence[str]) -> list[str]:
    """The files of a split of a data set: those with one of its names in theirs, or the only file.

    Raises:
        ConfigError: `config.data`: there are none, or they are in several folders.
    """
    best = [name for name in found.files if name.endswith(".parquet")] or list(found.files)
    named = [name for name in best if re.search(rf"(?:^|[/_\-])(?:{'|'.join(splits)})", name)]
    chosen = named or (best if len(best) == 1 else [])
    folders = sorted({str(PurePosixPath(name).parent) for name in chosen})
    if len(folders) == 1:
        return sorted(chosen)
    name = NAME.fullmatch(text)
    choices = folders or sorted({str(PurePosixPath(one).parent) for one in best})
    what = f"its files of the split {splits[0]!r} are in {len(folders) or 'no'} folders"
    raise ConfigError(
        "config.data",
        what,
        where=text,
        remedy=f"name one: {', '.join(f'{name[1] if name else text}/{folder}' for folder in choices)}",
    )


def split_name(text: str, kind: Kind) -> tuple[str, list[str]]:
    """The name, and the patterns of its files."""
    found = NAME.fullmatch(text)
    assert found is not None, text  # `is_hub_name` was asked
    inside = found[2] or ""
    if not inside:
        return found[1], FILES[kind]
    return found[1], [f"{inside.rstrip('/')}/{pattern}" for pattern in FILES[kind]]


def _download(name: str, kind: Kind, patterns: Sequence[str], **options: Any) -> Any:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # before the import
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars
    except ImportError as error:
        remedy = "pip install huggingface_hub"
        raise ConfigError("config.extra", f"{name} is on the hub: {error}", where=name, remedy=remedy) from error
    (disable_progress_bars if options else enable_progress_bars)()
    try:
        return snapshot_download(name, repo_type=kind, allow_patterns=list(patterns), etag_timeout=ASK_S, **options)
    except Exception as error:  # the package raises many kinds, of its own and of its HTTP client
        raise not_there(name, kind, error, token="HF_TOKEN") from error


def not_there(name: str, kind: Kind, error: Exception, *, token: str) -> ConfigError:
    """`token`: the variable that opens private names."""
    said = str(error).split("\n")[0].rstrip(".")
    what = f"{ABSENT[kind]}, and not on the hub: {said}"
    remedy = f"correct the name; for a private one set {token}; without a network name a folder"
    return ConfigError(CODES[kind], what, where=name, remedy=remedy)


def _files_in(folder: Path, patterns: Sequence[str]) -> list[str]:
    every = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [str(path.relative_to(folder).as_posix()) for path in every]
    return [name for name in names if any(PurePosixPath(name).match(pattern) for pattern in patterns)]
