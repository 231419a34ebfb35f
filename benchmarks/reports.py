"""The results file of a benchmark: its own figures, and what every one of them says of itself."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any


def write(path: Path, what: str, *, packages: tuple[str, ...] = ("torch", "transformers"), **parts: Any) -> None:
    """`what` was measured, by which command, when, on which machine, with which packages; then `parts`."""
    machine = {"cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2), "platform": platform.platform()}
    if "torch" in sys.modules:
        machine["torch_threads"] = sys.modules["torch"].get_num_threads()
    report = {
        "what": what, "command": " ".join(["python", *sys.argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **parts, "machine": machine,
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
