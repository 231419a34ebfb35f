"""What a user's own code raised, in a line: type, message, and the place in that code.

Called where functions of users run: environments, agents, tools, rewards. Guarantees: one line of text; the place is
the innermost frame of the user's own files, where there is one, and never a frame of this project.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_OURS = tuple(f"{_ROOT / name}/" for name in ("asyncrl", "buffers", "learners", "producers", "weightsync"))
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
LETTERS = 400  # of the message; the place follows whole


def format_user_error(error: BaseException) -> str:
    """The line: `KeyError: 'answer' (my_envs.py:14, in step)`."""
    text = f"{type(error).__name__}: {error}"[:LETTERS]
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith((*_OURS, "<"))]
    mine = [one for one in frames if not one.filename.startswith(_LIBRARIES)] or frames
    return f"{text} ({Path(mine[-1].filename).name}:{mine[-1].lineno}, in {mine[-1].name})" if mine else text
