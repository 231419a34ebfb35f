"""What the stand-ins have in common: one JSON line per call, in the file that stands for the tracker's server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FILE = "standin.jsonl"


class Store:
    """The server of a stand-in. What STANDIN_FAILS names (a file that exists) is unreachable."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / FILE

    def put(self, **line: Any) -> None:
        fails = os.environ.get("STANDIN_FAILS", "")
        if fails and Path(fails).exists():
            raise ConnectionError("the stand-in cannot be reached")
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
