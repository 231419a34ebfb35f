"""Models and data sets by their names on ModelScope (`model.hub = "modelscope"`), fetched once into its cache.

Guarantees:
1. the branch `master` is resolved to a commit; files are listed and fetched by that commit, which is in the path of
   their folder (`.../snapshots/COMMIT`, the layout of ModelScope's own package);
2. a file gets its name in the cache after its size and SHA-256 were compared with the hub's list;
3. without a network, the commit that was fetched last is used, if all of its files that are asked for are here.

`MODELSCOPE_ENDPOINT`, `MODELSCOPE_CACHE` and `MODELSCOPE_API_TOKEN` have their usual meaning. Requests go through the
HTTP client of huggingface_hub, so `HF_HUB_OFFLINE` and `HF_HUB_DOWNLOAD_TIMEOUT` hold here too. ADR 29 says why
ModelScope's package is not used.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.runtime.hub import ASK_S, Kind, OnHub, narrow, not_there, split_name
from asyncrl.runtime.run_dir import write_atomic

PAGE = 200  # files in one answer
WORKERS = 4  # files that are fetched at a time
COMMIT = re.compile(r"[0-9a-f]{7,64}")


class Entry(NamedTuple):
    """A file in the hub's list. `sha256` is empty if the hub does not say it."""

    size: int
    sha256: str


class Listing(msgspec.Struct, frozen=True):
    """A commit and all of its files, by their paths."""

    commit: str
    files: dict[str, Entry]


def look_up(text: str, kind: Kind, splits: Sequence[str] = ()) -> OnHub:
    """As `asyncrl.runtime.hub.look_up`."""
    name, patterns = split_name(text, kind)
    online: ConfigError | None = None
    try:
        with _clear_errors(name, kind):
            listing = _list(name, kind)
    except ConfigError as error:
        online = error
        try:
            listing = msgspec.json.decode(_last_fetched(name, kind).read_bytes(), type=Listing)
        except (OSError, *UNREADABLE):
            raise online from None
    folder = _folder(name, kind, listing.commit)
    wanted = [path for path in listing.files if any(fnmatch(path, pattern) for pattern in patterns)]
    missing = {path: 0 if _is_here(folder / path, listing.files[path]) else listing.files[path].size for path in wanted}
    found = narrow(OnHub(folder, missing), text, kind, splits)
    if online and any(found.files.values()):
        raise online
    return found


def fetch(found: OnHub, text: str, kind: Kind) -> OnHub:
    """As `asyncrl.runtime.hub.fetch`."""
    from tqdm.contrib.concurrent import thread_map

    name, _ = split_name(text, kind)
    with _clear_errors(name, kind):
        listing = _list(name, kind, found.revision)
        absent = [path for path in found.files if not _is_here(found.folder / path, listing.files[path])]

        def get(path: str) -> None:
            _fetch_file(f"{_address(name, kind)}/repo", listing, path, found.folder / path)

        thread_map(get, absent, desc=f"Fetching {len(absent)} files", max_workers=WORKERS)
        write_atomic(_last_fetched(name, kind), msgspec.json.encode(listing))
    return found._replace(files=dict.fromkeys(found.files, 0))


def _list(name: str, kind: Kind, commit: str = "") -> Listing:
    """The files of a commit; without one, of the newest on the branch `master`."""
    if not commit:
        commit = _ask(name, kind, "commits", Ref="master", PageNumber=1, PageSize=1)["Commit"][0]["Id"]
    where = "repo/files" if kind == "model" else "repo/tree"
    files: dict[str, Entry] = {}
    before: list[Any] = []
    for page in count(1):
        rows: list[Any] = _ask(name, kind, where, Revision=commit, Recursive="True", PageNumber=page, PageSize=PAGE)[
            "Files"
        ]
        files |= {row["Path"]: Entry(row["Size"], row.get("Sha256") or "") for row in rows if row["Type"] != "tree"}
        if len(rows) < PAGE or rows == before:  # the list of a model may come whole, whatever page is asked for
            break
        before = rows
    outside = [path for path in files if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts]
    if outside or not COMMIT.fullmatch(commit):
        raise ValueError(f"commit {commit!r} with files {outside} cannot have a folder in the cache")
    return Listing(commit, files)


def _ask(name: str, kind: Kind, what: str, **query: str | int) -> Any:
    """`Data` of an answer."""
    from huggingface_hub import get_session

    answer = get_session().get(f"{_address(name, kind)}/{what}", params=query, headers=_headers(), timeout=ASK_S)
    if answer.status_code != 200:
        raise OSError(f"HTTP {answer.status_code}: {answer.text[:200]}")
    tree = answer.json()
    if tree.get("Code", 200) != 200:
        raise OSError(f"{tree['Code']}: {tree.get('Message')}")
    return tree["Data"]


def _fetch_file(address: str, listing: Listing, path: str, target: Path) -> None:
    from huggingface_hub.file_download import http_get

    entry = listing.files[path]
    url = f"{address}?{urlencode({'Revision': listing.commit, 'FilePath': path})}"
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            http_get(url, file, headers=_headers(), expected_size=entry.size, displayed_filename=path)
        with part.open("rb") as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        if entry.sha256 not in ("", digest):
            raise OSError(f"{path} has SHA-256 {digest}, and the hub says {entry.sha256}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _is_here(path: Path, entry: Entry) -> bool:
    return path.is_file() and path.stat().st_size == entry.size


def _address(name: str, kind: Kind) -> str:
    endpoint = os.environ.get("MODELSCOPE_ENDPOINT") or "https://modelscope.cn"
    return f"{endpoint.rstrip('/')}/api/v1/{kind}s/{name}"


def _headers() -> dict[str, str]:
    token = os.environ.get("MODELSCOPE_API_TOKEN")  # some routes take it as a cookie, some as a header
    return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}


def _folder(name: str, kind: Kind, commit: str) -> Path:
    root = os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope"
    return Path(root).expanduser().resolve() / f"{kind}s" / name.replace("/", "--") / "snapshots" / commit


def _last_fetched(name: str, kind: Kind) -> Path:
    """Keeps the listing of the commit that was fetched last."""
    return _folder(name, kind, "").parent / "last-fetched.json"


@contextmanager
def _clear_errors(name: str, kind: Kind) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the HTTP client, the disk, and answers of another form
        raise not_there(name, kind, error, token="MODELSCOPE_API_TOKEN") from error
