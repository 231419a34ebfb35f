"""Checks of requests that all engines share. Pure.

Guarantee: a request without a problem has a new id, a non-empty prompt of known tokens, fits the planned lengths, and
comes after the first weights.

Example: with data.max_prompt_tokens = 24 a prompt of 30 tokens that includes 8 tokens of a continued sample has no
problem; one of 25 tokens has "prompt of 25 tokens, data.max_prompt_tokens = 24".
"""

from __future__ import annotations

from asyncrl.config import Config
from asyncrl.engine import GenRequest


def request_problem(
    request: GenRequest,
    config: Config,
    *,
    vocab: int,
    taken: bool,
    version: int,
    supports: bool = False,
    experts: bool = False,
    keeps: bool = False,
    images: bool = False,
    image_turns: bool = False,
) -> str:
    """Why no engine can take this request, empty if it can.

    `vocab`: number of the model's tokens, 0 if unknown; `taken`: its id is in use; `version`: that of the engine, below
    0 before the first weights; `supports`: it records the support of draws; `experts`: it records chosen experts;
    `keeps`: it has a second set of weights; `images`, `image_turns`: as in `EngineCapabilities`.
    """
    prompt, longest = request.prompt_ids, config.longest_response
    own = len(prompt) - request.begun
    if taken:
        return f"request id {request.id!r} is in use"
    if not 1 <= own <= config.data.max_prompt_tokens:
        return f"prompt of {own} tokens, data.max_prompt_tokens = {config.data.max_prompt_tokens}"
    if request.max_new_tokens < 1 or request.begun + request.max_new_tokens > longest:
        return f"begun + max_new_tokens = {request.begun} + {request.max_new_tokens}, at most {longest} are planned for"
    if request.temperature <= 0 or not request.indices:
        return "temperature must be above 0 and indices not empty"
    if request.images and not images:
        return "this engine takes no images"
    if request.image_places and not image_turns:
        return "this engine takes images of prompts alone"
    if request.support and not supports:
        return "this engine does not record the support of draws (sampling.truncation = 'exact')"
    if request.experts and not experts:
        return "this engine does not record the experts of a token (learner.router_replay)"
    if request.version >= 0 and not keeps:
        return f"version {request.version} is wanted, and this engine has no second set of weights"
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab > 0:  # such a token would end a server
        return f"prompt tokens {int(prompt.min())} to {int(prompt.max())}, the vocabulary has {vocab}"
    return "" if version >= 0 else "no weights have been committed yet"
