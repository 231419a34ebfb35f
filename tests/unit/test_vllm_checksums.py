"""vLLM's checksums of its parameters: when those after a commit are compared with later ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from producers.engines.vllm.checksums import Checksums


class Workers:
    """Weights, and an answer that is read from them at once and sent when `may_answer` is set."""

    def __init__(self) -> None:
        self.weights = "start"
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ask(self) -> Any:
        found = self.weights
        await self.may_answer.wait()
        return {"sum": found}


def broken(what: str, error: BaseException | None) -> Exception:
    return RuntimeError(what, error)


def test_other_weights_than_after_the_commit_have_another_digest() -> None:
    async def body() -> None:
        workers = Workers()
        sums = Checksums(workers.ask, broken)
        sums.record("1")
        assert await sums.attest("digest") == "digest"
        workers.weights = "changed"
        assert await sums.attest("digest") not in ("", "digest")

    asyncio.run(body())


@pytest.mark.parametrize("asked_by", ["the commit", "a check"])
def test_checksums_that_a_commit_overtook_are_not_compared_with(asked_by: str) -> None:
    """They are of the version before: the new one would seem changed."""

    async def body() -> None:
        workers = Workers()
        sums = Checksums(workers.ask, broken)
        workers.may_answer.clear()
        if asked_by == "the commit":
            sums.record("1")
        check = asyncio.create_task(sums.attest("first")) if asked_by == "a check" else None
        await asyncio.sleep(0)
        sums.forget()  # a commit begins, and the answer arrives
        workers.may_answer.set()
        for _ in range(10):
            await asyncio.sleep(0)
        workers.weights = "second"
        sums.record("2")
        assert await sums.attest("second") == "second"
        assert check is None or await check in ("", "first")

    asyncio.run(body())
