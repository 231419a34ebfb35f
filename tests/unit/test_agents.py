"""Agents through the OpenAI-compatible endpoint: the client of OpenAI as it is, and programs that never heard of us."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import env_lab
import numpy as np
import openai
import pytest
from env_lab import REASONING, SayingEngine, config_of, tokenizer_in

import producers.agents.processes
from asyncrl.config import Config
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import ConfigErrors, WorkError
from producers.agents.environment import Agents, Connection
from producers.agents.processes import AgentProcess
from producers.data.prompts import encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.environments.multi_turn import make_environment
from producers.rollout.rollout import Finished

ROW = {"prompt": [{"role": "user", "content": "2*3"}], "answer": "6"}
ASKED: dict[str, Callable[[openai.AsyncOpenAI, dict[str, Any], Connection], Any]] = {}
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_in(folder)


async def agent(endpoint: Connection, row: dict[str, Any]) -> Any:
    """The function of the configuration: what the test at hand plays."""
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
        return await ASKED["now"](client, row, endpoint)


class Streaming(SayingEngine):
    """Gives its tokens in pieces, as an engine does that is asked to."""

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        async for whole in super().generate(request):
            every = request.delta_tokens or len(whole.token_ids)
            for start in range(0, len(whole.token_ids), every):
                ids = whole.token_ids[start : start + every]
                last = start + every >= len(whole.token_ids)
                yield GenDelta(
                    whole.id,
                    whole.index,
                    ids,
                    whole.logprobs[start : start + every],
                    ((whole.runs[0][0], len(ids)),),
                    whole.finish if last else "",
                    start,
                )


def settings(folder: Path, text: str = "", agent: str = "", **more: Any) -> Config:
    function = 'function = "test_agents:agent"'
    return config_of(folder, f'name = "agent"\n{text}\n[environment.agent]\n{function}\n{agent}\n', **more)


def by_command(folder: Path, program: str, text: str = "", agent: str = "", **more: Any) -> Config:
    path = folder / f"agent_{abs(hash(program))}.py"
    path.write_text(program)
    words = json.dumps([sys.executable, "-S", str(path)])
    return config_of(
        folder, f'name = "agent"\n{text}\n[environment.agent]\ncommand = {words}\ngrace_s = 2.0\n{agent}\n', **more
    )


def played(
    config: Config,
    tokenizer: Tokenizer,
    script: Any,
    *,
    samples: int = 1,
    row: dict[str, Any] = ROW,
    plays: Any = None,
    engines: list[SayingEngine] | None = None,
) -> tuple[list[Finished], SayingEngine, EnvironmentFailure | None]:
    """The finished samples of a group by index, the engine, and the failure that came out."""
    environment = make_environment(config, tokenizer)
    assert isinstance(environment, Agents)
    ASKED["now"] = plays
    engine = Streaming(tokenizer, script)
    if engines is not None:
        engines.append(engine)  # for what is played
    done, failure = env_lab.play(environment, engine, config, tokenizer, row, samples=samples, limit_s=LIMIT_S)
    return done, engine, failure


def posted(url: str, key: str, body: bytes) -> int:
    """The status of the answer to these bytes."""
    try:
        ask = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"})
        return int(urllib.request.urlopen(ask, timeout=60).status)
    except urllib.error.HTTPError as error:
        return error.code


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def texts_of(item: Finished, tokenizer: Tokenizer) -> list[str]:
    """What is trained of a sample: the runs of sampled tokens."""
    ids = item.sample.token_ids
    mask = np.ones(len(ids), np.uint8) if item.mask is None else item.mask
    ends = np.flatnonzero(np.diff(np.r_[0, mask, 0]))
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in zip(ends[::2], ends[1::2], strict=True)]


def test_examples_in_the_docstrings() -> None:
    found = doctest.testmod(producers.agents.processes)
    assert found.attempted and not found.failed


# ---------------------------------------------------------------- one answer


def test_an_answer_has_its_text_usage_and_logprobs(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> float:
        assert [model.id async for model in client.models.list()] == ["policy"]
        made = await client.chat.completions.create(
            model="whatever", messages=row["prompt"], logprobs=True, temperature=0.3, extra_body={"return_token_ids": 1}
        )
        choice = made.choices[0]
        assert (choice.message.content, choice.finish_reason, made.model) == ("six", "stop", "policy")
        assert [item.token for item in choice.logprobs.content] == ["s", "i", "x", ""]
        assert all(item.logprob == -0.25 for item in choice.logprobs.content)
        assert len(choice.token_ids) == made.usage.completion_tokens == 4
        assert made.usage.prompt_tokens == len(made.prompt_token_ids)
        return 0.5

    (item,), engine, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and item.reward == 0.5 and item.mask is None and item.rows == ()
    assert texts_of(item, tokenizer) == ["six"] and item.sample.finish == "stop"
    assert engine.asked[0].temperature == 1.0, "as the run is configured, not as the agent asks"
    assert item.sample.runs == ((3, 4),)


def test_samples_side_by_side_are_told_apart_and_reward_workers_score(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=[*row["prompt"], user("again")])
            await asyncio.sleep(0.01)

    items, _, failure = played(
        settings(folder), tokenizer, lambda index, turn, _: f"s{index}t{turn}", samples=4, plays=plays
    )
    assert failure is None and [item.reward for item in items] == [None] * 4
    for index, item in enumerate(items):
        assert texts_of(item, tokenizer) == [f"s{index}t0", f"s{index}t1"]
        assert len(item.rows) == 2, "asked the same twice: two rows"


# ---------------------------------------------------------------- contexts


def test_a_chat_that_goes_on_is_one_row_and_nothing_is_encoded_again(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        messages = list(row["prompt"])
        for n in range(3):
            made = await client.chat.completions.create(model="m", messages=messages)
            messages += [made.choices[0].message, user(f"why {n}?")]

    # The tokens say more than the text does: <pad> is no text, so encoding the text again would lose it.
    odd = [[0, *tokenizer.encode_part(text), 0, *tokenizer.eos_ids] for text in ("one", "two", "three")]
    (item,), engine, failure = played(settings(folder), tokenizer, lambda _, turn, __: odd[turn], plays=plays)
    assert failure is None and item.rows == () and item.mask is not None
    assert texts_of(item, tokenizer) == ["one", "two", "three"]
    assert item.sample.token_ids[item.mask == 1].tolist() == [token for turn in odd for token in turn]
    assert item.sample.logprobs[item.mask == 0].tolist() == [0.0] * int((item.mask == 0).sum())
    whole = engine.asked[2].prompt_ids.tolist()
    assert whole[: len(engine.asked[1].prompt_ids)] == engine.asked[1].prompt_ids.tolist()
    shown = tokenizer.decode([t for t in whole if t])
    assert "why 0?" in shown and "why 1?" in shown


@pytest.mark.parametrize("check", ["tail", "strict"])
def test_a_template_that_shows_answers_otherwise_later(tmp_path: Path, check: str) -> None:
    """As Qwen3's, which leaves reasoning out of earlier answers: the tokens stand there as they were said."""
    tokenizer = tokenizer_in(tmp_path, REASONING)

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        made = await client.chat.completions.create(model="m", messages=row["prompt"])
        messages = [*row["prompt"], made.choices[0].message, user("sure?")]
        await client.chat.completions.create(model="m", messages=messages)

    config = settings(tmp_path, f'template = "{check}"')
    (item,), _, failure = played(config, tokenizer, lambda _, turn, __: f"answer {turn}", plays=plays)
    assert failure is None and len(item.rows) == 0
    assert texts_of(item, tokenizer) == ["answer 0", "answer 1"]


def test_an_edited_history_is_a_row_of_its_own_with_the_tokens_of_our_answers(
    folder: Path, tokenizer: Tokenizer
) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> float:
        first = await client.chat.completions.create(model="m", messages=row["prompt"])
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        await client.chat.completions.create(
            model="m", messages=[{"role": "developer", "content": "be brief"}, *row["prompt"], answer, user("go on")]
        )
        return 1.0

    odd = [0, *tokenizer.encode_part("one"), *tokenizer.eos_ids]
    (item,), engine, failure = played(
        settings(folder), tokenizer, lambda _, turn, __: odd if turn == 0 else "two", plays=plays
    )
    assert failure is None and len(item.rows) == 1 and item.reward == 1.0
    second = engine.asked[1].prompt_ids.tolist()
    place = next(n for n in range(len(second)) if second[n : n + len(odd)] == odd)
    text = tokenizer.decode([t for t in second[:place] if t])
    assert "be brief" in text and second.count(tokenizer.eos_ids[0]) == text.count("system") + 3
    assert texts_of(item, tokenizer) == ["one", "two"]


def test_text_completions_go_on_from_text_and_from_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        prompt = "2*3="
        for _ in range(2):
            made = await client.completions.create(model="m", prompt=prompt, max_tokens=2)
            assert made.choices[0].finish_reason == "length" and len(made.choices[0].text) == 2
            prompt += made.choices[0].text + ";"
        await client.completions.create(model="m", prompt=tokenizer.encode("7*7="), max_tokens=9)

    (item,), engine, _ = played(settings(folder), tokenizer, lambda *_: "abcdef", plays=plays)
    assert [tokenizer.decode(ask.prompt_ids.tolist()) for ask in engine.asked] == ["2*3=", "2*3=ab;", "7*7="]
    assert texts_of(item, tokenizer) == ["ab", "ab", "abcdef"] and len(item.rows) == 2


# ---------------------------------------------------------------- tools, stops, streams


def test_tool_calls_and_their_results(folder: Path, tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        messages: list[Any] = list(row["prompt"])
        made = await client.chat.completions.create(model="m", messages=messages, tools=[tool])
        message = made.choices[0].message
        assert made.choices[0].finish_reason == "tool_calls" and message.content == "Let me see."
        (call,) = message.tool_calls
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        made = await client.chat.completions.create(model="m", messages=messages, tools=[tool])
        assert made.choices[0].message.content == "3!" and not made.choices[0].message.tool_calls

    said = ['Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "3!"]
    (item,), engine, failure = played(settings(folder), tokenizer, lambda _, turn, __: said[turn], plays=plays)
    assert failure is None and item.rows == (), "the call is known by its id, so the row goes on"
    assert texts_of(item, tokenizer) == said and len(engine.asked) == 2


def test_a_stop_of_the_agent_ends_an_answer(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        made = await client.chat.completions.create(model="m", messages=row["prompt"], stop=["Obs", "never"])
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("Act: look\n", "stop")
        assert made.usage.completion_tokens == len("Act: look\nObs")

    text = "Act: look\nObservation: a cat"
    (item,), engine, _ = played(settings(folder), tokenizer, lambda *_: text, plays=plays)
    assert texts_of(item, tokenizer) == ["Act: look\nObs"], "what was sampled behind the stop is not trained"
    assert engine.asked[0].delta_tokens > 0


@pytest.mark.parametrize("stop", [None, "lazy"])
def test_a_stream_gives_the_text_as_it_comes(folder: Path, tokenizer: Tokenizer, stop: str | None) -> None:
    text = "the quick brown fox jumps over the lazy dog"

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        more: dict[str, Any] = {} if stop is None else {"stop": stop}
        stream = await client.chat.completions.create(
            model="m", messages=row["prompt"], stream=True, stream_options={"include_usage": True}, **more
        )
        events = [event async for event in stream]
        told = [event.choices[0].delta.content for event in events if event.choices and event.choices[0].delta.content]
        assert "".join(told) == (text if stop is None else "the quick brown fox jumps over the ") and len(told) > 2
        assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "stop"
        assert events[-1].usage.completion_tokens >= len("".join(told))

    (item,), _, failure = played(settings(folder), tokenizer, lambda *_: text, plays=plays)
    assert failure is None
    assert texts_of(item, tokenizer) == [text if stop is None else text[: text.index("lazy") + 4]]


def test_a_turn_that_the_agent_gives_up_leaves_no_trace(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(model="m", messages=row["prompt"])
        await client.chat.completions.create(model="m", messages=row["prompt"])

    (item,), engine, failure = played(
        settings(folder), tokenizer, lambda _, turn, __: None if turn == 0 else "six", plays=plays
    )
    assert failure is None and texts_of(item, tokenizer) == ["six"] and item.rows == ()
    assert engine.given_up == [engine.asked[0].id]


@pytest.mark.parametrize("other", [False, True])
def test_a_later_turn_that_the_agent_gives_up_leaves_no_trace(folder: Path, tokenizer: Tokenizer, other: bool) -> None:
    """Clients repeat a request that took too long; `other`: it was a conversation of its own."""

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        made = await client.chat.completions.create(model="m", messages=row["prompt"])
        messages = [*row["prompt"], made.choices[0].message, user("why?")]
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(
                model="m", messages=[user("something else")] if other else messages
            )
        await client.chat.completions.create(model="m", messages=messages)

    (item,), engine, failure = played(
        settings(folder), tokenizer, lambda _, turn, __: None if turn == 1 else "six", plays=plays
    )
    shown = tokenizer.decode(engine.asked[2].prompt_ids.tolist())
    assert failure is None and shown == "user\n2*3\nassistant\nsix\nuser\nwhy?\nassistant\n"
    assert texts_of(item, tokenizer) == ["six", "six"] and item.rows == ()


def test_what_is_asked_beyond_the_end_of_a_session_is_given_up(folder: Path, tokenizer: Tokenizer) -> None:
    """Nobody would ever read it, and the engine would go on with it."""
    left: list[asyncio.Task[Any]] = []

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        await client.chat.completions.create(model="m", messages=row["prompt"])
        if left:
            with pytest.raises(openai.APIConnectionError):
                await asyncio.wait_for(left[0], 60)
            return
        own = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        left.append(asyncio.create_task(own.chat.completions.create(model="m", messages=row["prompt"])))
        while len(engines[0].asked) < 2:
            await asyncio.sleep(0.05)

    engines: list[SayingEngine] = []
    config = config_of(
        folder, 'name = "agent"\n[environment.agent]\nfunction = "test_agents:agent"\nmax_processes = 1\n'
    )

    def script(index: int, turn: int, _: str) -> str | None:
        return "six" if turn == 0 else None

    items, engine, failure = played(config, tokenizer, script, samples=2, plays=plays, engines=engines)
    assert failure is None and len(items) == 2 and len(engine.given_up) == 1


# ---------------------------------------------------------------- refusals and limits


def test_what_cannot_be_given_is_refused(folder: Path, tokenizer: Tokenizer) -> None:
    refused: list[tuple[int, str]] = []

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
        bad: list[dict[str, Any]] = [
            {"n": 2},
            {"messages": []},
            {"messages": [{"content": "x"}]},
            {"messages": [image]},
            {"max_tokens": -1},
            {"stop": ["a"] * 5},
            {"logprobs": True, "top_logprobs": 3},
            {"tools": ["x"]},
        ]
        for change in bad:
            try:
                await client.chat.completions.create(**{"model": "m", "messages": row["prompt"], **change})
            except openai.APIStatusError as error:
                refused.append((error.status_code, str(error.body["param"])))  # type: ignore[index]
        stranger = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="sk-other", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        for body in (b"{", b"[" * 5000, b"[]", b"\xff"):
            assert (
                await asyncio.to_thread(posted, f"{endpoint.base_url}/chat/completions", endpoint.api_key, body) == 400
            )
        await client.chat.completions.create(model="m", messages=row["prompt"])

    (item,), _, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and len(item.sample.token_ids) == 4
    assert refused == [
        (400, "n"),
        (400, "messages"),
        (400, "messages"),
        (400, "messages"),
        (400, "max_tokens"),
        (400, "stop"),
        (400, "top_logprobs"),
        (400, "tools"),
    ]


def test_what_the_model_has_no_tokens_for_is_refused(folder: Path, tokenizer: Tokenizer) -> None:
    """An engine breaks on an id beyond its embeddings, and the producer with it."""
    found: list[tuple[int, Any]] = []

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        for prompt in ([1, 10**6], [1, -5], [2**40], "\u6771"):
            try:
                await client.completions.create(model="m", prompt=prompt)
            except openai.APIStatusError as error:
                found.append((error.status_code, error.body["type"]))  # type: ignore[index]
        try:
            await client.chat.completions.create(model="m", messages=[user("\u6771")])
        except openai.APIStatusError as error:
            found.append((error.status_code, error.body["type"]))  # type: ignore[index]
        await client.chat.completions.create(model="m", messages=row["prompt"])

    (item,), engine, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and len(engine.asked) == 1 and len(item.sample.token_ids) == 4
    assert found == [(400, "invalid_request_error")] * 5


def test_errors_of_the_server_have_the_form_of_the_interface(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.agents.endpoint.MOST_BYTES", 1000)
    found: list[tuple[int, str]] = []

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        try:
            await client.chat.completions.create(model="m", messages=[user("x" * 5000)])
        except openai.APIStatusError as error:
            found.append((error.status_code, error.body["type"]))  # type: ignore[index]
        await client.chat.completions.create(model="m", messages=row["prompt"])

    (_,), _, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and found == [(413, "invalid_request_error")]


def test_a_context_without_room_is_refused_and_cuts_the_sample(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        made = await client.chat.completions.create(model="m", messages=row["prompt"])
        messages = [*row["prompt"], made.choices[0].message, user("x" * 400)]
        await client.chat.completions.create(model="m", messages=messages)  # raises, and nobody catches it

    (item,), _, failure = played(settings(folder, room=40), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and item.sample.finish == "length" and texts_of(item, tokenizer) == ["six"]


def test_turns_are_limited(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> str:
        await client.chat.completions.create(model="m", messages=row["prompt"])
        with pytest.raises(openai.BadRequestError, match="max_turns"):
            await client.chat.completions.create(model="m", messages=row["prompt"])
        return None  # type: ignore[return-value]

    (item,), engine, failure = played(settings(folder, "max_turns = 1"), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and len(engine.asked) == 1 and item.reward is None


def test_an_engine_that_breaks_ends_the_producer_and_not_the_sample_alone(folder: Path, tokenizer: Tokenizer) -> None:
    class Broken(SayingEngine):
        async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
            raise WorkError("engine.broken", "no device")
            yield

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        await client.chat.completions.create(model="m", messages=row["prompt"])

    environment = make_environment(settings(folder), tokenizer)
    ASKED["now"] = plays
    prompt = encode_prompt(ROW, settings(folder).data, tokenizer, ())

    async def run() -> None:
        await environment.open()
        try:
            async for _ in environment.play(
                Broken(tokenizer, lambda *_: ""), GenRequest("1:1", prompt, (0,), 1, 9), ROW
            ):  # type: ignore[arg-type]
                pass
        finally:
            await environment.close()

    with pytest.raises(WorkError, match="no device"):
        asyncio.run(asyncio.wait_for(run(), LIMIT_S))


# ---------------------------------------------------------------- rewards and failures


def test_a_posted_reward_counts_and_turns_may_have_theirs(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> float:
        await client.chat.completions.create(model="m", messages=row["prompt"])
        for bad in ({"reward": "much"}, {"reward": 0.5, "turn": 7}, {"reward": 1.0, "parts": 3}, [1]):
            with pytest.raises(openai.BadRequestError):
                await client.post("/reward", body=bad, cast_to=object)
        for good in ({"reward": 0.25, "turn": 0}, {"reward": 2.0, "parts": {"style": 1.0, "reward": 7.0}}):
            assert (await client.post("/reward", body=good, cast_to=object))["turns"] == 1
        return 9.0

    (item,), _, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and item.reward == 2.25 and item.turns == ((3, 0.25),)
    assert item.parts == {"turns": 0.25, "final": 2.0, "style": 1.0}


@pytest.mark.parametrize(
    ("what", "reason"),
    [("raise", "crashed"), ("nothing", "abandoned"), ("hang", "timeout"), ("nan", "not_finite"), ("text", "result")],
)
def test_failures_have_reasons_and_are_no_rewards(folder: Path, tokenizer: Tokenizer, what: str, reason: str) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> Any:
        if what != "nothing":
            await client.chat.completions.create(model="m", messages=row["prompt"])
        if what == "raise":
            raise KeyError("on purpose")
        if what == "hang":
            await asyncio.sleep(600)
        return {"nan": float("nan"), "text": "good"}.get(what)

    config = settings(folder, "episode_timeout_s = 2.0" if what == "hang" else "")
    items, _, failure = played(config, tokenizer, lambda *_: "six", plays=plays)
    assert items == [] and failure is not None and failure.reason.startswith(f"environment.{reason}: ")
    assert what != "raise" or "on purpose" in failure.reason


# ---------------------------------------------------------------- commands

ASKS = """
import json, os, sys, urllib.request
def ask(url, key, messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers)))
"""
ONE = (
    ASKS
    + """
row = json.loads(sys.stdin.read())
made = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], row["prompt"])
print("thinking")
print(json.dumps({"reward": float(made["choices"][0]["message"]["content"] == row["answer"]), "asks": 1}))
"""
)
LINES = (
    ASKS
    + """
for line in sys.stdin:
    job = json.loads(line)
    assert job["anthropic_base_url"] + "/v1" == job["base_url"]
    ask(job["base_url"], job["api_key"], job["row"]["prompt"])
    print(os.getpid(), flush=True)
"""
)


def test_a_program_plays_a_sample(folder: Path, tokenizer: Tokenizer) -> None:
    items, _, failure = played(by_command(folder, ONE), tokenizer, lambda index, *_: "6" if index else "7", samples=2)
    assert failure is None and [(item.reward, item.parts) for item in items] == [
        (0.0, {"asks": 1.0}),
        (1.0, {"asks": 1.0}),
    ]


def test_a_program_plays_one_sample_after_the_other(folder: Path, tokenizer: Tokenizer) -> None:
    config = by_command(folder, LINES, agent="sessions = 3\nmax_processes = 1")
    items, _, failure = played(config, tokenizer, lambda *_: "six", samples=4)
    pids = [item.reward for item in items]
    assert failure is None and len(pids) == 4 and sorted(pids.count(pid) for pid in set(pids)) == [1, 3]


@pytest.mark.parametrize(
    ("program", "text", "reason"),
    [
        ("import sys\nsys.exit('no idea')", "", "crashed: the agent ended with 1: no idea"),
        ("print('done')", "", "abandoned: the agent ended after 0 requests"),
        ("import time\ntime.sleep(600)", "episode_timeout_s = 3.0", "timeout: "),
    ],
)
def test_programs_that_fail_have_a_reason(
    folder: Path, tokenizer: Tokenizer, program: str, text: str, reason: str
) -> None:
    items, _, failure = played(by_command(folder, program, text), tokenizer, lambda *_: "six")
    assert items == [] and failure is not None and failure.reason.startswith(f"environment.{reason}"), failure


@pytest.mark.long
def test_no_process_is_left_behind(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    program = f"""
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    played(by_command(folder, program, "episode_timeout_s = 4.0"), tokenizer, lambda *_: "six")
    until = time.monotonic() + LIMIT_S
    for pid in (tmp_path / "pids").read_text().split():
        while not has_ended(int(pid)):  # a killed process ends when it is next scheduled
            assert time.monotonic() < until, pid
            time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_ending_a_process_that_will_not_end_may_be_cancelled() -> None:
    """A lost lease cancels what a time limit had cancelled already."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"

    async def run() -> int:
        made = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert made.stdout is not None
        await made.stdout.readline()
        ending = asyncio.create_task(AgentProcess(made, grace_s=60.0).end())
        await asyncio.sleep(0.3)
        assert not ending.done()
        ending.cancel()
        await asyncio.wait([ending], timeout=LIMIT_S)
        assert ending.cancelled()
        return await asyncio.wait_for(made.wait(), LIMIT_S)

    assert asyncio.run(run()) == -signal.SIGKILL


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_a_child_in_a_session_of_its_own_is_ended_and_its_pipes_are_closed(ended: bool) -> None:
    """A child whose parent has ended cannot be found, but holds no descriptor here."""
    code = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
time.sleep({0 if ended else 600})
"""

    async def run() -> tuple[int, bool]:
        pipe = asyncio.subprocess.PIPE
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert made.stdout is not None
        child = int(await made.stdout.readline())
        while ended and made.returncode is None:  # `wait` would wait for the child's pipes too
            await asyncio.sleep(0.01)
        await AgentProcess(made, grace_s=0.5).end()
        return child, all(made._transport.get_pipe_transport(number).is_closing() for number in range(3))

    child, closed = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    try:
        assert closed
        until = time.monotonic() + LIMIT_S
        while not ended and not has_ended(child):
            assert time.monotonic() < until, child
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_the_key_may_stand_in_the_path_and_is_void_at_the_end(folder: Path, tokenizer: Tokenizer) -> None:
    kept: list[str] = []

    def models(url: str) -> int:
        try:
            return int(urllib.request.urlopen(f"{url}/models", timeout=60).status)
        except urllib.error.HTTPError as error:
            return error.code

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        root = endpoint.base_url.removesuffix("/v1")
        assert "127.0.0.1" in root
        kept.append(f"{root}/s/{endpoint.api_key}/v1")
        assert await asyncio.to_thread(models, kept[-1]) == 200
        assert await asyncio.to_thread(models, f"{root}/v1") == 401
        if len(kept) == 2:
            assert await asyncio.to_thread(models, kept[0]) == 401
        await client.chat.completions.create(model="m", messages=row["prompt"])

    config = config_of(
        folder, 'name = "agent"\n[environment.agent]\nfunction = "test_agents:agent"\nmax_processes = 1\n'
    )
    items, _, failure = played(config, tokenizer, lambda *_: "six", samples=2, plays=plays)
    assert failure is None and len(items) == 2 == len(set(kept))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('name = "agent"', "exactly one of environment.agent.command"),
        ('name = "agent"\n[environment.agent]\ncommand = ["a"]\nfunction = "a:b"', "exactly one"),
        ('name = "agent"\n[environment.agent]\nfunction = "a"', "not 'module:name'"),
        ('name = "agent"\n[environment.agent]\nfunction = "a:b"\nsessions = 2', "is for agent.command"),
        ('[environment.agent]\nfunction = "a:b"', "environment.name is not 'agent'"),
        ('name = "agent"\n[environment.agent]\ncommand = ["a"]\nport = 80\n[producers]\ncount = 2', "set port = 0"),
    ],
)
def test_contradictions_are_named(folder: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        config_of(folder, text)
    assert wanted in caught.value.render()
