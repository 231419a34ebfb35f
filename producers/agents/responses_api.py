"""Responses of OpenAI, as far as an agent needs it. Pure.

Known: `input` of text or items, `instructions`, functions as `tools`, `max_output_tokens`, `previous_response_id` of an
answer of the same session, log-probs by `include`, streams. Guarantees:
1. parameters that would change the answer and are not supported are refused with 400 and their name, and so are items
   and tools that the agent does not run itself;
2. reasoning items are left out of the context: the endpoint sends none, because the text holds the policy's reasoning;
3. a function call belongs to the answer before it, so an answer that comes back as several items is one message;
4. the instructions of an earlier response are not carried on by `previous_response_id`, as in the interface.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from producers.agents.interface import (
    Answer,
    ApiError,
    ChatRequest,
    Conversations,
    Interface,
    Message,
    event,
    read_call,
    read_limit,
    read_object,
    read_text,
    read_tools,
)
from producers.agents.openai_api import error_body, token_logprobs

REFUSED = ("background", "conversation", "prompt", "top_logprobs")
TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"


def read_response(body: Any, conversations: Conversations) -> ChatRequest:
    """The request of a `/v1/responses` body. Raises ApiError."""
    tree = read_object(body)
    for name in REFUSED:
        if tree.get(name):
            raise ApiError(400, f"{name} is not supported", param=name)
    previous, given, instructions = tree.get("previous_response_id"), tree.get("input"), tree.get("instructions")
    earlier = conversations.get(previous) if isinstance(previous, str) else () if previous is None else None
    if earlier is None:
        raise ApiError(
            400,
            f"no response of this session has the id {str(previous)[:80]!r}",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    if not isinstance(given, str | list) or not (given or earlier):
        raise ApiError(400, "input must be text, or a list of items", param="input")
    own = [{"role": "system", "content": read_text(instructions, param="instructions")}] if instructions else []
    tools = read_tools(tree.get("tools"), kinds=("function",), schema="parameters")
    return ChatRequest(
        (*own, *earlier, *read_items([{"role": "user", "content": given}] if isinstance(given, str) else given)),
        tools=() if tree.get("tool_choice") == "none" else tools,
        max_tokens=read_limit(tree.get("max_output_tokens"), param="max_output_tokens"),
        stream=bool(tree.get("stream")),
        logprobs=isinstance(tree.get("include"), list) and LOGPROBS in tree["include"],
        instructions=len(own),
    )


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


def response(
    said: Answer | None, ask: ChatRequest, *, id: str, model: str, texts: Sequence[str] = (), created: int = 0
) -> dict[str, Any]:
    """The body of a response; without an answer, of one in progress."""
    short = said is not None and said.finish == "length" and not said.calls
    return {
        "id": id,
        "object": "response",
        "created_at": created or int(time.time()),
        "status": "in_progress" if said is None else "incomplete" if short else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if short else None,
        "instructions": ask.messages[0]["content"] if ask.messages and ask.instructions else None,
        "max_output_tokens": ask.max_tokens or None,
        "model": model,
        "output": [] if said is None else _items(said, id, texts, status="incomplete" if short else "completed"),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in ask.tools],
        "usage": None if said is None else _usage(said),
    }


def _items(said: Answer, id: str, texts: Sequence[str], *, status: str) -> list[dict[str, Any]]:
    """The text as a message, then the calls."""
    number = id.partition("_")[2]
    found: list[dict[str, Any]] = []
    if said.text or not said.calls:
        logprobs = token_logprobs(said, texts) if texts else []
        part = {"type": "output_text", "text": said.text, "annotations": [], "logprobs": logprobs}
        found.append(_message(number, [part], status))
    for place, (name, call) in enumerate(said.calls):
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


def _message(number: str, content: list[Any], status: str) -> dict[str, Any]:
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": content}


def _usage(said: Answer) -> dict[str, Any]:
    made = len(said.token_ids)
    return {
        "input_tokens": said.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_tokens + made,
    }


class ResponseEvents:
    """The stream of a response."""

    def __init__(self, ask: ChatRequest, *, id: str, model: str) -> None:
        self._ask = ask
        self._head: dict[str, Any] = {"id": id, "model": model, "created": int(time.time())}
        self._sent = 0
        self._opened = False  # the message

    def begin(self) -> bytes:
        body = response(None, self._ask, **self._head)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def text(self, text: str) -> bytes:
        opening = b"" if self._opened else self._open()
        return opening + self._text_event("response.output_text.delta", delta=text, logprobs=[])

    def end(self, said: Answer) -> bytes:
        body = response(said, self._ask, **self._head)
        events = b""
        for place, item in enumerate(body["output"]):
            events += self._end_message(item) if item["type"] == "message" else self._call(place, item)
            events += self._event("response.output_item.done", output_index=place, item=item)
        return events + self._event(f"response.{body['status']}", response=body)

    def error(self, error: ApiError) -> bytes:
        return self._event("error", message=error.message, code=error.code or None, param=error.param or None)

    def _open(self) -> bytes:
        self._opened = True
        item = _message(self._head["id"].partition("_")[2], [], "in_progress")
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._event("response.output_item.added", output_index=0, item=item) + self._text_event(
            "response.content_part.added", part=part
        )

    def _end_message(self, item: dict[str, Any]) -> bytes:
        (part,) = item["content"]
        events = b"" if self._opened else self._open()
        events += self._text_event("response.output_text.done", text=part["text"], logprobs=[])
        return events + self._text_event("response.content_part.done", part=part)

    def _call(self, place: int, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": place}
        begun = {**item, "status": "in_progress", "arguments": ""}
        arguments = item["arguments"]
        return (
            self._event("response.output_item.added", output_index=place, item=begun)
            + self._event("response.function_call_arguments.delta", delta=arguments, **at)
            + self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **at)
        )

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        name = f"msg_{self._head['id'].partition('_')[2]}"
        return self._event(kind, item_id=name, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, named=True)


def response_error(error: ApiError) -> dict[str, Any]:
    """The body of an error; messages are items of the input here."""
    body = error_body(error)
    return {"error": {**body["error"], "param": "input"}} if error.param == "messages" else body


RESPONSES = Interface("resp_", read_response, response, ResponseEvents, response_error)
