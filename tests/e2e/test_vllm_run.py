"""A short run on the real vLLM engine: it learns from in-flight updates, every promise of the audit kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from exact_run import SETTINGS, assert_exact

from asyncrl.config import parse
from asyncrl.errors import ConfigError
from asyncrl.process_plan.interpreters import find_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OWN = [f"producers.python={os.environ['VLLM_PYTHON']}"] if os.environ.get("VLLM_PYTHON") else []


def why_not() -> str:
    """Why vLLM cannot be used here."""
    if OWN:
        return ""
    text = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[producers]\nengine = "vllm"\n[[reward]]\nfunction = "a:b"\n'
    try:
        find_interpreter(parse(text))
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_on_vllm_is_exact(run: Any, figure: Callable[[str], None]) -> None:
    done = run.launch("producers.engine=vllm", "weightsync.timeout_s=120", *SETTINGS, *OWN, timeout=580)
    found = assert_exact(run, done)
    figure(f"vllm: {found.versions} versions, engine and learner at lag 0 differ by at most {found.largest:.1g} nats")
