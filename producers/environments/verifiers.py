"""Environments of the package `verifiers`, 0.1 (`pip install asyncrl[verifiers]`): the environment `verifiers`.

`[environment] name = "verifiers"`, `args = {id = "wordle"}`: the environment of `verifiers.load_environment(id,
**args)`. The row is its input (`prompt`, `answer`, `info`, `example_id`), so `[data]` should hold the rows of its data
set. The environment talks to a client that plays the turns here. Guarantees: answers of the policy stay as they were
sampled; if the environment continues the earlier messages, only the new ones are encoded; any other list of messages
opens a new row; the reward is that of the environment's rubric, its metrics are parts; an error of the environment
fails the sample."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.environment import Chat, EnvironmentFailure, Row, Turn
from asyncrl.errors import ConfigError


class VerifiersRollout:
    """The environment is loaded once; each sample is a rollout of it."""

    def __init__(self, id: str, **options: Any) -> None:
        self._package = _package()
        self._environment: Any = self._package.load_environment(id, **options)
        self._client = _client_class()

    async def __call__(self, chat: Chat, row: Row) -> dict[str, Any]:
        given = {"example_id": 0, **row}
        environment = self._environment
        state = await environment.rollout(given, self._client(chat), "policy", {})
        if state.get("error") is not None:
            raise EnvironmentFailure("raised", f"{type(state['error']).__name__}: {state['error']}")
        await environment.rubric.score_rollout(state)
        metrics: Mapping[str, Any] = state.get("metrics") or {}
        return {**{name: value for name, value in metrics.items() if name != "reward"}, "reward": state["reward"]}


def _client_class() -> Any:
    """A client of `verifiers` whose model is the policy of a chat."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class ChatClient(Client):  # type: ignore[misc]
        def __init__(self, chat: Chat) -> None:
            super().__init__(chat)
            self._seen: list[Any] = []

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError("it is made with a chat")

        async def to_native_tool(self, tool: Any) -> Any:
            return tool

        async def to_native_prompt(self, messages: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            return [plain_message(message) for message in messages], {}

        async def get_native_response(
            self, prompt: list[dict[str, Any]], model: str, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Turn:
            known = len(self._seen)
            if known and continues(self._seen, prompt):
                new: Any = prompt[known:]
            else:
                self._client.restart(prompt)
                new = None
            turn: Turn = await self._client.say(new)
            self._seen = [*prompt, {"role": "assistant"}]
            return turn

        async def raise_from_native_response(self, response: Turn) -> None:
            return

        async def from_native_response(self, response: Turn) -> Any:
            calls = [
                ToolCall(id=uuid.uuid4().hex, name=one.name, arguments=msgspec.json.encode(one.arguments).decode())
                for one in response.calls
            ]
            message = ResponseMessage(
                content=response.text,
                tool_calls=calls or None,
                is_truncated=response.finish != "stop",
                finish_reason="tool_calls" if calls else "stop" if response.finish == "stop" else "length",
            )
            return Response(id=uuid.uuid4().hex, created=int(time.time()), model="policy", message=message)

        async def close(self) -> None:
            return

    return ChatClient


def continues(seen: Sequence[Mapping[str, Any]], prompt: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these messages begin with the earlier ones; answers are compared by their place only."""
    if len(prompt) < len(seen):
        return False
    return all(
        one["role"] == other["role"] and (one["role"] == "assistant" or one.get("content") == other.get("content"))
        for one, other in zip(seen, prompt, strict=False)
    )


def plain_message(message: Any) -> dict[str, Any]:
    """A message of the package as role and text. Raises `EnvironmentFailure` for other content than text."""
    tree = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    content = tree.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise EnvironmentFailure("observation", "a message holds more than text")
        content = "".join(part["text"] for part in content)
    return {"role": tree["role"], "content": content}


def _package() -> Any:
    try:
        import verifiers
    except ImportError as error:
        message = f"{error}: pip install 'asyncrl[verifiers]'"
        raise ConfigError("config.extra", message, where="environment.name") from None
    if not hasattr(verifiers, "load_environment"):
        raise ConfigError("config.extra", "it has no load_environment: version 0.1 is needed", where="verifiers")
    return verifiers
