"""The small run of real processes, for the security tests."""

from e2e_run import run, tiny_model

__all__ = ["run", "tiny_model"]
