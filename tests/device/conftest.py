"""Fixtures of runs on a simulated NPU."""

from __future__ import annotations

from device_run import library, npu_run  # noqa: F401
from e2e_run import tiny_model  # noqa: F401
