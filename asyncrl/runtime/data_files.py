"""The files that `data.path` names: files, patterns, folders saved by `datasets`.

pyarrow is imported only if a file needs it. Guarantees:
1. the order is that of the text; files of a pattern are sorted by name, those of a saved folder are in the order of its
   `state.json`;
2. an unreadable file is `config.data` with an alternative; the content of a folder is never guessed, since it may hold
   both train and test rows.

Example: `data/train-*.parquet, more.jsonl`; `saved` of `Dataset.save_to_disk("saved")`.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import UNREADABLE, ConfigError

if TYPE_CHECKING:
    import pyarrow

KINDS = (".parquet", ".jsonl", ".json", ".arrow")
FILE_MAGIC = b"ARROW1"  # of Arrow's file format; `datasets` writes the stream format, which has no magic


def data_files(paths: str) -> list[Path]:
    """The files of `data.path`, in order. Raises `config.data` for a pattern or a folder without files."""
    return [file for part in split_paths(paths) for file in list_files(part)]


def split_paths(paths: str) -> list[str]:
    """Parts between the commas."""
    return [part.strip() for part in paths.split(",") if part.strip()]


def list_files(part: str) -> list[Path]:
    """The files of one part: the file itself, matches of a pattern, or the files of a saved folder."""
    path = Path(part)
    if path.is_dir():
        return _saved_files(path)
    if path.exists() or not glob.has_magic(part):
        return [path]
    found = sorted(Path(name) for name in glob.glob(part, recursive=True))
    if not found:
        raise ConfigError("config.data", "no file fits this pattern", where=part)
    return found


def _saved_files(folder: Path) -> list[Path]:
    splits = _json(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list) and splits:
        raise ConfigError(
            "config.data",
            f"it is a folder of splits: {', '.join(map(str, splits))}",
            where=str(folder),
            remedy=f"name one, such as {str(folder / str(splits[0]))!r}",
        )
    saved = _json(folder / "state.json").get("_data_files")
    if isinstance(saved, list) and saved:
        return [folder / str(item["filename"]) for item in saved if isinstance(item, dict) and "filename" in item]
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.suffix in KINDS)
    if not inside:
        raise ConfigError("config.data", f"the folder has no {', '.join(KINDS)} files", where=str(folder))
    shown = ", ".join(map(str, inside[:3])) + (", ..." if len(inside) > 3 else "")
    raise ConfigError(
        "config.data",
        f"it is a folder, of {shown}",
        where=str(folder),
        remedy=f"name its files, such as {str(folder / _pattern(inside[0]))!r}",
    )


def _pattern(first: Path) -> Path:
    """`train-00000-of-00002.parquet` -> `train-*.parquet`; other names stay."""
    name, dash, rest = first.stem.partition("-")
    return first.with_name(f"{name}-*{first.suffix}") if dash and rest[:1].isdigit() else first


def _json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, *UNREADABLE) as error:
        raise ConfigError("config.data", str(error), where=str(path)) from None
    return tree if isinstance(tree, dict) else {}


def unknown_kind(path: Path) -> str:
    """The problem with a file of another kind."""
    return f"unknown kind {path.suffix!r}: give {', '.join(KINDS[:-1])} or {KINDS[-1]}"


def read_table(path: Path) -> pyarrow.Table:
    """A .parquet or .arrow file; the latter mapped into memory. Raises `config.data`."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path) if path.suffix == ".parquet" else _open_arrow(path).read_all()
    except pyarrow.ArrowException as error:
        raise ConfigError("config.data", str(error), where=str(path)) from None


def look(path: Path) -> tuple[dict[str, Any], int | None]:
    """Columns of a .parquet or .arrow file (text columns hold an empty text, others None), and its number of rows.

    The number is None for a stream with rows, which knows it only at its end. Raises ValueError.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"reading {path.suffix} needs the package pyarrow") from None
    try:
        if path.suffix == ".parquet":
            with ParquetFile(path) as file:
                return _columns(file.schema_arrow), int(file.metadata.num_rows)
        reader = _open_arrow(path)
        return _columns(reader.schema), None if _any_rows(reader) else 0
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from None


def media_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a .parquet or .arrow file, without the columns of plain values, which hold no media."""
    from pyarrow import types

    table = read_table(path)
    plain = (types.is_string, types.is_large_string, types.is_string_view, types.is_primitive)
    names = [item.name for item in table.schema if not any(is_plain(item.type) for is_plain in plain)]
    for batch in table.select(names).to_batches():
        yield from batch.to_pylist()


def first_table_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of a .parquet or .arrow file, without reading the others. Raises ValueError."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        if path.suffix == ".parquet":
            with ParquetFile(path) as file:
                batch = next(file.iter_batches(batch_size=count), None)
                return batch.to_pylist() if batch is not None else []
        return list(_open_arrow(path).read_all().slice(0, count).to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from None


def _columns(schema: pyarrow.Schema) -> dict[str, Any]:
    from pyarrow import types

    texts = (types.is_string, types.is_large_string, types.is_string_view)
    return {item.name: "" if any(is_text(item.type) for is_text in texts) else None for item in schema}


def _open_arrow(path: Path) -> Any:
    import pyarrow

    with path.open("rb") as file:
        is_file = file.read(len(FILE_MAGIC)) == FILE_MAGIC
    mapped = pyarrow.memory_map(str(path))
    return pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)


def _any_rows(reader: Any) -> bool:
    batches = (
        (reader.get_batch(number) for number in range(reader.num_record_batches))
        if hasattr(reader, "num_record_batches")
        else reader
    )
    return any(batch.num_rows for batch in batches)


def count_arrow(path: Path) -> int:
    """Number of rows of an .arrow file, from the heads of its batches: the columns stay on disk."""
    return int(_open_arrow(path).read_all().num_rows)
