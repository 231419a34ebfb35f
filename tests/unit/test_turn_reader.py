"""What agents see of a turn that is read by parsers of an engine's package: its reasoning, its text, its calls.

The packages themselves are in environments of their own (tests/engines/test_turn_parsers.py); a parser of `</think>`
and of calls `[name {...}]` stands in for theirs here.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from env_lab import tokenizer_in
from test_agents import played, settings, texts_of, user
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from asyncrl.config.sections.environment import EnvironmentConfig
from asyncrl.environment import ToolCall
from asyncrl.errors import ConfigError, ConfigErrors
from producers.data.tokenizer import Tokenizer
from producers.tools import turn_reader
from producers.tools.engine_parsers import Split
from producers.tools.turn_reader import TurnReader

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
PARSERS = 'parser = "vllm:brackets"\nreasoning_parser = "vllm:think"\n'


def split(text: str, _ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Split:
    if "crash" in text:
        raise LookupError("the parser has a bug")
    reasoning, mark, rest = text.partition("</think>")
    if not mark:
        reasoning, rest = "", text
    rest, _, call = rest.partition("[") if tools else (rest, "", "")
    name, _, arguments = call.rstrip("]").partition(" ")
    return Split(reasoning, rest.lstrip(), [(name, arguments)] if call else [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer in which `</think>` is one token, and `so` is one that no text is encoded to."""
    folder = tmp_path_factory.mktemp("thinking")
    tokenizer_in(folder)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_tokens([AddedToken("</think>", normalized=False)])
    fast.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(turn_reader, "make_splitter", lambda *_, **__: split)
    return Tokenizer(folder, trust_remote_code=False)


def reader(tokenizer: Tokenizer) -> TurnReader:
    return TurnReader(EnvironmentConfig(parser="vllm:brackets", reasoning_parser="vllm:think"), tokenizer)


def read(tokenizer: Tokenizer, text: str, **more: str) -> Any:
    ids = [*tokenizer.encode_part(text), *tokenizer.eos_ids]
    return reader(tokenizer).read(tokenizer.decode(ids), ids, [TOOL], **more)


def test_the_parts_of_a_turn(tokenizer: Tokenizer) -> None:
    found = read(tokenizer, 'two</think>\nSure. [add {"a": 1}]')
    assert found == ("Sure.", (ToolCall("add", {"a": 1}),), (), "two")
    assert read(tokenizer, "Sure. [add 1]").malformed == ("the arguments of add are no JSON object: 1",)
    assert read(tokenizer, "two</think>one STOP", stop="STOP").text == "one "


def test_an_error_of_the_package_is_a_malformed_call(tokenizer: Tokenizer) -> None:
    found = read(tokenizer, "crash")
    assert found.text == "crash" and found.malformed == ("it cannot be parsed: LookupError: the parser has a bug",)


@pytest.mark.parametrize("text", ["a b</think>\n\nSure.", "a</think>Sure.", "a</think>  </think> Sure."])
def test_cut_reasoning_leaves_tokens_of_the_turn(tokenizer: Tokenizer, text: str) -> None:
    ids = [*tokenizer.encode_part(text), *tokenizer.eos_ids]
    kept = reader(tokenizer).cut_reasoning(ids, text.partition("</think>")[0])
    assert kept == tuple(ids[-len(kept) :]) and tokenizer.decode(kept) == text.partition("</think>")[2].lstrip()


def test_a_turn_that_is_reasoning_alone_is_kept(tokenizer: Tokenizer) -> None:
    for text in ("still thinking", "thought</think>", "thought</think>\n"):
        ids = [*tokenizer.encode_part(text), *tokenizer.eos_ids]
        assert reader(tokenizer).cut_reasoning(ids, text.partition("</think>")[0]) == tuple(ids)


@pytest.mark.parametrize("rule", ["keep", "cut"])
def test_reasoning_in_the_context_of_later_turns(folder: Path, tokenizer: Tokenizer, rule: str) -> None:
    """Kept: one row. Cut: the second turn's row has the tokens behind the reasoning, as they were sampled."""

    async def plays(client: Any, row: Any, _: Any) -> None:
        first = (await client.chat.completions.create(model="m", messages=row["prompt"])).choices[0].message
        assert first.content == "one!" and first.reasoning_content == "hm"
        messages = [*row["prompt"], {"role": "assistant", "content": first.content}, user("sure?")]
        await client.chat.completions.create(model="m", messages=messages)

    config = settings(folder, PARSERS, f'reasoning = "{rule}"')
    odd = [*tokenizer.encode_part("hm</think>\n"), 0, *tokenizer.encode_part("one!"), *tokenizer.eos_ids]
    said = lambda _, turn, __: odd if turn == 0 else "fine"  # noqa: E731
    (item,), engine, failure = played(config, tokenizer, said, plays=plays)
    assert failure is None and len(item.rows) == (rule == "cut")
    assert texts_of(item, tokenizer) == ["hm</think>\none!", "fine"]
    context = engine.asked[1].prompt_ids.tolist()
    kept = odd if rule == "keep" else odd[-len("0one!") - 1 :]
    assert any(context[n : n + len(kept)] == kept for n in range(len(context)))
    assert ("hm" in tokenizer.decode(context)) == (rule == "keep")


def test_calls_and_reasoning_of_a_stream(folder: Path, tokenizer: Tokenizer) -> None:
    async def plays(client: Any, row: Any, _: Any) -> None:
        found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
        stream = await client.chat.completions.create(model="m", messages=row["prompt"], tools=[TOOL], stream=True)
        async for chunk in stream:
            for name, before in found.items():
                found[name] = before + (getattr(chunk.choices[0].delta, name, None) or type(before)())
        assert (found["content"], found["reasoning_content"]) == ("Sure.", "hm")
        assert json.loads(found["tool_calls"][0].function.arguments) == {"a": 1}

    (item,), _, failure = played(
        settings(folder, PARSERS), tokenizer, lambda *_: 'hm</think>Sure. [add {"a": 1}]', plays=plays
    )
    assert failure is None and texts_of(item, tokenizer) == ['hm</think>Sure. [add {"a": 1}]']


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_an_interpreter_without_the_package(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no vllm for its parsers") as raised:
        reader(Tokenizer(folder, trust_remote_code=False))
    assert "producers.python" in str(raised.value.remedy)


@pytest.mark.parametrize(
    ("text", "agent", "error"),
    [
        ('parser = "vllm:a"\nreasoning_parser = "sglang:b"', "", "is not 'vllm:NAME'"),
        ('reasoning_parser = "think"', "", "is not 'vllm:NAME' or 'sglang:NAME'"),
        ("", 'reasoning = "cut"', "needs environment.reasoning_parser"),
    ],
)
def test_parsers_that_do_not_fit_each_other(folder: Path, text: str, agent: str, error: str) -> None:
    with pytest.raises(ConfigErrors, match=error):
        settings(folder, text, agent)
