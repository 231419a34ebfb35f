"""Chat Completions and Completions of OpenAI, as far as an agent needs them. Pure.

Known: chat completions with tools, streams, `stop`, `max_tokens` (or `max_completion_tokens`), `logprobs` of the
sampled tokens; completions of text or token ids; the models. Guarantees:
1. unsupported parameters are refused with 400 and their name: several choices, other tokens' log-probs, images, a given
   beginning of the answer (`echo`, `suffix`);
2. `temperature`, `top_p` and the like are ignored: samples are drawn as the run is configured, because the learner
   trains on these probabilities. `seed` is ignored too;
3. arguments of tool calls are JSON text in answers, as in the interface, and objects for the chat template.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from producers.agents.interface import Answer, ChatRequest, Interface, event, read_limit, read_object, read_stops
from producers.data.openai_items import ApiError, Message, read_call, read_text

MOST_STOPS = 4
DONE = b"data: [DONE]\n\n"

# ---------------------------------------------------------------- requests


def read_chat(body: Any) -> ChatRequest:
    """The request of a `/v1/chat/completions` body. Raises ApiError."""
    tree = read_object(body)
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
    tree = read_object(body)
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


def _common(tree: dict[str, Any]) -> dict[str, Any]:
    limit = "max_tokens" if tree.get("max_completion_tokens") is None else "max_completion_tokens"
    options = tree.get("stream_options")
    return {
        "max_tokens": read_limit(tree.get(limit), param=limit),
        "stop": read_stops(tree.get("stop"), param="stop", most=MOST_STOPS),
        "stream": bool(tree.get("stream")),
        "usage_in_stream": isinstance(options, dict) and bool(options.get("include_usage")),
        "token_ids": bool(tree.get("return_token_ids")),
    }


def read_message(item: Any) -> Message:
    """A message in normal form: text content, objects as arguments. Raises ApiError."""
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise ApiError(400, f"a message without a role: {str(item)[:80]}", param="messages")
    role = "system" if item["role"] == "developer" else item["role"]
    found: Message = {"role": role, "content": read_text(item.get("content"), param="messages")}
    calls = item.get("tool_calls") or []
    if calls:
        found["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    for name in ("name", "tool_call_id"):
        if isinstance(item.get(name), str):
            found[name] = item[name]
    return found


def _call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"not a tool call: {str(call)[:80]}", param="messages")
    return read_call(call.get("id"), function.get("name"), function.get("arguments"), param="messages")


# ---------------------------------------------------------------- answers


def chat_answer(said: Answer, ask: ChatRequest, *, id: str, model: str, texts: Sequence[str]) -> dict[str, Any]:
    """The body of an answer to `/v1/chat/completions`. `texts` are the texts of the tokens, for log-probs."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": _message(said),
        "finish_reason": "tool_calls" if said.calls else said.finish,
        "logprobs": {"content": token_logprobs(said, texts), "refusal": None} if ask.logprobs else None,
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
    reasoning = {"reasoning_content": said.reasoning} if said.reasoning else {}  # as DeepSeek's servers call it
    if not said.calls:
        return {"role": "assistant", "content": said.text, **reasoning}
    return {"role": "assistant", "content": said.text or None, **reasoning, "tool_calls": _tool_calls(said)}


def _tool_calls(said: Answer) -> list[dict[str, Any]]:
    return [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for name, call in said.calls
    ]


def token_logprobs(said: Answer, texts: Sequence[str]) -> list[dict[str, Any]]:
    """The log-probs of the sampled tokens."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, said.logprobs, strict=True)
    ]


class Chunks:
    """The stream of a chat or a completion."""

    def __init__(self, ask: ChatRequest, *, id: str, model: str) -> None:
        self._ask = ask
        kind = "text_completion" if ask.messages is None else "chat.completion.chunk"
        self._head = {"id": id, "object": kind, "created": int(time.time()), "model": model}

    def begin(self) -> bytes:
        return b"" if self._ask.messages is None else self._chunk(delta={"role": "assistant", "content": ""})

    def text(self, text: str) -> bytes:
        return self._chunk(text=text) if self._ask.messages is None else self._chunk(delta={"content": text})

    def end(self, said: Answer) -> bytes:
        finish = "tool_calls" if said.calls else said.finish
        calls = [{"index": n, **call} for n, call in enumerate(_tool_calls(said))]
        delta: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        last = {"text": ""} if self._ask.messages is None else {"delta": delta}
        events = self._chunk(finish_reason=finish, **last)
        if self._ask.usage_in_stream:
            events += event({**self._head, "choices": [], "usage": usage(said)})
        return events + DONE

    def error(self, error: ApiError) -> bytes:
        return event(error_body(error))

    def _chunk(self, **choice: Any) -> bytes:
        return event({**self._head, "choices": [{"index": 0, "finish_reason": None, "logprobs": None, **choice}]})


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param or None, "code": error.code or None}}


def models(name: str) -> dict[str, Any]:
    """The body of `/v1/models`."""
    return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "asyncrl"}]}


CHAT = Interface("chatcmpl-", lambda body, _: read_chat(body), chat_answer, Chunks, error_body)
TEXT = Interface("cmpl-", lambda body, _: read_completion(body), text_answer, Chunks, error_body)
