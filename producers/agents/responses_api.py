"""Responses of OpenAI, as far as an agent needs it. Pure.

Known: `input` of text or items, `instructions`, functions as `tools`, `max_output_tokens`, `previous_response_id` of an
answer of the same session, log-probs by `include`, streams. Guarantees:
1. parameters that would change the answer and are not supported are refused with 400 and their name, and so are items
   and tools that the agent does not run itself;
2. reasoning items are left out of the context: the endpoint sends none, because the text holds the policy's reasoning;
3. the instructions of an earlier response are not carried on by `previous_response_id`, as in the interface.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from producers.agents.interface import Answer, ChatRequest, Conversations, Interface, event, read_limit, read_object
from producers.agents.openai_api import error_body, token_logprobs
from producers.data.openai_items import ApiError, answer_items, message_item, read_request

REFUSED = ("background", "conversation", "prompt", "top_logprobs")
LOGPROBS = "message.output_text.logprobs"


def read_response(body: Any, conversations: Conversations) -> ChatRequest:
    """The request of a `/v1/responses` body. Raises ApiError."""
    tree = read_object(body)
    for name in REFUSED:
        if tree.get(name):
            raise ApiError(400, f"{name} is not supported", param=name)
    previous = tree.get("previous_response_id")
    earlier = conversations.get(previous) if isinstance(previous, str) else () if previous is None else None
    if earlier is None:
        raise ApiError(
            400,
            f"no response of this session has the id {str(previous)[:80]!r}",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    messages, tools = read_request(tree, earlier)
    return ChatRequest(
        tuple(messages),
        tools=() if tree.get("tool_choice") == "none" else tools,
        max_tokens=read_limit(tree.get("max_output_tokens"), param="max_output_tokens"),
        stream=bool(tree.get("stream")),
        logprobs=isinstance(tree.get("include"), list) and LOGPROBS in tree["include"],
        instructions=int(bool(tree.get("instructions"))),
    )


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
    logprobs = token_logprobs(said, texts) if texts else ()
    return answer_items(said.text, said.calls, number=id.partition("_")[2], status=status, logprobs=logprobs)


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
        item = message_item(self._head["id"].partition("_")[2], [], "in_progress")
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
