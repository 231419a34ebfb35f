"""Responses and Anthropic's Messages next to Chat Completions: unmodified clients of both vendors, the same tokens."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
import pytest
from env_lab import TOOLS_SHOWN, SayingEngine, config_of, tokenizer_in
from test_agents import ROW, Streaming, folder, played, settings, texts_of, tokenizer, user  # noqa: F401

import producers.agents.endpoint as endpoint_module
from asyncrl.engine import GenDelta, GenRequest
from producers.agents.environment import Connection
from producers.agents.interface import ChatRequest
from producers.agents.messages_api import read_request
from producers.agents.openai_api import read_chat, read_completion
from producers.agents.responses_api import read_response
from producers.data.openai_items import ApiError
from producers.data.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ONLY_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CALL = f"Let me see. {ONLY_CALL}"


class Said(NamedTuple):
    """An answer as the agent sees it: `calls` are (id, name, arguments)."""

    text: str
    calls: list[tuple[str, str, Any]]


class Chat:
    """A conversation by Chat Completions. An agent keeps it in the form of its interface."""

    function: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}

    def __init__(self, endpoint: Connection, *, system: str = "", tools: bool = False) -> None:
        self.client: Any = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        self.system = system
        self.more: dict[str, Any] = {"tools": [self.function]} if tools else {}
        self.exchanges: list[list[Any]] = []  # each begins with a message of the user

    def history(self) -> list[Any]:
        return [item for exchange in self.exchanges for item in exchange]

    async def say(self, text: str, *, stream: bool = False) -> Said:
        """The next message of the user, and the answer."""
        self.exchanges.append([user(text)])
        return await self.ask(stream=stream)

    async def give(self, call: str, result: str, *, stream: bool = False) -> Said:
        """The result of a call, and the answer."""
        self.exchanges[-1].append({"role": "tool", "tool_call_id": call, "content": result})
        return await self.ask(stream=stream)

    def forget(self) -> None:
        """Drop the first exchange: the history is edited."""
        del self.exchanges[0]

    async def ask(self, *, stream: bool) -> Said:
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"model": "m", "messages": system + self.history(), **self.more}
        if stream:
            async with self.client.chat.completions.stream(**asked) as events:
                made = await events.get_final_completion()
        else:
            made = await self.client.chat.completions.create(**asked)
        answer = made.choices[0].message
        self.exchanges[-1].append(answer.to_dict())
        calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in answer.tool_calls or ()]
        return Said(answer.content or "", calls)


class Responses(Chat):
    function: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}

    async def give(self, call: str, result: str, *, stream: bool = False) -> Said:
        self.exchanges[-1].append({"type": "function_call_output", "call_id": call, "output": result})
        return await self.ask(stream=stream)

    def items(self) -> dict[str, Any]:
        return {"input": self.history()}

    async def ask(self, *, stream: bool) -> Said:
        instructions = {"instructions": self.system} if self.system else {}
        asked = {"model": "m", **self.items(), **instructions, **self.more}
        if stream:
            async with self.client.responses.stream(**asked) as events:
                made = await events.get_final_response()
        else:
            made = await self.client.responses.create(**asked)
        self.keep(made)
        calls = [
            (item.call_id, item.name, json.loads(item.arguments))
            for item in made.output
            if item.type == "function_call"
        ]
        return Said(made.output_text, calls)

    def keep(self, made: Any) -> None:
        self.exchanges[-1] += made.output


class Chained(Responses):
    """By `previous_response_id`: only what is new is sent."""

    last: Any = None
    sent = 0

    def items(self) -> dict[str, Any]:
        new = self.history()[self.sent :]
        return {"input": new, "previous_response_id": self.last.id} if self.last else {"input": new}

    def forget(self) -> None:
        super().forget()
        self.last, self.sent = None, 0

    def keep(self, made: Any) -> None:
        super().keep(made)
        self.last, self.sent = made, len(self.history())


class Messages(Chat):
    function: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}

    def __init__(self, endpoint: Connection, *, system: str = "", tools: bool = False) -> None:
        super().__init__(endpoint, system=system, tools=tools)
        self.client = claude(endpoint)

    async def give(self, call: str, result: str, *, stream: bool = False) -> Said:
        block = {"type": "tool_result", "tool_use_id": call, "content": [{"type": "text", "text": result}]}
        self.exchanges[-1].append({"role": "user", "content": [block]})
        return await self.ask(stream=stream)

    async def ask(self, *, stream: bool) -> Said:
        system = {"system": [{"type": "text", "text": self.system}]} if self.system else {}
        asked = {"model": "m", "max_tokens": 300, "messages": self.history(), **system, **self.more}
        if stream:
            async with self.client.messages.stream(**asked) as events:
                made = await events.get_final_message()
        else:
            made = await self.client.messages.create(**asked)
        self.exchanges[-1].append({"role": "assistant", "content": made.content})
        assert made.stop_reason == (
            "tool_use" if any(block.type == "tool_use" for block in made.content) else "end_turn"
        )
        text = "".join(block.text for block in made.content if block.type == "text")
        return Said(text, [(block.id, block.name, block.input) for block in made.content if block.type == "tool_use"])


INTERFACES = [Chat, Responses, Chained, Messages]


def claude(endpoint: Connection, **more: Any) -> Any:
    named = {"base_url": endpoint.anthropic_base_url, "api_key": endpoint.api_key, "max_retries": 0, **more}
    return anthropic.AsyncAnthropic(**named)


def test_models_in_the_form_of_each_interface(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        assert [model.id async for model in client.models.list()] == ["policy"]
        found = [model async for model in claude(endpoint).models.list()]
        assert [(model.type, model.id) for model in found] == [("model", "policy")]
        await client.chat.completions.create(model="m", messages=row["prompt"])

    (_,), _, failure = played(settings(folder), tokenizer, lambda *_: "x", plays=plays)
    assert failure is None


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_stream_without_news_is_not_silent(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Clients and proxies end silent connections; comments in the stream are for them alone."""
    monkeypatch.setattr(endpoint_module, "PING_S", 0.05)

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        body = {"model": "m", "max_tokens": 9, "stream": True, "messages": row["prompt"], "input": row["prompt"]}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as web,
            web.post(f"{endpoint.base_url}/{path}", json=body) as response,
        ):
            while await response.content.readline() != b": ping\n":  # bounded: the test's limit
                assert not response.content.at_eof()
        await client.chat.completions.create(model="m", messages=row["prompt"])

    (_,), _, failure = played(settings(folder), tokenizer, lambda _, turn, __: [None, "x"][turn], plays=plays)
    assert failure is None


# ---------------------------------------------------------------- rows of tokens


@pytest.mark.parametrize(("text", "stream"), [("one", False), ("one", True), ("", True)])
@pytest.mark.parametrize("interface", [Responses, Chained, Messages])
def test_a_conversation_is_one_row_of_exact_tokens(
    folder: Path, tokenizer: Tokenizer, interface: type[Chat], text: str, stream: bool
) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        chat = interface(endpoint, system="be brief")
        assert await chat.say("2*3", stream=stream) == (text, [])
        assert await chat.say("why?", stream=stream) == ("two", [])

    # <pad> is no text: encoding the text again would lose it.
    odd = [[0, *tokenizer.encode_part(words), 0, *tokenizer.eos_ids] for words in (text, "two")]
    (item,), engine, failure = played(settings(folder), tokenizer, lambda _, turn, __: odd[turn], plays=plays)
    assert failure is None and len(item.rows) == 1 and item.mask is not None
    assert item.sample.token_ids[item.mask == 1].tolist() == odd[0] + odd[1]
    first, second = (ask.prompt_ids.tolist() for ask in engine.asked)
    assert second[: len(first) + len(odd[0])] == first + odd[0]
    assert tokenizer.decode(second[len(first) + len(odd[0]) :]) == "\nuser\nwhy?\nassistant\n"
    assert tokenizer.decode(first) == "system\nbe brief\nuser\n2*3\nassistant\n"


@pytest.mark.parametrize(("text", "stream"), [(CALL, False), (CALL + ONLY_CALL, True), (ONLY_CALL, True)])
@pytest.mark.parametrize("interface", [Responses, Chained, Messages])
def test_a_call_and_its_result_continue_the_row(
    folder: Path, tokenizer: Tokenizer, interface: type[Chat], stream: bool, text: str
) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        chat = interface(endpoint, tools=True)
        said = await chat.say("2*3", stream=stream)
        assert said.text == ("Let me see." if text.startswith("Let") else "")
        assert [call[1:] for call in said.calls] == [("add", {"a": 1})] * text.count("<tool_call>")
        assert await chat.give(said.calls[0][0], "3", stream=stream) == ("3!", [])

    said = [text, "3!"]
    (item,), engine, failure = played(settings(folder), tokenizer, lambda _, turn, __: said[turn], plays=plays)
    assert failure is None and item.rows == () and len(engine.asked) == 2
    assert texts_of(item, tokenizer) == said
    assert tokenizer.decode(engine.asked[1].prompt_ids.tolist()).endswith("\ntool\n3\nassistant\n")


@pytest.mark.parametrize("seed", range(4))
def test_a_dialogue_has_the_same_tokens_through_every_interface(tmp_path: Path, seed: int) -> None:
    """Questions, calls with results, forgotten beginnings; each turn as a stream or whole."""
    draw = random.Random(seed)
    system = draw.choice(["", "be brief"])
    turns = [(draw.random() < 0.4, draw.random() < 0.5) for _ in range(5)]
    tokenizer = tokenizer_in(tmp_path, TOOLS_SHOWN)
    left = list(INTERFACES)
    said: list[list[Said]] = []

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        interface = left.pop()
        chat, stream, answers = interface(endpoint, system=system, tools=True), random.Random(f"{seed}{interface}"), []
        for number, (forgets, calls) in enumerate(turns):
            if forgets and number > 1:
                chat.forget()
            answers.append(await chat.say(f"question {number}", stream=stream.random() < 0.5))
            assert bool(answers[-1].calls) == calls
            if calls:
                answers.append(await chat.give(answers[-1].calls[0][0], "3", stream=stream.random() < 0.5))
        said.append([Said(one.text, [call[1:] for call in one.calls]) for one in answers])

    def script(_: int, __: int, context: str) -> str:
        question = context.rpartition("question ")[2]
        return CALL if turns[int(question[0])][1] and "tool" not in question else f"answer {question[0]}"

    config = settings(tmp_path, "max_turns = 20", room=1800)
    items, _, failure = played(config, tokenizer, script, samples=len(INTERFACES), plays=plays)
    assert failure is None and len(items) == len(INTERFACES) and not left
    assert all(one == said[0] for one in said)
    first, *others = items
    assert len(first.rows) == 1 + sum(forgets for forgets, _ in turns[2:]), "each edit opens a row"
    for other in others:
        assert other.sample.token_ids.tolist() == first.sample.token_ids.tolist()
        assert other.mask.tolist() == first.mask.tolist() and other.rows == first.rows


def test_a_foreign_conversation_has_one_normal_form() -> None:
    """Also answers of other models, such as examples that an agent shows: templates get their calls as objects."""
    arguments = '{"a": 1}'
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [
        {"role": "system", "content": "be brief"},
        user("x"),
        {"role": "assistant", "content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    items = [
        user("x"),
        {"role": "assistant", "content": [{"type": "output_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
    ]
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
    blocks = [
        user("x"),
        {"role": "assistant", "content": [{"type": "text", "text": "hm"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
    ]
    one = read_chat({"messages": chat, "tools": [Chat.function]})
    other = read_response({"input": items, "instructions": "be brief", "tools": [Responses.function]}, {})
    third = read_request({"messages": blocks, "system": "be brief", "tools": [Messages.function], "max_tokens": 9})
    assert one.messages == other.messages == third.messages and one.tools == other.tools == third.tools
    assert one.messages is not None and one.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


# ---------------------------------------------------------------- streams, ends, references


def test_a_stream_of_a_response_has_the_events_of_the_interface(folder: Path, tokenizer: Tokenizer) -> None:
    text = "the quick brown fox jumps over the lazy dog"

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        events = [event async for event in await client.responses.create(model="m", input="2*3", stream=True)]
        kinds = [event.type for event in events]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == text and len(deltas) > 2
        assert [kind for kind in kinds if not kind.endswith(".delta")] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        made = events[-1].response
        assert (await client.responses.retrieve(made.id)).output_text == text
        assert made.output_text == text and made.id == events[0].response.id and made.status == "completed"
        assert (made.usage.output_tokens, made.usage.input_tokens) == (
            len(text) + 1,
            len(engines[0].asked[0].prompt_ids),
        )
        assert {event.item_id for event in events if hasattr(event, "item_id")} == {made.output[0].id}

    engines: list[SayingEngine] = []
    (item,), _, failure = played(settings(folder), tokenizer, lambda *_: text, plays=plays, engines=engines)
    assert failure is None and texts_of(item, tokenizer) == [text]


def test_a_stream_of_a_message_has_the_events_of_the_interface(folder: Path, tokenizer: Tokenizer) -> None:
    text = "the quick brown fox jumps over the lazy dog"

    async def plays(_: Any, row: Any, endpoint: Connection) -> None:
        stream = await claude(endpoint).messages.create(
            model="m", max_tokens=300, messages=row["prompt"], stop_sequences=["never", "lazy"], stream=True
        )
        events = [event async for event in stream]
        deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
        assert "".join(deltas) == "the quick brown fox jumps over the " and len(deltas) > 2
        assert [event.type for event in events if event.type != "content_block_delta"] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        end = events[-2]
        assert (end.delta.stop_reason, end.delta.stop_sequence) == ("stop_sequence", "lazy")
        assert end.usage.output_tokens == text.index("lazy") + 4

    (item,), _, failure = played(settings(folder), tokenizer, lambda *_: text, plays=plays)
    assert failure is None and texts_of(item, tokenizer) == [text[: text.index("lazy") + 4]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_says_so(folder: Path, tokenizer: Tokenizer, stream: bool) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        asked = {"model": "m", "input": "2*3", "max_output_tokens": 3}
        made = await client.responses.create(**asked, stream=stream)
        if stream:
            last = [event async for event in made][-1]
            assert last.type == "response.incomplete"
            made = last.response
        assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert made.output_text == "six" and made.output[0].status == "incomplete"
        asked = {"model": "m", "messages": row["prompt"], "max_tokens": 3}
        if stream:
            async with claude(endpoint).messages.stream(**asked) as events:
                said = await events.get_final_message()
        else:
            said = await claude(endpoint).messages.create(**asked)
        assert (said.stop_reason, said.stop_sequence, said.usage.output_tokens) == ("max_tokens", None, 3)

    (item,), _, failure = played(settings(folder), tokenizer, lambda *_: "sixty", plays=plays)
    assert failure is None and texts_of(item, tokenizer) == ["six", "six"]


def test_a_response_has_logprobs_if_they_are_included(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        for include in (["message.output_text.logprobs"], ["reasoning.encrypted_content"]):
            made = await client.responses.create(model="m", input="2*3", include=include)
            found = [(item.token, item.logprob) for item in made.output[0].content[0].logprobs]
            expected = [(text, -0.25) for text in ("s", "i", "x", "")]
            assert found == (expected if include[0].endswith("logprobs") else [])

    _, _, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None


def test_an_earlier_response_is_known_in_its_session_alone(folder: Path, tokenizer: Tokenizer) -> None:
    ids: list[str] = []

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        for unknown in [*ids, "resp_0", 7]:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="2*3", previous_response_id=unknown)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(str(unknown))
        first = await client.responses.create(model="m", input="2*3", instructions="be brief")
        assert await client.responses.retrieve(first.id) == first
        ids.append(first.id)
        for _ in range(2):  # an earlier response may be continued twice
            await client.responses.create(
                model="m", input="why?", previous_response_id=first.id, instructions="be verbose"
            )

    config = config_of(
        folder, 'name = "agent"\n[environment.agent]\nfunction = "test_agents:agent"\nmax_processes = 1\n'
    )
    items, engine, failure = played(config, tokenizer, lambda *_: "six", samples=2, plays=plays)
    assert failure is None and len(items) == len(set(ids)) == 2
    shown = [tokenizer.decode(ask.prompt_ids.tolist()) for ask in engine.asked[1:3]]
    assert shown == ["system\nbe verbose\nuser\n2*3\nassistant\nsix\nuser\nwhy?\nassistant\n"] * 2


def test_reasoning_that_comes_back_is_left_out(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
        made = await client.responses.create(model="m", input=row["prompt"])
        asked = [*row["prompt"], thought, *made.output, {"role": "developer", "content": "be brief"}]
        await client.responses.create(model="m", input=asked)
        block = {"type": "thinking", "thinking": "hm", "signature": "s"}
        answer = {"role": "assistant", "content": [block, {"type": "text", "text": "six"}]}
        asked = [*row["prompt"], answer, {"role": "system", "content": "be brief"}, answer, user("why?")]
        await claude(endpoint).messages.create(model="m", max_tokens=9, messages=asked)

    (item,), engine, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and item.rows == (), "the interfaces of a session may be mixed"
    assert tokenizer.decode(engine.asked[2].prompt_ids.tolist()) == (
        "user\n2*3\nassistant\nsix\nsystem\nbe brief\nassistant\nsix\nuser\nwhy?\nassistant\n"
    )


def test_results_of_tools_stand_in_their_order(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(_: Any, row: Any, endpoint: Connection) -> None:
        chat = Messages(endpoint, tools=True)
        first, second = (await chat.say("2*3")).calls
        results = [
            {"type": "tool_result", "tool_use_id": first[0], "content": "3"},
            {"type": "tool_result", "tool_use_id": second[0], "content": "no such number", "is_error": True},
            {"type": "text", "text": "go "},
            {"type": "text", "text": "on"},
        ]
        chat.exchanges.append([{"role": "user", "content": results}])
        assert await chat.ask(stream=False) == ("six", [])

    said = [CALL + ONLY_CALL, "six"]
    (item,), engine, failure = played(settings(folder), tokenizer, lambda _, turn, __: said[turn], plays=plays)
    assert failure is None and item.rows == ()
    assert tokenizer.decode(engine.asked[1].prompt_ids.tolist()).endswith(
        "\ntool\n3\ntool\nError: no such number\nuser\ngo on\nassistant\n"
    )


def test_tools_that_are_switched_off_are_not_read(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        made = await client.responses.create(model="m", input="2*3", tools=[Responses.function], tool_choice="none")
        assert made.output_text == CALL and len(made.output) == 1
        said = await claude(endpoint).messages.create(
            model="m", max_tokens=300, messages=row["prompt"], tools=[Messages.function], tool_choice={"type": "none"}
        )
        assert [block.text for block in said.content] == [CALL]

    _, _, failure = played(settings(folder), tokenizer, lambda *_: CALL, plays=plays)
    assert failure is None


def test_tokens_are_counted_without_a_trace(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(_: Any, row: Any, endpoint: Connection) -> None:
        chat = Messages(endpoint)
        await chat.say("2*3")
        other = await chat.client.messages.count_tokens(model="m", messages=[user("x")], tools=[Messages.function])
        assert other.input_tokens == len(tokenizer.encode("<bos>user\nx<eos>\n<bos>assistant\n"))
        chat.exchanges.append([user("why?")])
        counted = await chat.client.messages.count_tokens(model="m", messages=chat.history())
        await chat.ask(stream=False)
        assert counted.input_tokens == len(engines[0].asked[1].prompt_ids)
        with pytest.raises(anthropic.BadRequestError):
            await chat.client.messages.count_tokens(model="m", messages=[user("\u6771")])

    engines: list[SayingEngine] = []
    (item,), _, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays, engines=engines)
    assert failure is None and item.rows == () and len(engines[0].asked) == 2


# ---------------------------------------------------------------- errors


def test_errors_are_the_exceptions_of_the_clients(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        def respond(**more: Any) -> Any:
            return client.responses.create(**{"model": "m", "input": "2*3", **more})

        def write(by: Any = None, **more: Any) -> Any:
            by = by or claude(endpoint)
            return by.messages.create(**{"model": "m", "max_tokens": 300, "messages": row["prompt"], **more})

        stranger = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="sk-other", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await stranger.responses.create(model="m", input="2*3")
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await write(claude(endpoint, api_key="sk-other"))
        assert refused.value.type == "authentication_error"
        await write(claude(endpoint, api_key="sk-other", default_headers={"x-api-key": endpoint.api_key}))

        long = "x" * 600
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await respond(input=long, stream=stream)
            assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long: ") as full:
                await write(messages=[user(long)], stream=stream)
            assert (full.value.type, full.value.error_code) == ("invalid_request_error", "context_length_exceeded")
        await respond()
        with pytest.raises(openai.BadRequestError, match="max_turns"):
            await respond()
        with pytest.raises(anthropic.BadRequestError, match=r"environment\.max_turns"):
            await write()

    _, engine, failure = played(settings(folder, "max_turns = 2"), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None and len(engine.asked) == 2


IMAGE = {"type": "input_image", "image_url": "data:"}
BAD_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": ["x"]}, "tools"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input"),
    ({"instructions": [{"role": "user", "content": "x"}]}, "instructions"),
]
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
BAD_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [user("x"), {"role": "assistant", "content": "The answer is "}]}, "messages"),
    ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [PICTURE]}]}]}, "messages"),
    ({"system": [PICTURE]}, "system"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
]


def test_unsupported_parts_are_refused_with_their_names() -> None:
    for more, param in BAD_RESPONSES:
        with pytest.raises(ApiError) as caught:
            read_response({"input": "x", **more}, {})
        assert (caught.value.status, caught.value.param) == (400, param), more
    for more, param in BAD_MESSAGES:
        with pytest.raises(ApiError) as caught:
            read_request({"messages": [user("x")], "max_tokens": 9, **more})
        assert (caught.value.status, caught.value.param) == (400, param), more


def status_and_body(url: str, key: str, body: bytes) -> tuple[int, Any]:
    ask = urllib.request.Request(url, body, {"x-api-key": key})
    try:
        with urllib.request.urlopen(ask, timeout=60) as answer:
            return int(answer.status), json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_bad_bodies_are_refused_in_the_form_of_the_interface(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.agents.endpoint.MOST_BYTES", 1000)

    async def plays(_: Any, row: Any, endpoint: Connection) -> None:
        root = f"{endpoint.anthropic_base_url}/s/{endpoint.api_key}/v1"
        for body, status, kind in ((b"{", 400, "invalid_request_error"), (b"x" * 5000, 413, "request_too_large")):
            for path in ("messages", "messages/count_tokens"):
                found = await asyncio.to_thread(status_and_body, f"{root}/{path}", "", body)
                assert found[0] == status and found[1]["type"] == "error" and found[1]["error"]["type"] == kind
            found = await asyncio.to_thread(status_and_body, f"{root}/responses", "", body)
            assert found[0] == status and found[1]["error"]["type"] == "invalid_request_error"
        body = json.dumps({"messages": row["prompt"], "max_tokens": 9}).encode()
        found = await asyncio.to_thread(status_and_body, f"{endpoint.base_url}/messages", endpoint.api_key, body)
        assert found[0] == 200 and found[1]["content"] == [{"type": "text", "text": "six"}]

    _, _, failure = played(settings(folder), tokenizer, lambda *_: "six", plays=plays)
    assert failure is None


class Ending(Streaming):
    """Its first answers end in the middle, as if they were no longer needed."""

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        whole = len(self.asked) >= 3
        async for delta in super().generate(request):
            yield delta
            if not whole:
                return


def test_a_stream_that_breaks_ends_with_an_error(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_agents.Streaming", Ending)

    async def plays(client: Any, row: Any, endpoint: Connection) -> None:
        asked = {"model": "m", "messages": row["prompt"]}
        with pytest.raises(openai.APIError, match="no longer needed"):
            async for _ in await client.chat.completions.create(**asked, stream=True):
                pass
        events = [event async for event in await client.responses.create(model="m", input="2*3", stream=True)]
        assert (events[-1].type, events[-1].code, events[-2].delta) == ("error", "given_up", "the quic")
        with pytest.raises(anthropic.APIStatusError, match="no longer needed") as caught:
            async for _ in await claude(endpoint).messages.create(**asked, max_tokens=300, stream=True):
                pass
        assert (caught.value.type, caught.value.error_code) == ("api_error", "given_up")
        await client.chat.completions.create(**asked)

    (item,), engine, failure = played(settings(folder), tokenizer, lambda *_: "the quick brown fox", plays=plays)
    assert failure is None and len(engine.asked) == 4
    assert texts_of(item, tokenizer) == ["the quick brown fox"] and item.rows == ()


CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TEXT = {"type": "text", "text": "x"}
FULL_BODIES: list[tuple[Any, dict[str, Any]]] = [
    (
        read_chat,
        {
            "messages": [user("x"), {"role": "assistant", "content": [TEXT], "tool_calls": [CHAT_CALL]}],
            "tools": [Chat.function],
            "tool_choice": "auto",
            "stop": ["x"],
            "max_tokens": 3,
            "stream_options": {"include_usage": True},
        },
    ),
    (read_completion, {"prompt": "x", "stop": "x", "max_tokens": 3, "logprobs": 1}),
    (
        lambda body: read_response(body, {"resp_1": [user("x")]}),
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "instructions": "x",
            "previous_response_id": "resp_1",
            "tools": [Responses.function],
            "tool_choice": "auto",
            "include": ["reasoning.encrypted_content"],
            "max_output_tokens": 3,
        },
    ),
    (
        read_request,
        {
            "messages": [
                user("x"),
                {"role": "assistant", "content": [TEXT, {"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT]}]},
            ],
            "system": [TEXT],
            "tools": [Messages.function],
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["x"],
            "max_tokens": 3,
        },
    ),
]
JUNK = [None, True, 3, -1, 0.5, "", "x", [], {}, [3], [[]], [{}], {"type": 3}, {"type": []}]


def changed(tree: Any) -> Iterator[Any]:
    """This tree with one node replaced, for every node and every junk."""
    yield from JUNK
    for place in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        for other in changed(tree[place]):
            copy = tree.copy()
            copy[place] = other
            yield copy


def test_any_body_is_a_request_or_is_refused() -> None:
    for read, body in FULL_BODIES:
        assert isinstance(read(body), ChatRequest)
        bodies = list(changed(body))
        assert len(bodies) > 60
        for other in bodies:
            try:
                assert isinstance(read(other), ChatRequest)
            except ApiError as error:
                assert error.status == 400
            except Exception as error:
                raise AssertionError(f"{other}") from error


# ---------------------------------------------------------------- processes

PROGRAM = """
import json, os, sys
import anthropic, openai
row = json.loads(sys.stdin.readline())
model = os.environ["ANTHROPIC_MODEL"]
assert model == os.environ["OPENAI_MODEL"]
messages = list(row["prompt"])
said = anthropic.Anthropic().messages.create(model=model, max_tokens=50, messages=messages)
messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "sure?"}]
with anthropic.Anthropic().messages.stream(model=model, max_tokens=50, messages=messages) as stream:
    last = stream.get_final_text()
made = openai.OpenAI().responses.create(model=model, input=row["prompt"])
print(json.dumps({"reward": float(last == row["answer"]), "same": float(made.output_text == last)}))
"""


@pytest.mark.long
def test_a_program_with_the_synchronous_clients_plays_a_sample(folder: Path, tokenizer: Tokenizer) -> None:
    path = folder / "agent_of_clients.py"
    path.write_text(PROGRAM)
    words = json.dumps([sys.executable, str(path)])
    config = config_of(folder, f'name = "agent"\n[environment.agent]\ncommand = {words}\n')
    (item,), _, failure = played(config, tokenizer, lambda *_: "6", row=ROW)
    assert failure is None and (item.reward, item.parts) == (1.0, {"same": 1.0})
    assert texts_of(item, tokenizer) == ["6"] * 3 and len(item.rows) == 1, "the response has a row of its own"
