"""Reward files in the style of other trainers, loaded by their names and called as those trainers call them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config.sections.reward import reward_kind, reward_label
from asyncrl.errors import ConfigError
from producers.rewards.functions import RewardCall
from producers.rewards.sample import RewardSample, read_value

VERL = """
import re

def extract(solution_str):
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return found[-1].replace(",", "") if found else None

def compute_score(data_source, solution_str, ground_truth, extra_info=None, format_score=0.0, score=1.0):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    answer = extract(solution_str)
    if answer is None:
        return 0
    return {"score": score if answer == ground_truth else format_score, "acc": answer == ground_truth, "pred": answer}
"""
VERL_BATCH = """
def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0, **kwargs):
    return [float(s.endswith(g)) + bonus * e["index"] for s, g, e in zip(solution_strs, ground_truths, extra_infos)]
"""
TRL = """
def accuracy_reward(completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [None if s is None else float(c.endswith(s)) for c, s in zip(contents, solution)]

def length_reward(prompts, completions, completion_ids, trainer_state, log_metric=None, **kwargs):
    assert trainer_state is None and len(kwargs["solution"]) == len(prompts)
    log_metric("length", 3)
    return [float(len(ids)) for ids in completion_ids]

def truths_reward(completions, ground_truth, **kwargs):
    return [float(c.endswith(truth)) for c, truth in zip(completions, ground_truth)]
"""
AREAL = """
from typing import Any

def gsm8k_reward_fn(
    prompt: str, completions: str, prompt_ids, completion_ids, answer: str | None = None, **kwargs: Any
) -> float:
    assert isinstance(completions, str) and prompt_ids == [1, 2] and kwargs["level"] == 3
    return int(completions.split("####")[-1].strip() == answer)
"""
OPENRLHF = """
import numpy as torch  # a stand-in: what counts is that the values are arrays

def reward_func(queries, prompts, labels, **kwargs):
    answers = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    reward = torch.asarray([float(answer.endswith(label)) for answer, label in zip(answers, labels)])
    return {"rewards": reward, "scores": reward * 0.5, "extra_logs": {"lengths": [len(a) for a in answers], "mean": 7}}

def plain(queries, prompts, labels):
    return torch.asarray([1.0] * len(queries))
"""
OURS = """
class Scaled:
    def __init__(self, factor: float = 1.0):
        self.factor = factor
    def __call__(self, sample):
        return self.factor * len(sample.response)

class Awaited(Scaled):
    async def __call__(self, sample):
        return 0.5

def make(factor):
    return lambda sample: factor

def with_args(sample, scale=1.0, *, offset):
    return scale + offset

def needs_sandbox(sandbox, loud=False):
    def reward(sample):
        return float(sandbox.limits.timeout_s > 0)
    return reward

ready = Scaled(3.0)
"""
CHAT = [{"role": "user", "content": "2+2"}]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (
        ("verl", VERL),
        ("verl_batch", VERL_BATCH),
        ("trl", TRL),
        ("areal", AREAL),
        ("openrlhf", OPENRLHF),
        ("ours", OURS),
    ):
        (tmp_path / f"{name}_reward.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sample(response: str, *, prompt: Any = "2+2=", **row: Any) -> RewardSample:
    full = {"prompt": prompt, "data_source": "openai/gsm8k", "extra_info": {"index": 1}, "level": 3, **row}
    return RewardSample.from_row(
        full, prompt="2+2=", response=response, prompt_ids=[1, 2], response_ids=[3, 4, 5], finish="stop"
    )


TRUTH = {"reward_model": {"style": "rule", "ground_truth": "4"}}


def test_a_file_of_verl(files: Path) -> None:
    call = RewardCall("verl_reward.py:compute_score", args={"format_score": 0.1})
    assert call.form == "verl" and not call.is_batch
    assert read_value(call.one(sample("so #### 4", **TRUTH))) == (1.0, {"acc": 1.0}, "4")
    assert read_value(call.one(sample("#### 5", **TRUTH))).value == 0.1
    assert read_value(call.one(sample("four", **TRUTH))).value == 0.0


def test_a_file_of_verls_batch_manager(files: Path) -> None:
    call = RewardCall("verl_batch_reward.py:compute_score_batch", args={"bonus": 0.5})
    assert call.form == "verl_batch" and call.is_batch
    found = call.values(call.batch([sample("is 4", **TRUTH), sample("is 5", **TRUTH)]), 2)
    assert [item.value for item in found] == [1.5, 0.5]


def test_a_file_of_trl(files: Path) -> None:
    call = RewardCall("trl_reward.py:accuracy_reward")
    assert call.form == "trl"
    chats = [sample("is 4", prompt=CHAT, solution="4"), sample("is 5", prompt=CHAT, solution=None)]
    assert [item.value for item in call.values(call.batch(chats), 2)] == [1.0, None]
    lengths = RewardCall("trl_reward.py:length_reward")
    assert [item.value for item in lengths.values(lengths.batch([sample("x", solution="4")]), 1)] == [3.0]


def test_rows_of_one_job_have_their_truths_in_different_columns(files: Path) -> None:
    call = RewardCall("trl_reward.py:truths_reward")
    rows = [sample("is 4", ground_truth="4"), sample("is 4", answer="4"), sample("is 4", **TRUTH, ground_truth="5")]
    assert [item.value for item in call.values(call.batch(rows), 3)] == [1.0, 1.0, 0.0], (
        "a column of the row comes first"
    )


def test_a_file_of_areal(files: Path) -> None:
    call = RewardCall("areal_reward.py:gsm8k_reward_fn")
    assert call.form == "areal" and not call.is_batch
    assert read_value(call.one(sample("#### 4", answer="4"))).value == 1.0
    assert read_value(call.one(sample("#### 5", **TRUTH))).value == 0.0  # verl's column serves as its answer


def test_a_file_of_openrlhf(files: Path) -> None:
    call = RewardCall("openrlhf_reward.py:reward_func")
    assert call.form == "openrlhf" and call.is_batch
    right, wrong = call.values(call.batch([sample("is 4", **TRUTH), sample("no", **TRUTH)]), 2)
    assert right == (1.0, {"scores": 0.5, "lengths": 4.0, "mean": 7.0}, "")
    assert wrong == (0.0, {"scores": 0.0, "lengths": 2.0, "mean": 7.0}, "")
    plain = RewardCall("openrlhf_reward.py:plain")
    assert [item.value for item in plain.values(plain.batch([sample("a"), sample("b")]), 2)] == [1.0, 1.0]


@pytest.mark.parametrize(
    "raw", [{"scores": [1.0]}, {"rewards": [1.0, 2.0]}, {"rewards": 1.0}, {"rewards": [1.0], "extra_logs": [3]}, 1.0]
)
def test_results_of_openrlhf_that_are_none(files: Path, raw: Any) -> None:
    with pytest.raises(TypeError):
        RewardCall("openrlhf_reward.py:reward_func").values(raw, 1)


@pytest.mark.parametrize(
    ("name", "args", "value"),
    [
        ("Scaled", {"factor": 2.0}, 6.0),
        ("Scaled", {}, 3.0),
        ("ready", {}, 9.0),
        ("make", {"factor": 0.25}, 0.25),
        ("with_args", {"offset": 2.0}, 3.0),
        ("with_args", {"offset": 2.0, "scale": 4.0}, 6.0),
        ("needs_sandbox", {}, 1.0),
    ],
)
def test_classes_instances_factories_and_arguments(files: Path, name: str, args: dict[str, Any], value: float) -> None:
    call = RewardCall(f"ours_reward.py:{name}", args=args)
    assert call.form == "sample" and read_value(call.one(sample("abc"))).value == value


def test_an_async_instance(files: Path) -> None:
    assert RewardCall("ours_reward.py:Awaited").is_async


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("ours_reward.py:with_args", {}, "offset"),
        ("ours_reward.py:Scaled", {"size": 1}, "args has size; its parameters: factor"),
        ("ours_reward.py:Scaled", {"factor": 1, "more": 2}, "more"),
        ("ours_reward.py:nothing", {}, "has no 'nothing'"),
        ("absent.py:reward", {}, "there is no file"),
        ("verl_reward.py:compute_score", {"judge": 1}, "args has judge"),
        ("builtin:gsm9k", {}, "did you mean builtin:gsm8k"),
        ("builtin:length", {}, "max_tokens"),
        ("builtin:length", {"max_tokens": -1}, "max_tokens = -1"),
        ("builtin:exact", {"cases": True}, "args has cases"),
        ("verl_reward.py:extract", {}, "fit"),
    ],
)
def test_what_cannot_be_used_says_why(files: Path, name: str, args: dict[str, Any], words: str) -> None:
    if name.endswith(":extract"):
        (files / "verl_reward.py").write_text("def extract(text, pattern): return 1.0")
    with pytest.raises(ConfigError) as caught:
        RewardCall(name, args=args)
    assert caught.value.code == "config.reward" and words in caught.value.message and caught.value.where == name


def test_a_file_imports_what_stands_beside_it(files: Path) -> None:
    (files / "beside_it.py").write_text("VALUE = 0.75")
    (files / "sub").mkdir()
    (files / "sub" / "reward.py").write_text("import beside_sub\ndef f(sample): return beside_sub.VALUE")
    (files / "sub" / "beside_sub.py").write_text("VALUE = 0.75")
    assert read_value(RewardCall("sub/reward.py:f").one(sample("x"))).value == 0.75


def test_two_files_of_one_name_are_two(files: Path) -> None:
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (files / folder).mkdir()
        (files / folder / "reward_func.py").write_text(f"def f(sample): return {value}")
    assert [read_value(RewardCall(f"{name}/reward_func.py:f").one(sample("x"))).value for name in "ab"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("function", "kind", "label"),
    [
        ("my.rewards:exact", "module", "exact"),
        ("rewards/a-b.py:score", "file", "score"),
        ("/abs/olute.py:Class.method", "file", "Class.method"),
        ("builtin:gsm8k", "builtin", "gsm8k"),
        ("http://host:5000/get_reward", "url", "get_reward"),
        ("https://host", "url", "host"),
        ("exact", "", "exact"),
        ("my rewards:exact", "", "exact"),
        ("http://", "", ""),
    ],
)
def test_names(function: str, kind: str, label: str) -> None:
    assert reward_kind(function) == kind and (not kind or reward_label(function) == label)


class Handler(http.server.BaseHTTPRequestHandler):
    """A reward server in OpenRLHF's style; fails as often as the test says."""

    failures: list[int] = []
    answer: Any = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        code = self.failures.pop() if self.failures else 200
        rewards = [float(query.endswith(label)) for query, label in zip(body["query"], body["labels"], strict=True)]
        data = json.dumps(self.answer or {"rewards": rewards, "scores": [1.0] * len(rewards)}).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[str]:
    Handler.failures, Handler.answer = [], None
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}/get_reward"
    found.shutdown()
    thread.join(60)
    found.server_close()


def test_a_reward_server(server: str) -> None:
    call = RewardCall(server)
    assert call.form == "openrlhf"
    found = call.values(call.batch([sample("is 4", **TRUTH), sample("is 5", **TRUTH)]), 2)
    assert [(item.value, item.parts) for item in found] == [(1.0, {"scores": 1.0}), (0.0, {"scores": 1.0})]


def test_a_reward_server_that_fails_once_is_asked_again(server: str) -> None:
    Handler.failures = [503]
    call = RewardCall(server)
    assert call.values(call.batch([sample("is 4", **TRUTH)]), 1)[0].value == 1.0


@pytest.mark.parametrize(("answer", "failures"), [({"scores": [1]}, []), (None, [400]), (None, [500, 500])])
def test_a_reward_server_that_cannot_be_used_is_no_reward(server: str, answer: Any, failures: list[int]) -> None:
    Handler.answer, Handler.failures = answer, list(failures)
    call = RewardCall(server, args={"tries": len(failures) or 1})
    with pytest.raises((RuntimeError, TypeError), match=r"rewards|HTTP"):
        call.values(call.batch([sample("is 4", **TRUTH)]), 1)


def test_values_of_arrays_are_plain(files: Path) -> None:
    call = RewardCall("openrlhf_reward.py:plain")
    assert call.values(np.array([[1.0], [2.0]]).ravel(), 2)[1].value == 2.0
