"""Fixtures of the end to end tests."""

from e2e_run import run, tiny_model

__all__ = ["run", "tiny_model"]
