"""The OpenAI interface as far as an agent needs it: request bodies to `ChatRequest`, `Answer` to response bodies. Pure.

Known: chat completions with tools, streams, `stop`, `max_tokens` (or `max_completion_tokens`), `logprobs` of the
sampled tokens; completions of text or token ids; the models. Guarantees:
1. unsupported parameters are refused with 400 and their name: several choices, other tokens' log-probs, images, a given
   beginning of the answer (`echo`, `suffix`);
2. `temperature`, `top_p` and the like are ignored: samples are drawn as the run is configured, because the learner
   trains on these probabilities. `seed` is ignored too;
3. arguments of tool calls are JSON text in answers, as in the interface, and objects for the chat template.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.environment import ToolCall
from asyncrl.errors import UNREADABLE

MOST_STOPS = 4
Message = dict[str, Any]


class ApiError(Exception):
    """An error response for the agent; `code` is the interface's own."""

    def __init__(self, status: int, message: str, *, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param or None, "code": code or None}}


class ChatRequest(msgspec.Struct, frozen=True):
    """One request for an answer: `messages` of a chat, or a `prompt` of text or token ids."""

    messages: tuple[Message, ...] | None
    prompt: str | tuple[int, ...] = ""
    tools: tuple[Message, ...] = ()
    max_tokens: int = 0  # 0: as long as there is room
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False  # an extension that vLLM has too: ids with the text


class Answer(msgspec.Struct, frozen=True):
    """An answer: its text without the stop, its tokens and their log-probs."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str  # stop | length
    prompt_tokens: int
    calls: tuple[tuple[str, ToolCall], ...] = ()  # with the id of the call
    version: int = 0
    prompt_ids: tuple[int, ...] = ()


# ---------------------------------------------------------------- requests


def read_chat(body: Any) -> ChatRequest:
    """The request of a `/v1/chat/completions` body. Raises ApiError."""
    tree = _object(body)
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list of messages", param="messages")
    tools = tree.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ApiError(400, "tools must be a list of tools", param="tools")
    if tree.get("tool_choice") == "none":
        tools = []
    if tree.get("top_logprobs"):
        raise ApiError(400, "only log-probs of the sampled tokens are supported", param="top_logprobs")
    return ChatRequest(
        tuple(read_message(item) for item in messages),
        tools=tuple(tools),
        logprobs=bool(tree.get("logprobs")),
        **_common(tree),
    )


def read_completion(body: Any) -> ChatRequest:
    """The request of a `/v1/completions` body. Raises ApiError."""
    tree = _object(body)
    prompt = tree.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        raise ApiError(400, "prompt must be one text, or one list of token ids", param="prompt")
    for name in ("echo", "suffix", "best_of"):
        if tree.get(name) not in (None, False, 1, ""):
            raise ApiError(400, f"{name} is not supported", param=name)
    logprobs = tree.get("logprobs")
    if isinstance(logprobs, int) and logprobs > 1:
        raise ApiError(400, "only log-probs of the sampled tokens are supported", param="logprobs")
    return ChatRequest(None, prompt=prompt, logprobs=logprobs is not None and logprobs is not False, **_common(tree))


def _object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object")
    if body.get("n") not in (None, 1):
        raise ApiError(400, "n must be 1: the run decides the number of samples", param="n")
    return body


def _common(tree: dict[str, Any]) -> dict[str, Any]:
    limit = next((tree[name] for name in ("max_completion_tokens", "max_tokens") if tree.get(name) is not None), 0)
    if type(limit) is not int or limit < 0:
        raise ApiError(400, f"max_tokens is {limit!r}", param="max_tokens")
    stop = tree.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"stop must be a text, or a list of at most {MOST_STOPS}", param="stop")
    options = tree.get("stream_options")
    return {
        "max_tokens": limit,
        "stop": tuple(stops),
        "stream": bool(tree.get("stream")),
        "usage_in_stream": isinstance(options, dict) and bool(options.get("include_usage")),
        "token_ids": bool(tree.get("return_token_ids")),
    }


def read_message(item: Any) -> Message:
    """A message in normal form: text content, objects as arguments. Raises ApiError."""
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise ApiError(400, f"a message without a role: {str(item)[:80]}", param="messages")
    role = "system" if item["role"] == "developer" else item["role"]
    found: Message = {"role": role, "content": _content(item.get("content"))}
    calls = item.get("tool_calls") or []
    if calls:
        found["tool_calls"] = [_call(call) for call in calls]
    for name in ("name", "tool_call_id"):
        if isinstance(item.get(name), str):
            found[name] = item[name]
    return found


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "the content of a message must be text, or parts of text", param="messages")
    return "".join(str(text) for text in texts)


def _call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"not a tool call: {str(call)[:80]}", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(*UNREADABLE):  # kept as text
            arguments = msgspec.json.decode(arguments)
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


# ---------------------------------------------------------------- answers


def chat_answer(said: Answer, ask: ChatRequest, *, id: str, model: str, texts: Sequence[str]) -> dict[str, Any]:
    """The body of an answer to `/v1/chat/completions`. `texts` are the texts of the tokens, for log-probs."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": _message(said),
        "finish_reason": "tool_calls" if said.calls else said.finish,
        "logprobs": _chat_logprobs(said, texts) if ask.logprobs else None,
    }
    if ask.token_ids:
        choice["token_ids"] = list(said.token_ids)
    return _whole("chat.completion", choice, said, ask, id=id, model=model)


def text_answer(said: Answer, ask: ChatRequest, *, id: str, model: str, texts: Sequence[str]) -> dict[str, Any]:
    """The body of an answer to `/v1/completions`."""
    logprobs = {"tokens": list(texts), "token_logprobs": list(said.logprobs), "top_logprobs": None, "text_offset": None}
    choice: dict[str, Any] = {
        "index": 0,
        "text": said.text,
        "finish_reason": said.finish,
        "logprobs": logprobs if ask.logprobs else None,
    }
    if ask.token_ids:
        choice["token_ids"] = list(said.token_ids)
    return _whole("text_completion", choice, said, ask, id=id, model=model)


def _whole(kind: str, choice: dict[str, Any], said: Answer, ask: ChatRequest, *, id: str, model: str) -> dict[str, Any]:
    body = {
        "id": id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage(said),
        "system_fingerprint": f"version-{said.version}",
    }
    return {**body, "prompt_token_ids": list(said.prompt_ids)} if ask.token_ids else body


def usage(said: Answer) -> dict[str, int]:
    """Token counts of the prompt and the answer."""
    made = len(said.token_ids)
    return {"prompt_tokens": said.prompt_tokens, "completion_tokens": made, "total_tokens": said.prompt_tokens + made}


def _message(said: Answer) -> dict[str, Any]:
    if not said.calls:
        return {"role": "assistant", "content": said.text}
    return {"role": "assistant", "content": said.text or None, "tool_calls": _tool_calls(said)}


def _tool_calls(said: Answer) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for name, call in said.calls
    ]


def _chat_logprobs(said: Answer, texts: Sequence[str]) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, said.logprobs, strict=True)
        ],
        "refusal": None,
    }


def chunk(
    ask: ChatRequest, *, id: str, model: str, text: str = "", last: Answer | None = None, first: bool = False
) -> bytes:
    """One event of a stream: new text, and with `last` the end."""
    finish = None if last is None else "tool_calls" if last.calls else last.finish
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    if ask.messages is None:
        choice["text"] = text
    else:
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if text:
            delta["content"] = text
        if last is not None and last.calls:
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(_tool_calls(last))]
        choice["delta"] = delta
    kind = "text_completion" if ask.messages is None else "chat.completion.chunk"
    return event({"id": id, "object": kind, "created": int(time.time()), "model": model, "choices": [choice]})


def usage_chunk(said: Answer, ask: ChatRequest, *, id: str, model: str) -> bytes:
    """The event with the usage."""
    kind = "text_completion" if ask.messages is None else "chat.completion.chunk"
    return event(
        {"id": id, "object": kind, "created": int(time.time()), "model": model, "choices": [], "usage": usage(said)}
    )


def event(body: Mapping[str, Any]) -> bytes:
    """A body as a server-sent event."""
    return b"data: " + msgspec.json.encode(dict(body)) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def models(name: str) -> dict[str, Any]:
    """The body of `/v1/models`."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "asyncrl"}]}
