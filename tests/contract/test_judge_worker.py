"""A reward worker whose judge is a model, as a process: behind a URL, and with a classifier of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from test_reward_worker import Buffer, prepare, start

from asyncrl.config import load
from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.errors import ConfigError
from producers.rewards.outcome import JudgeSettings
from producers.rewards.pipe import FunctionSpec, Result
from producers.rewards.sample import RewardSample
from producers.rewards.scorer import Scorer

LIMIT_S = 60.0
JUDGE = """
[[reward]]
judge = "grader"
weight = 0.5
[[judge]]
name = "grader"
kind = "url"
model = "big"
url = "http://127.0.0.1:{port}/v1"
prompt = "Is {{response}} {{ground_truth}}?"
pattern = "Score: ([0-9]+)"
attempts = 2
timeout_s = 20.0
"""


def judged(path: Path, port: int) -> Path:
    """The worker's configuration with this judge in place of the functions."""
    text = path.read_text()
    head = text[: text.index("[[reward]]")] if "[[reward]]" in text else text
    rest = "\n".join(line for line in head.splitlines() if not line.startswith(("reward = ", "judge = ")))
    path.write_text(rest.replace("timeout_s = 1.0", "timeout_s = 20.0") + JUDGE.format(port=port))
    load(path)
    return path


async def grade(request: web.Request) -> web.Response:
    text = (await request.json())["messages"][0]["content"]
    if "hopeless" in text:
        return web.Response(status=400, text="no")
    if "silent" in text:
        return web.json_response({"choices": [{"message": {"content": "well"}}]})
    score = 10 if text == "Is right right?" else 3
    return web.json_response({"choices": [{"message": {"content": f"Score: {score}"}}]})


def test_scores_of_a_server_and_its_failures(tmp_path: Path) -> None:
    buffer = Buffer(["right", "wrong", "hopeless", "silent", "right"])

    async def whole() -> tuple[int, str]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", grade)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config = judged(prepare(tmp_path), runner.addresses[0][1])
        process, responder = await start(tmp_path, config, buffer, "--judge", "grader")
        try:
            output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
            return process.returncode, output.decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            responder.close()
            await runner.cleanup()

    code, output = asyncio.run(whole())
    assert code == 0, output
    assert {group: score.reward for group, score in buffer.scores.items()} == {0: 5.0, 1: 1.5, 4: 5.0}
    assert buffer.scores[0].parts == {"grader": 10.0}
    assert buffer.scores[0].answer == ""  # only an evaluation looks at it
    assert {group: item.reason for group, item in buffer.failures.items()} == {2: "refused", 3: "unparsed"}
    assert "HTTP 400: no" in buffer.failures[2].detail
    assert len(buffer.versions) == 1 and "" not in buffer.versions


@pytest.mark.long
def test_a_classifier_in_a_process_of_its_own(tmp_path: Path) -> None:
    from transformers import Qwen3ForSequenceClassification

    from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer

    tokenizer = make_tokenizer(tmp_path / "model")
    shape = make_tiny_qwen3(len(tokenizer), layers=1, hidden_size=32, head_dim=8, mlp_size=64).config
    shape.num_labels = 1
    Qwen3ForSequenceClassification(shape).save_pretrained(tmp_path / "model")
    table = JudgeConfig("scorer", kind="classifier", model=str(tmp_path / "model"), device="cpu", max_tokens=8)
    asked = JudgeSettings(table, 60.0, str(tmp_path / "model"), "float32", "prompt")
    specs = [FunctionSpec("", "scorer", 2.0), FunctionSpec("", "math_only", 1.0, ("math",))]
    scorer = Scorer(specs, prompt_key="prompt", timeout_s=60.0, judge=asked)
    samples = [
        RewardSample.from_row(row, prompt="", response="", prompt_ids=[5, 6], response_ids=ids, finish="stop")
        for row, ids in (({"data_source": "math"}, [7]), ({}, [7]), ({}, list(range(3, 20))))
    ]
    found: dict[int, Result] = {}
    try:
        scorer.start()
        scorer.score(samples, lambda result: found.update({result.place: result}))
    finally:
        scorer.close()
    assert scorer.version and sorted(found) == [0, 1, 2]
    raw = found[1].parts["scorer"]
    assert (found[1].reward, found[0].reward) == pytest.approx((2 * raw, 3 * raw), abs=1e-5)
    assert found[0].parts == pytest.approx({"scorer": raw, "math_only": raw}, abs=1e-5)
    assert found[2].reason == "too_long"


def test_a_model_that_cannot_be_loaded_is_said_before_any_work(tmp_path: Path) -> None:
    table = JudgeConfig("grader", kind="url", model="m", url="http://127.0.0.1:1/v1", api_key_file=str(tmp_path / "no"))
    asked = JudgeSettings(table, 1.0, "", "float32", "prompt")
    scorer = Scorer([FunctionSpec("", "grader")], prompt_key="prompt", timeout_s=1.0, judge=asked)
    with pytest.raises(ConfigError, match="api_key_file"):
        scorer.start()
