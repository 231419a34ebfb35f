"""The reward worker as a process, against a buffer that this test plays on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from asyncrl import wire
from asyncrl.config import dump, parse
from asyncrl.images.digests import image_digest
from asyncrl.net.addresses import ipc_address
from asyncrl.net.responder import Call, Responder

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 "
IDS = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
REWARDS = """
import os, time

def reward(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "exit": os._exit(9)
    if solution_str == "hang": time.sleep(60)
    if solution_str == "raise": raise RuntimeError("on purpose")
    print("scoring", solution_str)
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def brightness(sample):
    return float(sum(image.getpixel((0, 0))[0] for image in sample.row["images"]))

def length(sample):
    assert sample.prompt_ids and sample.finish == "stop" and sample.row["reward_model"]
    return float(len(sample.response_ids))
"""


def ids_of(text: str) -> np.ndarray:
    return np.asarray([IDS[character] for character in text], dtype=np.int32)


class Buffer:
    """Answers like a buffer: hands out `responses` once, keeps scores and failures, says done when all are in."""

    def __init__(self, responses: list[str]) -> None:
        self.todo = list(enumerate(responses))
        self.total = len(responses)
        self.scores: dict[int, wire.Score] = {}
        self.failures: dict[int, wire.RewardFailure] = {}
        self.counts: Counter[str] = Counter()
        self.stats: dict[str, float] = {}
        self.versions: set[str] = set()
        self.judges: set[str] = set()

    def handle(self, calls: list[Call]) -> None:
        for call in calls:
            message = call.message
            self.counts[type(message).__name__] += 1
            if isinstance(message, wire.Hello):
                call.reply(wire.Welcome("run", 1, 1, 0))
            elif isinstance(message, wire.RewardRequest):
                self.judges.add(message.judge)
                self._hand_out(call, message.max_samples)
            elif isinstance(message, wire.Scores):
                self.scores |= {item.group: item for item in message.scores}
                self.failures |= {item.group: item for item in message.failures}
                self.versions.add(message.reward_version)
                self.judges.add(message.judge)
                call.reply(wire.ScoresReply(len(message.scores)))
            elif isinstance(message, wire.Heartbeat):
                self.stats = message.stats
                call.reply(wire.Ok())

    def more(self, text: str) -> dict[str, Any]:
        """Further columns of the row."""
        return {}

    def _hand_out(self, call: Call, count: int) -> None:
        items, payloads = [], []
        for group, text in self.todo[:count]:
            response = np.append(ids_of(text), 2).astype(np.int32)
            fields, payload = wire.pack_arrays({"prompt": ids_of("what"), "response": response})
            row = {"prompt": "what", "data_source": "add", "reward_model": {"ground_truth": "right"}, **self.more(text)}
            items.append(wire.RewardItem(group, 0, 1000 + group, 1, json.dumps(row), "stop", fields))
            payloads.append(payload)
        del self.todo[:count]
        done = len(self.scores) + len(self.failures) == self.total > 0
        call.reply(wire.RewardWork(tuple(items), done), payloads)


def prepare(tmp_path: Path, *, function: str = "reward") -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = __import__("tokenizers").decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"eos_token_id": 2}')
    config = parse(f"""
[run]
dir = "{tmp_path}/run"
[model]
path = "{model}"
[data]
path = "unused.jsonl"
[reward_workers]
timeout_s = 1.0
batch_samples = 5
[log]
heartbeat_s = 0.1
[[reward]]
function = "my_rewards:{function}"
name = "correct"
[[reward]]
function = "my_rewards:length"
weight = 0.01
""")
    path = tmp_path / "resolved.toml"
    path.write_text(dump(config))
    return path


async def start(tmp_path: Path, config: Path, buffer: Buffer, *words: str) -> tuple[Any, Responder]:
    responder = Responder(ipc_address(tmp_path / "s", "buffer"), buffer.handle)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "producers.rewards.main",
        "--config",
        str(config),
        "--name",
        "reward-0",
        "--connect",
        responder.address,
        *words,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    return process, responder


def run(tmp_path: Path, config: Path, buffer: Buffer, *words: str, kill_when: Any = None) -> tuple[int, str]:
    async def whole() -> tuple[int, str]:
        process, responder = await start(tmp_path, config, buffer, *words)
        try:
            if kill_when is not None:
                for _ in range(400):
                    if kill_when():
                        break
                    await asyncio.sleep(0.05)
                process.send_signal(signal.SIGTERM)
            output, _ = await asyncio.wait_for(process.communicate(), 40)
            return process.returncode, output.decode()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            responder.close()

    return asyncio.run(whole())


def test_scores_failures_and_the_end_of_the_run(tmp_path: Path) -> None:
    responses = ["right", "wrong", "raise", "exit", "right", "hang", *["right"] * 6]
    buffer = Buffer(responses)
    code, output = run(tmp_path, prepare(tmp_path), buffer)
    assert code == 0, output
    assert {group: item.reason for group, item in buffer.failures.items()} == {2: "raised", 3: "died", 5: "timeout"}
    assert "on purpose" in buffer.failures[2].detail and "correct" in buffer.failures[5].detail
    assert sorted(buffer.scores) == [0, 1, 4, 6, 7, 8, 9, 10, 11]
    right, wrong = buffer.scores[0], buffer.scores[1]
    assert right.reward == pytest.approx(1.0 + 0.01 * 6) and wrong.reward == pytest.approx(0.06)
    assert right.parts == {"correct": 1.0, "correct/length": 5.0, "length": 6.0}
    assert {item.token for item in buffer.scores.values()} == {1000 + group for group in buffer.scores}
    assert len(buffer.versions) == 1 and "" not in buffer.versions
    assert buffer.counts["Heartbeat"] >= 5 and buffer.stats["failed_rewards"] >= 1  # also while a call hung
    assert "scoring right" in output  # what functions print lands in the worker's log


class ImageBuffer(Buffer):
    """Its rows name two images, of which one is gone for the response "gone"."""

    def handle(self, calls: list[Call]) -> None:
        for call in calls:
            if isinstance(call.message, wire.FetchImages):
                known = {digest: PICTURES[digest] for digest in call.message.digests if digest in PICTURES}
                missing = {digest: "image: missing" for digest in call.message.digests if digest not in PICTURES}
                call.reply(wire.Images(tuple(known), missing), list(known.values()))
        super().handle(calls)

    def more(self, text: str) -> dict[str, Any]:
        return {"images": [*PICTURES, "0" * 64] if text == "gone" else list(PICTURES)}


def picture(red: int) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", (2, 2), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = {image_digest(data): data for data in (picture(7), picture(30))}


def test_a_function_sees_images_that_the_worker_fetched(tmp_path: Path) -> None:
    buffer = ImageBuffer(["right", "gone", "wrong"])
    code, output = run(tmp_path, prepare(tmp_path, function="brightness"), buffer)
    assert code == 0, output
    assert {group: score.parts["correct"] for group, score in buffer.scores.items()} == {0: 37.0, 2: 37.0}
    assert {group: item.detail for group, item in buffer.failures.items()} == {1: "image: missing"}


def test_a_worker_of_a_judge_scores_with_its_functions_alone(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    config = parse(
        path.read_text(),
        overrides=[
            'reward=[{function="my_rewards:reward"}, {function="my_rewards:length", judge="long"}]',
            'judge=[{name="long", timeout_s=9}]',
        ],
    )
    path.write_text(dump(config))
    buffer = Buffer(["right", "wrong"])
    code, output = run(tmp_path, path, buffer, "--judge", "long")
    assert code == 0, output
    assert buffer.judges == {"long"} and [score.parts for score in buffer.scores.values()] == [{"length": 6.0}] * 2
    code, output = run(tmp_path, path, Buffer([]), "--judge", "lang")
    assert code == 2 and "error[reward.judge] --judge: 'lang': this run has default, long" in output


def test_a_function_that_cannot_be_used_ends_with_two(tmp_path: Path) -> None:
    buffer = Buffer(["right"])
    code, output = run(tmp_path, prepare(tmp_path, function="absent"), buffer)
    assert code == 2 and "error[config.reward]" in output and "absent" in output and "Traceback" not in output
    assert buffer.counts["RewardRequest"] == 0


def test_sigterm_ends_an_idle_worker_with_zero(tmp_path: Path) -> None:
    buffer = Buffer([])
    code, output = run(tmp_path, prepare(tmp_path), buffer, kill_when=lambda: buffer.counts["RewardRequest"] > 0)
    assert code == 0 and "SIGTERM" in output


@pytest.mark.long
def test_sigterm_ends_a_hanging_call(tmp_path: Path) -> None:
    buffer = Buffer(["hang"] * 40)
    code, output = run(tmp_path, prepare(tmp_path), buffer, kill_when=lambda: len(buffer.todo) < 40)
    assert code == 0, output
