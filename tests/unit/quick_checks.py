"""`asyncrl check` without what costs seconds in each case: processes that import a reward, and that try parts of roles.

Import one of the fixtures into a test module. tests/contract/test_start_checks.py tries the parts of roles.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from asyncrl.preflight import check
from asyncrl.preflight import code as check_code
from asyncrl.preflight.start import StartReport


@pytest.fixture(autouse=True, scope="module")
def no_parts_are_tried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "ask_roles", lambda *_, **__: StartReport([], [], []))
        yield


@pytest.fixture(autouse=True, scope="module")
def same_imports_once(no_parts_are_tried: None) -> Iterator[None]:
    """A reward is imported in a process of its own; the same one not for every case anew."""
    asked = check_code._problem
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(lambda *command: asked(list(command)))
        patch.setattr(check_code, "_problem", lambda command, *, env=(): once(*command))
        yield
