"""The forms of a prompt: text, chat messages, or a request of OpenAI's Responses with its tools. Pure.

A request is a table with `input` (text or items), and perhaps `instructions` and `tools`: the column
`responses_create_params` of NeMo-Gym. It stays in the row as it is; the policy sees its messages and tools.

>>> split_prompt({"input": "add 1", "tools": [{"type": "function", "name": "add", "parameters": {}}]})
([{'role': 'user', 'content': 'add 1'}], ({'type': 'function', 'function': {'name': 'add', 'parameters': {}}},))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from asyncrl.config import DataConfig
from producers.data.openai_items import Message, read_request


def split_prompt(prompt: Any) -> tuple[Any, tuple[Message, ...]]:
    """A row's prompt as text or messages, and the schemas of its own tools. Raises `ApiError` for a request that the
    policy cannot read."""
    if not is_request(prompt):
        return prompt, ()
    return read_request(prompt)


def apply_settings(row: dict[str, Any], data: DataConfig) -> dict[str, Any]:
    """The row with `data.as_chat` and `data.system_prompt` applied to its prompt; rewards get it like this too."""
    prompt = row.get(data.prompt_key)
    if data.as_chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if data.system_prompt and is_chat(prompt) and all(message["role"] != "system" for message in prompt):
        prompt = [{"role": "system", "content": data.system_prompt}, *prompt]
    if data.system_prompt and is_request(prompt) and not (prompt.get("instructions") or _has_system(prompt["input"])):
        prompt = {**prompt, "instructions": data.system_prompt}
    return row if prompt is row.get(data.prompt_key) else {**row, data.prompt_key: prompt}


def is_chat(prompt: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether it is a list of messages."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(item, dict) and "role" in item for item in prompt)


def is_request(prompt: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether it is a request of OpenAI's Responses."""
    return isinstance(prompt, Mapping) and "input" in prompt


def _has_system(given: Any) -> bool:
    items = given if isinstance(given, list) else ()
    return any(isinstance(item, Mapping) and item.get("role") in ("system", "developer") for item in items)
