"""Text of an exception in a user's code (environments, agents, tools, rewards): type, message, and place.

Guarantees: one line; the place is the innermost frame in the user's own files, if there is one, never one of this
project.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / name}/" for name in ("asyncrl", "buffers", "learners", "producers", "weightsync"))
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
LETTERS = 400  # length of the message; the place is never cut


def format_user_error(error: BaseException) -> str:
    """The line: `KeyError: 'answer' (my_envs.py:14, in step)`."""
    text = f"{type(error).__name__}: {error}"[:LETTERS]
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((*_OURS, "<"))]
    mine = [one for one in frames if not one.filename.startswith(_LIBRARIES)] or frames
    return f"{text} ({Path(mine[-1].filename).name}:{mine[-1].lineno}, in {mine[-1].name})" if mine else text
