"""Teachers: log-probs of a model folder against transformers' plain forward, and of servers in three forms."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from bare_config import BARE
from transformers import AutoModelForCausalLM

from asyncrl.config import parse
from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.preflight.code import check_models, tokenizer_entries
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model
from producers.rewards.judges.teacher import make_teacher
from producers.rewards.outcome import JudgeSettings, Outcome, Problem, TeacherSettings, Verdict
from producers.rewards.sample import RewardSample


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("teacher")
    tokenizer = make_tokenizer(root)
    save_model(root, make_tiny_qwen3(len(tokenizer), seed=3, layers=2, hidden_size=32, head_dim=8, mlp_size=64))
    return root


def sample(prompt: list[int], response: list[int], source: str = "a", rows: list[tuple[int, int]] | None = None) -> Any:
    return RewardSample.from_row(
        {"data_source": source}, prompt="", response="", prompt_ids=prompt, response_ids=response, finish="stop",
        rows=rows or (),
    )  # fmt: skip


def settings(folder: Path | str, *, url: str = "", most: int = 64, **teacher: Any) -> tuple[Any, TeacherSettings]:
    table = JudgeConfig(
        "big", kind="url" if url else "classifier", model=str(folder), url=url, device="cpu", max_tokens=most,
        concurrency=3, attempts=2,
    )  # fmt: skip
    given = {"api": "vllm", "temperature": 1.0, **teacher}
    wanted = TeacherSettings(**given)
    return JudgeSettings(table, 20.0, str(folder), "float32", "prompt", wanted), wanted


def ask(given: tuple[Any, TeacherSettings], samples: list[Any]) -> list[Outcome]:
    model, found = make_teacher(*given), dict[int, Outcome]()

    async def whole() -> None:
        await model.start()
        try:
            await model.score(samples, found.__setitem__)
        finally:
            await model.close()

    asyncio.run(whole())
    assert sorted(found) == list(range(len(samples)))
    return [found[place] for place in range(len(samples))]


def plain(folder: Path, tokens: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs `[T, V]` of what follows each token, by transformers' own forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return (model(torch.tensor([tokens])).logits[0].float() / temperature).log_softmax(-1)


def arrays(outcome: Outcome, top_k: int = 0) -> tuple[Any, Any, Any]:
    assert isinstance(outcome, Verdict), outcome
    logs = np.frombuffer(outcome.arrays["teacher_logprobs"], np.float32)
    if not top_k:
        assert outcome.arrays.keys() == {"teacher_logprobs"}
        return logs, None, None
    ids = np.frombuffer(outcome.arrays["teacher_ids"], np.int32).reshape(logs.size, top_k)
    return logs, ids, np.frombuffer(outcome.arrays["teacher_top"], np.float32).reshape(logs.size, top_k)


SAMPLES = [([5, 6, 7], [8, 9, 2]), ([4], [10, 11, 12, 13, 2]), ([9, 9, 9, 9, 9], [3]), ([5, 6], [7] * 20)]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_folder_says_what_transformers_say(folder: Path, temperature: float) -> None:
    given = settings(folder, temperature=temperature, top_k=4)
    for (prompt, response), outcome in zip(SAMPLES, ask(given, [sample(*one) for one in SAMPLES]), strict=True):
        logs, ids, top = arrays(outcome, 4)
        whole = plain(folder, [*prompt, *response], temperature=temperature)[len(prompt) - 1 : -1]
        expected = whole.gather(-1, torch.tensor(response)[:, None])[:, 0]
        assert np.abs(logs - expected.numpy()).max() < 1e-5
        assert np.abs(top - whole.topk(4).values.numpy()).max() < 1e-5
        assert np.abs(whole.gather(-1, torch.tensor(ids.astype(np.int64))).numpy() - top).max() < 1e-5


def test_every_sequence_of_a_session_is_read_with_its_own_prompt(folder: Path) -> None:
    response = [8, 9, 4, 5, 6, 10, 11]  # two tokens, then a row that starts with three tokens of its own prompt
    [outcome] = ask(settings(folder), [sample([5, 6, 7], response, rows=[(2, 3)])])
    logs, _, _ = arrays(outcome)
    first = plain(folder, [5, 6, 7, 8, 9])[2:-1].gather(-1, torch.tensor([[8], [9]]))[:, 0]
    second = plain(folder, [4, 5, 6, 10, 11])[2:-1].gather(-1, torch.tensor([[10], [11]]))[:, 0]
    assert np.abs(logs - np.concatenate((first, np.zeros(3), second))).max() < 1e-5


def test_what_a_teacher_does_not_read(folder: Path) -> None:
    given = settings(folder, most=8, data_sources=("a",))
    outcomes = ask(given, [sample([5, 6], [7, 8]), sample([5] * 7, [7, 8]), sample([5, 6], [7, 8], "b")])
    assert isinstance(outcomes[0], Verdict)
    assert [getattr(one, "reason", "") for one in outcomes[1:]] == ["too_long", "raised"]
    assert "data_source 'b'" in str(outcomes[2])


def test_the_version_tells_models_apart(folder: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    save_model(tmp_path, make_tiny_qwen3(len(tokenizer), seed=4, layers=2, hidden_size=32, head_dim=8, mlp_size=64))
    versions = {make_teacher(*settings(one)).version() for one in (folder, tmp_path)}
    assert len(versions) == 2
    assert tokenizer_entries(folder) == tokenizer_entries(tmp_path) != {}


def test_a_teacher_that_cannot_teach_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_tokenizer(tmp_path / "other", characters="xyz")
    save_model(
        tmp_path / "other", make_tiny_qwen3(len(other), seed=4, layers=2, hidden_size=32, head_dim=8, mlp_size=64)
    )

    def problems(teacher: Path, *more: str) -> str:
        settings = (f'model.path="{folder}"', f'teacher=[{{name="big", model="{teacher}"}}]', *more)
        return " ".join(error.message for error in check_models(parse(BARE, overrides=list(settings))))

    assert problems(folder) == ""
    assert "must share a vocabulary" in problems(tmp_path / "other")
    assert "no config.json" in problems(tmp_path)
    assert "top_k = 9999" in problems(folder, "learner.distillation.loss=jsd", "learner.distillation.top_k=9999")


# ---------------------------------------------------------------- servers


class Server:
    """Answers in the three forms with the numbers of a model folder. `lie`: changes an answer."""

    def __init__(self, folder: Path, lie: Any = None) -> None:
        self._folder = folder
        self._lie = lie
        self.bodies: list[dict[str, Any]] = []

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        whole = plain(self._folder, body["prompt"])
        follows = list(zip(whole, body["prompt"][1:], strict=False))
        if "echo" in body:
            logs = [None, *(float(row[token]) for row, token in follows), -0.5]
            choice: dict[str, Any] = {"logprobs": {"token_logprobs": logs}}
        else:
            choice = {"prompt_logprobs": [None, *(self._entry(*pair, body["prompt_logprobs"]) for pair in follows)]}
        return self._answer({"choices": [choice]})

    @staticmethod
    def _entry(row: torch.Tensor, token: int, top_k: int) -> dict[str, Any]:
        order = row.argsort(descending=True).tolist()
        kept = dict.fromkeys([token, *order[:top_k]])
        return {str(one): {"logprob": float(row[one]), "rank": order.index(one) + 1} for one in kept}

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        whole, ids = plain(self._folder, body["input_ids"]), body["input_ids"]
        mine = [[None, ids[0], None], *([float(row[t]), t, None] for row, t in zip(whole, ids[1:], strict=False))]
        found: dict[str, Any] = {"input_token_logprobs": mine}
        if k := body["top_logprobs_num"]:
            tops = [zip(*row.topk(k), strict=True) for row in whole[:-1]]
            found["input_top_logprobs"] = [None, *([[float(v), int(i), None] for v, i in top] for top in tops)]
        return self._answer({"meta_info": found})

    def _answer(self, body: dict[str, Any]) -> web.Response:
        if self._lie is not None:
            self._lie(body)
        return web.json_response(body)


def served(server: Server, folder: Path, samples: list[Any], **teacher: Any) -> list[Outcome]:
    found: dict[int, Outcome] = {}

    async def whole() -> None:
        app = web.Application()
        app.router.add_post("/completions", server.completions)
        app.router.add_post("/generate", server.generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        model = make_teacher(*settings(folder, url=f"http://127.0.0.1:{runner.addresses[0][1]}", **teacher))
        await model.start()
        try:
            await model.score(samples, found.__setitem__)
        finally:
            await model.close()
            await runner.cleanup()

    asyncio.run(whole())
    return [found[place] for place in range(len(samples))]


@pytest.mark.parametrize(("api", "top_k"), [("vllm", 0), ("vllm", 4), ("sglang", 0), ("sglang", 4), ("openai", 0)])
def test_a_server_says_what_its_model_says(folder: Path, api: str, top_k: int) -> None:
    samples = [sample(*one) for one in SAMPLES[:3]]
    remote = served(Server(folder), folder, samples, api=api, top_k=top_k)
    local = ask(settings(folder, top_k=top_k), samples)
    for one, other in zip(remote, local, strict=True):
        for left, right in zip(arrays(one, top_k), arrays(other, top_k), strict=True):
            assert (left is None) == (right is None)
            assert left is None or np.abs(left - right).max() < 1e-5


def drop(body: dict[str, Any]) -> None:
    body["choices"][0]["prompt_logprobs"].pop()


def rename(body: dict[str, Any]) -> None:
    body["choices"][0]["prompt_logprobs"][-1] = {"1": {"logprob": -0.5, "rank": 1}}


def few(body: dict[str, Any]) -> None:
    entry = body["choices"][0]["prompt_logprobs"][-1]
    body["choices"][0]["prompt_logprobs"][-1] = {"2": entry["2"]}


@pytest.mark.parametrize("lie", [drop, rename, few])
def test_an_answer_about_other_tokens_is_refused(folder: Path, lie: Any) -> None:
    server = Server(folder, lie)
    [outcome] = served(server, folder, [sample([5, 6, 7], [8, 9, 2])], top_k=2)
    assert isinstance(outcome, Problem) and outcome.reason == "refused", outcome
    assert len(server.bodies) == 2, "it is asked again before that is a failure"


def test_a_server_reads_one_context(folder: Path) -> None:
    [outcome] = served(Server(folder), folder, [sample([5, 6, 7], [8, 9, 4, 5, 6, 10, 11], rows=[(2, 3)])])
    assert isinstance(outcome, Problem) and "several" in str(outcome)
