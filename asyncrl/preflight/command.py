"""`asyncrl check`: reads and checks a configuration and prints the result.

Guarantees: the exit code is 0 without mistakes, else that of the first mistake; with `--json` the output is one JSON
object on stdout, mistakes included.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigErrors
from asyncrl.preflight import check as checks
from asyncrl.preflight.render import as_json, render


def check_command(paths: Sequence[Path], overrides: Sequence[str], *, as_json_text: bool = False) -> int:
    """Print the result; return the exit code."""
    _, checked = checks.check_files(paths, overrides)
    if as_json_text:
        print(json.dumps(as_json(checked), indent=2))
        return checked.errors[0].exit_code if checked.errors else 0
    if text := render(checked):
        print(text)
    if checked.errors:
        sys.stdout.flush()
        raise ConfigErrors(checked.errors)
    print(f"{' + '.join(map(str, paths))}: no mistakes found")
    return 0
