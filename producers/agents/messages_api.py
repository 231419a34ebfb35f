"""Messages of Anthropic, as far as an agent needs it. Pure.

Known: `system`, messages of text, `tool_use` and `tool_result` blocks, tools of the agent, `stop_sequences`,
`max_tokens`, streams; the number of tokens of a request. Guarantees:
1. unsupported blocks and tools are refused with 400, and so is a given beginning of the answer (a last message of the
   assistant); an error begins with the parameter's name, and `details.error_code` has its code;
2. thinking blocks are left out of the context: the endpoint sends none, because the text holds the policy's reasoning;
3. the result of a tool is a message of its own. If `is_error` is set, its text begins with "Error: ".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from producers.agents.interface import Answer, ChatRequest, Interface, event, read_limit, read_object, read_stops
from producers.data.openai_items import ApiError, Message, read_call, read_text, read_tools

MOST_STOPS = 64
THINKING = ("thinking", "redacted_thinking")
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


def read_request(body: Any, *, limited: bool = True) -> ChatRequest:
    """The request of a `/v1/messages` body; `limited`: with `max_tokens`. Raises ApiError."""
    tree = read_object(body)
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "must be a list of messages", param="messages")
    limit = read_limit(tree.get("max_tokens"), param="max_tokens")
    if limited and not limit:
        raise ApiError(400, "must be 1 or more", param="max_tokens")
    system = read_text(tree.get("system"), param="system")
    found: list[Message] = [{"role": "system", "content": system}] if system else []
    for item in messages:
        found += _read_message(item)
    if not found or found[-1]["role"] == "assistant":
        raise ApiError(400, "the policy does not continue a given beginning of its answer", param="messages")
    choice = tree.get("tool_choice")
    tools = read_tools(tree.get("tools"), kinds=(None, "custom"), schema="input_schema")
    return ChatRequest(
        tuple(found),
        tools=() if isinstance(choice, dict) and choice.get("type") == "none" else tools,
        max_tokens=limit,
        stop=read_stops(tree.get("stop_sequences"), param="stop_sequences", most=MOST_STOPS),
        stream=bool(tree.get("stream")),
    )


def _read_message(item: Any) -> list[Message]:
    """Messages in normal form: the results of tools and the text between them, or an answer."""
    if not isinstance(item, dict) or item.get("role") not in ("user", "assistant", "system"):
        raise ApiError(400, f"a message without a role: {str(item)[:80]}", param="messages")
    role, content = item["role"], item.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    found: list[Message] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            call = read_call(block.get("id"), block.get("name"), block.get("input"), param="messages")
            found = found or [{"role": role, "content": ""}]
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "tool_result" and role == "user":
            text = "Error: " * bool(block.get("is_error")) + read_text(block.get("content"), param="messages")
            found.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id") or "")})
        elif kind not in THINKING or role != "assistant":
            text = read_text([block], param="messages")
            if not found or found[-1]["role"] != role:
                found.append({"role": role, "content": ""})
            found[-1]["content"] += text
    return found or [{"role": role, "content": ""}]


def message(
    said: Answer | None, _ask: ChatRequest, *, id: str, model: str, texts: Sequence[str] = ()
) -> dict[str, Any]:
    """The body of an answer; without one, of its beginning."""
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [] if said is None else _blocks(said),
        **({"stop_reason": None, "stop_sequence": None} if said is None else _stop(said)),
        "usage": _usage(said),
    }


def _blocks(said: Answer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": said.text}] if said.text or not said.calls else []
    return text + [
        {"type": "tool_use", "id": name, "name": call.name, "input": call.arguments} for name, call in said.calls
    ]


def _stop(said: Answer) -> dict[str, Any]:
    reason = "max_tokens" if said.finish == "length" else "stop_sequence" if said.stop else "end_turn"
    return {"stop_reason": "tool_use" if said.calls else reason, "stop_sequence": said.stop or None}


def _usage(said: Answer | None) -> dict[str, int]:
    return {
        "input_tokens": 0 if said is None else said.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 0 if said is None else len(said.token_ids),
    }


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of an error."""
    text = f"{error.param}: {error.message}" if error.param else error.message
    if error.code == "context_length_exceeded":
        text = f"prompt is too long: {error.message}"  # the words that agents look for
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    details = {"details": {"error_code": error.code}} if error.code else {}
    return {"type": "error", "error": {"type": kind, "message": text, **details}}


class MessageEvents:
    """The stream of an answer. Its first event cannot know the number of input tokens; the last but one has it."""

    def __init__(self, ask: ChatRequest, *, id: str, model: str) -> None:
        self._ask, self._id, self._model = ask, id, model
        self._opened = False  # the block of text

    def begin(self) -> bytes:
        body = message(None, self._ask, id=self._id, model=self._model)
        return event({"type": "message_start", "message": body}, named=True)

    def text(self, text: str) -> bytes:
        opening = b"" if self._opened else _begin_block(0, {"type": "text", "text": ""})
        self._opened = True
        return opening + _add(0, {"type": "text_delta", "text": text})

    def end(self, said: Answer) -> bytes:
        events = b""
        for place, block in enumerate(_blocks(said)):
            if block["type"] == "tool_use":
                events += _begin_block(place, {**block, "input": {}})
                events += _add(place, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])})
            elif not self._opened:
                events += _begin_block(place, block)
            events += event({"type": "content_block_stop", "index": place}, named=True)
        events += event({"type": "message_delta", "delta": _stop(said), "usage": _usage(said)}, named=True)
        return events + event({"type": "message_stop"}, named=True)

    def error(self, error: ApiError) -> bytes:
        return event(error_body(error), named=True)


def _begin_block(place: int, block: dict[str, Any]) -> bytes:
    return event({"type": "content_block_start", "index": place, "content_block": block}, named=True)


def _add(place: int, delta: dict[str, Any]) -> bytes:
    return event({"type": "content_block_delta", "index": place, "delta": delta}, named=True)


def list_models(name: str) -> dict[str, Any]:
    """The body of `/v1/models` in Anthropic's form."""
    model = {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"data": [model], "has_more": False, "first_id": name, "last_id": name}


MESSAGES = Interface("msg_", lambda body, _: read_request(body), message, MessageEvents, error_body)
