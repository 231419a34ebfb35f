"""Plays a sample with an engine that gives fixed texts: for the contract test and the check of a start. No model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.engine import EngineCapabilities, GenDelta, GenRequest
from asyncrl.environment import EnvironmentFailure
from asyncrl.errors import ConfigError
from producers.data.prompts import BadPrompt, encode_prompt
from producers.environments.multi_turn import Turns
from producers.environments.other_policy import OtherPolicy
from producers.rollout.rollout import Finished


class Played(msgspec.Struct, frozen=True):
    """One sample: the parts that must be equal, and the time of the environment between turns."""

    tokens: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    reward: float | None = None
    turns: int = 0
    finish: str = ""
    failure: str = ""
    pauses_s: tuple[float, ...] = ()
    turn_rewards: tuple[tuple[int, float], ...] = ()  # (place of a turn's last token, its reward)
    images: tuple[tuple[int, bytes], ...] = ()  # that the environment showed, with their places

    def transcript(self, decode: Callable[[Sequence[int]], str]) -> list[Line]:
        """The turns and observations in order, with the rewards of turns."""
        edges = [0, *(place for place in range(1, len(self.mask)) if self.mask[place] != self.mask[place - 1])]
        ends = [*edges[1:], len(self.mask)]
        return [
            Line(
                "policy" if self.mask[begin] else "shown",
                decode(self.tokens[begin:end]),
                next((reward for place, reward in self.turn_rewards if begin <= place < end), None),
            )
            for begin, end in zip(edges, ends, strict=True)
            if end > begin
        ]


class Line(msgspec.Struct, frozen=True):
    """A turn, or the observation after it; `reward`: of the turn, if it has one."""

    who: str
    text: str
    reward: float | None = None

    def __str__(self) -> str:
        text = self.text.strip().replace("\n", "\n" + " " * 10)
        return f"  {self.who:6}  {text}" + ("" if self.reward is None else f"   [reward {self.reward:g}]")


class ScriptedEngine:
    """Gives one text after the other, then repeats the last one; from turn `hangs_at` on it never answers."""

    def __init__(self, tokenizer: Any, says: Sequence[str], *, hangs_at: int = -1) -> None:
        self.pauses_s: list[float] = []
        self.turns = 0
        self.hanging = asyncio.Event()
        self._tokenizer, self._says, self._hangs_at = tokenizer, says, hangs_at
        self._spoke = 0.0

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        if self.turns:
            self.pauses_s.append(time.monotonic() - self._spoke)
        number, self.turns = self.turns, self.turns + 1
        if number == self._hangs_at:
            self.hanging.set()
            await asyncio.Event().wait()  # bounded: the cancellation test cancels it
        text = self._says[min(number, len(self._says) - 1)]
        ids = [*self._tokenizer.encode_part(text), self._tokenizer.eos_ids[0]]
        finish = "stop" if len(ids) <= request.max_new_tokens else "length"
        tokens = np.array(ids[: request.max_new_tokens], np.int32)
        self._spoke = time.monotonic()
        yield GenDelta(
            request.id, request.indices[0], tokens, np.full(len(tokens), -0.5, np.float32), ((0, len(tokens)),), finish
        )

    def capabilities(self) -> EngineCapabilities:
        """It takes what the policy's model takes."""
        return EngineCapabilities("scripted", 1, 0, images=True, image_turns=True)

    async def abort(self, ids: Any) -> int:
        """Nothing runs outside `generate`."""
        return 0


def make_request(
    row: Mapping[str, Any], config: Config, tokenizer: Any, environment: Turns, *, images: Sequence[bytes] = ()
) -> GenRequest:
    """The request of one sample of a row with these images. Raises `config.data` if the row cannot be encoded."""
    try:
        given: dict[str, Any] = {"inputs": environment.inputs, "images": images}
        prompt = encode_prompt(dict(row), config.data, tokenizer, environment.tools, **given)
    except BadPrompt as error:
        raise ConfigError("config.data", error.reason, where="the row") from None
    return GenRequest("test:1", prompt, (0,), 1, config.sampling.max_new_tokens, images=tuple(images))


async def play_row(
    environment: Turns,
    config: Config,
    tokenizer: Any,
    row: Mapping[str, Any],
    says: Sequence[str],
    *,
    images: Sequence[bytes] = (),
) -> Played:
    """One sample of a row, with policies that all say these texts."""
    environment.others = {
        name: OtherPolicy(name, config, engine=ScriptedEngine(tokenizer, says), tokenizer=tokenizer)  # type: ignore[arg-type]
        for name in config.run.other_policies
    }
    engine = ScriptedEngine(tokenizer, says)
    failure = ""
    done: Finished | None = None
    try:
        request = make_request(row, config, tokenizer, environment, images=images)
        async for item in environment.play(engine, request, dict(row)):  # type: ignore[arg-type]
            done = item if isinstance(item, Finished) else done
    except EnvironmentFailure as error:
        failure = error.reason
    except ConfigError as error:
        failure = f"{error.code}: {error.message}"
    if done is None:
        return Played(turns=engine.turns, failure=failure, pauses_s=tuple(engine.pauses_s))
    ids = done.sample.token_ids
    mask = np.ones(len(ids), np.uint8) if done.mask is None else done.mask
    return Played(
        tuple(ids.tolist()),
        tuple(mask.tolist()),
        done.reward,
        engine.turns,
        done.sample.finish,
        failure,
        tuple(engine.pauses_s),
        done.turns,
        done.images,
    )
