"""Parsers of tool calls in the text of a turn.

Found by name (`environment.parser`, entry-point group `asyncrl.tool_parsers`). A parser is a function from text to
`Parsed`. Guarantees: it raises nothing, whatever the text; a malformed call has a message for the policy in
`malformed`; calls keep their order.

>>> hermes('Let me see. <tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>').calls
(ToolCall(name='calculator', arguments={'expression': '1+1'}),)
>>> hermes("<tool_call>{oops}</tool_call>").malformed
('the call is no JSON object with "name" and "arguments": {oops}',)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from asyncrl.environment import ToolCall
from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.plugins import find, load_object

SHOWN = 80  # characters of a bad call in its message
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
FENCE = "```"


class Parsed(NamedTuple):
    """The calls of a turn, and a message for each malformed one."""

    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


Parser = Callable[[str], Parsed]


def hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes, Qwen2.5 and Qwen3 write it."""
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for body, end in _BLOCK.findall(text):
        call = None if not end else _call(body)
        if call is not None:
            calls.append(call)
        elif not end:
            malformed.append(f"<tool_call> is not closed: {_short(body)}")
        else:
            malformed.append(f'the call is no JSON object with "name" and "arguments": {_short(body)}')
    return Parsed(tuple(calls), tuple(malformed))


def plain_json(text: str) -> Parsed:
    """The whole turn is a call as JSON, or a list of them, optionally in ``` marks; other text has no call."""
    body = text.strip()
    if body.startswith(FENCE) and body.endswith(FENCE) and len(body) >= 2 * len(FENCE):
        body = body[len(FENCE) : -len(FENCE)].removeprefix("json").strip()
    if not body.startswith(("{", "[")):
        return Parsed()
    try:
        found = msgspec.json.decode(body)
    except UNREADABLE:
        return Parsed((), (f"it is no JSON: {_short(body)}",))
    entries = found if isinstance(found, list) else [found]
    if not any(isinstance(entry, dict) and "name" in entry for entry in entries):
        return Parsed()
    read = [(entry, _read_call(entry)) for entry in entries]
    bad = tuple(f'no object with "name" and "arguments": {_short(str(entry))}' for entry, call in read if call is None)
    return Parsed(tuple(call for _, call in read if call is not None), bad)


def find_parser(name: str) -> Parser:
    """The parser of that name. Raises `config.environment` or `config.type`."""
    found: Any
    if ":" in name:
        found = load_object(name, code="config.environment", where="environment.parser")
    else:
        found = find("asyncrl.tool_parsers", name)
    if not callable(found):
        raise ConfigError("config.environment", f"{name!r} is no function", where="environment.parser")
    parser: Parser = found
    return parser


def _call(body: str) -> ToolCall | None:
    try:
        return _read_call(msgspec.json.decode(body))
    except UNREADABLE:
        return None


def _read_call(tree: Any) -> ToolCall | None:
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        return None
    arguments = tree.get("arguments", tree.get("parameters", {}))
    if isinstance(arguments, str):  # as OpenAI writes it
        try:
            arguments = msgspec.json.decode(arguments)
        except UNREADABLE:
            return None
    return ToolCall(tree["name"], arguments) if isinstance(arguments, dict) else None


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
