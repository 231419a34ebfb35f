"""Packages that a few tests need and that would slow down every process: they lie beside the environment, not in it.

Imported before them. transformers imports torchao in every process that could, which takes about as long as torch
itself, and torchao says what it lacks on a CPU. `make test` puts them there (Makefile, `aside`).
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "aside"

if FOLDER.is_dir() and str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
