"""Tool calls and reasoning in the text of a turn, by the parsers of vLLM or SGLang, under the names they have there.

They run in the producer: its interpreter (`producers.python`) needs the package, which asks for no GPU to parse. No
format is known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError
from producers.data.tokenizer import Tokenizer

Schemas = Sequence[Mapping[str, Any]]  # of tools, in OpenAI's form


class Split(NamedTuple):
    """The parts of a turn; `calls` are names and arguments as JSON."""

    reasoning: str
    text: str
    calls: list[tuple[str, str]]


#: Text with special tokens, ids and tools of a turn -> its parts.
Splitter = Callable[[str, Sequence[int], Schemas], Split]


def make_splitter(package: str, *, calls: str, reasoning: str, tokenizer: Tokenizer) -> Splitter:
    """The parsers of a package (`vllm`, `sglang`); an empty name leaves its part in the text.

    Raises:
        ConfigError: the package is missing, has no parser of that name, or the parser cannot read these tokens.
    """
    make = {"vllm": _vllm, "sglang": _sglang}[package]
    try:
        return make(calls, reasoning, tokenizer)
    except ImportError as error:
        raise ConfigError(
            "config.extra",
            f"the interpreter of the producers has no {package} for its parsers: {error}",
            where="environment.parser" if calls else "environment.reasoning_parser",
            remedy="name the python of an environment with it in producers.python",
        ) from None


def _vllm(calls: str, reasoning: str, tokenizer: Tokenizer) -> Splitter:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer
    from vllm.tool_parsers import ToolParserManager

    _require(calls, ToolParserManager.list_registered(), where="environment.parser")
    _require(reasoning, ReasoningParserManager.list_registered(), where="environment.reasoning_parser")
    _silence("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")
    auto = get_cached_tokenizer(tokenizer.transformers())
    try:
        parser = ParserManager.get_parser(
            calls or None,
            reasoning or None,
            enable_auto_tools=bool(calls),
            is_harmony=calls == "openai" or reasoning == "openai_gptoss",
            tokenizer=auto,
        )
    except TypeError as error:
        raise ConfigError("config.environment", str(error), where="environment.parser") from None

    def split(text: str, ids: Sequence[int], tools: Schemas) -> Split:
        tree = {"model": "policy", "messages": [], "tools": list(tools) or None}
        request = ChatCompletionRequest.model_validate(tree)
        found = parser(auto, request.tools).parse(
            text, request, enable_auto_tools=bool(tools), model_output_token_ids=list(ids)
        )
        return Split(found[0] or "", found[1] or "", [(call.name, call.arguments) for call in found[2] or ()])

    return split


def _sglang(calls: str, reasoning: str, tokenizer: Tokenizer) -> Splitter:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    _require(calls, FunctionCallParser.ToolCallParserEnum, where="environment.parser")
    _require(reasoning, ReasoningParser.DetectorMap, where="environment.reasoning_parser")
    _silence("sglang.srt.function_call", "sglang.srt.parser")
    auto = tokenizer.transformers()

    def split(text: str, _ids: Sequence[int], tools: Schemas) -> Split:
        thought = ""
        if reasoning:
            thought, text = ReasoningParser(reasoning, stream_reasoning=False).parse_non_stream(text)
        found: list[Any] = []
        if calls and tools:
            known = [Tool.model_validate(dict(tool)) for tool in tools]
            text, found = FunctionCallParser(known, calls, tokenizer=auto).parse_non_stream(text or "")
        return Split(thought or "", text or "", [(call.name, call.parameters) for call in found])

    return split


def _silence(*loggers: str) -> None:
    """They log a traceback for each malformed call, and a policy that learns writes many."""
    for name in loggers:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _require(name: str, known: Any, *, where: str) -> None:
    if name and name not in known:
        raise ConfigError(
            "config.environment",
            f"the package has no parser {name!r}",
            where=where,
            remedy=f"use one of {', '.join(sorted(known))}",
        )


def read_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are no JSON object."""
    try:
        found = msgspec.json.decode(text or "{}")
    except UNREADABLE:
        return None
    return found if isinstance(found, dict) else None
