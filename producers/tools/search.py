"""Search over a local corpus by BM25: SQLite's full-text index, in memory.

The tool `search`; `[environment.tool_args.search] path = "corpus.jsonl"`. Rows are {"text": ..., "title": ...} of a
.jsonl file, or the .txt and .md files of a folder. Guarantees: the index is built once per process; any text is a query
(index operators are ignored), a row matches if it holds one of the words, the best match comes first.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError
from producers.tools.base import FunctionTool

MAX_WORDS = 32  # of a query


class SearchTool(FunctionTool):
    """`results` passages per query, each cut after `passage_letters`."""

    def __init__(self, path: str, results: int = 3, passage_letters: int = 600) -> None:
        self._results, self._letters = int(results), int(passage_letters)
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61')")
        with self._index:
            self._index.executemany("INSERT INTO passages VALUES (?, ?)", load_passages(Path(path)))
        super().__init__(self.search)

    def search(self, query: str) -> str:
        """Find the passages of the corpus that fit a query best.

        Args:
            query: some words
        """
        words = re.findall(r"\w+", query)[:MAX_WORDS]
        if not words:
            return "nothing found"
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            found = self._index.execute(
                "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank LIMIT ?", (match, self._results)
            ).fetchall()
        passages = [
            f"[{number}] {title}: {text[: self._letters]}" if title else f"[{number}] {text[: self._letters]}"
            for number, (title, text) in enumerate(found, start=1)
        ]
        return "\n".join(passages) or "nothing found"


def load_passages(path: Path) -> Iterator[tuple[str, str]]:
    """Title and text of every passage. Raises `config.environment`."""
    where = f"environment.tool_args.search.path: {path}"
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md"))
        if not files:
            raise ConfigError("config.environment", "no .txt or .md file in it", where=where)
        yield from ((str(file.relative_to(path)), file.read_text(errors="replace")) for file in files)
        return
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError("config.environment", error.strerror or str(error), where=where) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
            yield str(row.get("title") or ""), str(row["text"])
        except (KeyError, *UNREADABLE):
            raise ConfigError("config.environment", "no JSON object with 'text'", where=f"{where}:{number}") from None
