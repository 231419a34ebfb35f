"""Items and functions of OpenAI's interfaces as messages and tools of chat templates, and answers as items. Pure.

Agents send requests in these forms (`producers.agents`), and rows may hold one (`prompt_forms`). Guarantees:
1. parts that are not supported raise `ApiError` with the name of their parameter;
2. a function call belongs to the answer before it, so an answer that comes back as several items is one message.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.environment import ToolCall
from asyncrl.errors import UNREADABLE

Message = dict[str, Any]
TEXTS = ("input_text", "output_text", "text")


class ApiError(Exception):
    """An error response for the agent; `code` and `param` have the words of the OpenAI interface."""

    def __init__(self, status: int, message: str, *, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param


def read_text(content: Any, *, param: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of a content: text, or parts of these types."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") in kinds else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "the content of a message must be text, or parts of text", param=param)
    return "".join(str(text) for text in texts)


def read_tools(tools: Any, *, kinds: Collection[str | None], schema: str) -> tuple[Message, ...]:
    """Functions of the agent as chat templates know them. `schema`: the key of the parameters' schema."""
    found: list[Message] = []
    for tool in tools if isinstance(tools, list) else [] if tools is None else [tools]:
        if not isinstance(tool, dict) or tool.get("type") not in kinds or not isinstance(tool.get("name"), str):
            raise ApiError(400, f"not a function that the agent runs itself: {str(tool)[:80]}", param="tools")
        function = {"name": tool["name"]}
        if tool.get("description"):
            function["description"] = tool["description"]
        found.append({"type": "function", "function": {**function, "parameters": tool.get(schema) or {}}})
    return tuple(found)


def read_call(id: Any, name: Any, arguments: Any, *, param: str) -> Message:
    """A tool call of an answer; arguments that are JSON text become an object."""
    if not isinstance(name, str):
        raise ApiError(400, f"a tool call without a name: {str(name)[:80]}", param=param)
    if isinstance(arguments, str):
        with contextlib.suppress(*UNREADABLE):  # kept as text
            arguments = msgspec.json.decode(arguments)
    return {"id": str(id or ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def read_items(items: Sequence[Any]) -> list[Message]:
    """Items as messages in normal form. Raises ApiError."""
    found: list[Message] = []
    for item in items:
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "message" and isinstance(item.get("role"), str):
            role = "system" if item["role"] == "developer" else item["role"]
            found.append({"role": role, "content": read_text(item.get("content"), param="input", kinds=TEXTS)})
        elif kind == "function_call":
            call = read_call(item.get("call_id"), item.get("name"), item.get("arguments"), param="input")
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = read_text(item.get("output"), param="input", kinds=TEXTS)
            found.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")})
        elif kind != "reasoning":
            raise ApiError(400, f"an item that is not supported: {str(item)[:80]}", param="input")
    return found


def read_request(tree: Mapping[str, Any], earlier: Sequence[Message] = ()) -> tuple[list[Message], tuple[Message, ...]]:
    """The messages and the functions of a request in the form of Responses: its instructions, the `earlier` messages,
    its input. Raises ApiError."""
    given, instructions = tree.get("input"), tree.get("instructions")
    if not isinstance(given, str | list) or not (given or earlier):
        raise ApiError(400, "input must be text, or a list of items", param="input")
    own = [{"role": "system", "content": read_text(instructions, param="instructions")}] if instructions else []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    tools = read_tools(tree.get("tools"), kinds=("function",), schema="parameters")
    return [*own, *earlier, *read_items(items)], tools


def answer_items(
    text: str,
    calls: Sequence[tuple[str, ToolCall]],
    *,
    number: str,
    status: str = "completed",
    logprobs: Sequence[Any] = (),
) -> list[Message]:
    """An answer as items: the text as a message, then the calls, each with its id. `number` names them."""
    found: list[Message] = []
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
        found.append(message_item(number, [part], status))
    for place, (name, call) in enumerate(calls):
        found.append(
            {
                "id": f"fc_{number}_{place}",
                "type": "function_call",
                "status": "completed",
                "call_id": name,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
            }
        )
    return found


def message_item(number: str, content: list[Any], status: str) -> Message:
    """A message of the assistant as an item."""
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": content}
