"""The small run of real processes of tests/e2e, here too."""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("e2e_run", Path(__file__).parents[1] / "e2e" / "conftest.py")
assert _spec is not None and _spec.loader is not None
_found = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_found)

Run, run, tiny_model = _found.Run, _found.run, _found.tiny_model
