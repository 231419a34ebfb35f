"""A whole run whose rewards are those of a model behind a URL, beside a function: slow, busy and wrong now and then."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from asyncrl.metrics import read_lines

GRADER = """
[[reward]]
judge = "grader"
weight = 0.5
[[judge]]
name = "grader"
kind = "url"
model = "big"
url = "{url}"
prompt = "Grade {{response}}"
pattern = "Score: ([0-9]+)"
concurrency = 8
timeout_s = 20.0
"""


class Grader:
    """Gives the length of what it is asked; refuses every ninth request, and has no answer to every fortieth."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._grade)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _grade(self, request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        self.counts["asked"] += 1
        if self.counts["asked"] % 9 == 0:
            self.counts["busy"] += 1
            return web.Response(status=429, headers={"Retry-After": "0.1"})
        if self.counts["asked"] % 40 == 0:
            self.counts["mute"] += 1
            return web.json_response({"choices": [{"message": {"content": "well"}}]})
        return web.json_response({"choices": [{"message": {"content": f"Score: {len(text)}"}}]})

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


@pytest.fixture
def grader() -> Iterator[Grader]:
    found = Grader()
    yield found
    found.close()


@pytest.mark.long
def test_a_model_behind_a_url_scores_a_run(run: Any, grader: Grader) -> None:
    run.config.write_text(run.config.read_text() + GRADER.format(url=f"http://127.0.0.1:{grader.port}/v1"))
    done = run.launch(timeout=300)
    assert done.returncode == 0, done.stdout + run.logs()
    audit = run.audit()
    assert audit["exit"] == 0 and (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, 20), audit
    names = {line["name"] for line in run.lines("processes.jsonl") if line["role"] == "reward"}
    assert len(names) == 2, f"a worker of the function and one of the model: {names}"
    assert grader.counts["asked"] >= 80 and grader.counts["busy"] >= 5 and grader.counts["mute"] >= 1
    lines = [line for line in read_lines(run.dir / "metrics" / "learner.jsonl") if "reward_mean" in line]
    assert all(line["reward/grader"] >= len("Grade ") for line in lines)
    assert all(
        line["reward_mean"] == pytest.approx(line["reward/length_reward"] + 0.5 * line["reward/grader"], rel=1e-5)
        for line in lines
    ), "the sum of both judges, and no failure became 0"
