"""A tokenizer with a chat template, and an engine that says what a test wants: for the tests of environments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config, parse
from asyncrl.demo import calculator
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.environment import EnvironmentFailure
from learners.warm_start.tiny_model import make_tokenizer
from producers.data.prompts import encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.rollout.rollout import Finished

ASCII = "".join(map(chr, range(32, 127))) + "\n"
CHATML = calculator.TEMPLATE
TOOLS_SHOWN = "{% if tools %}<bos>tools\n{{ tools | tojson }}<eos>\n{% endif %}" + CHATML
#: As Qwen3's: reasoning is shown in answers behind the last question alone, an empty one where there is none.
REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<bos>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>\n\n') %}"
    "{% if loop.index0 > ns.last and (loop.last or parts | length > 1) %}"
    "{{ parts[0] + '</think>\n\n' if parts | length > 1 else '<think>\n\n</think>\n\n' }}{% endif %}{{ parts[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def tokenizer_in(folder: Path, template: str = CHATML, characters: str = ASCII) -> Tokenizer:
    """Made and read back as a producer does."""
    make_tokenizer(folder, characters=characters, chat_template=template)
    return Tokenizer(folder, trust_remote_code=False)


def config_of(folder: Path, text: str = "", *, reward: bool = True, room: int = 300) -> Config:
    """A configuration with `text` as its `[environment]`."""
    return parse(
        f'[model]\npath = "{folder}"\n[data]\npath = "rows.jsonl"\nmax_prompt_tokens = 200\n'
        f"[sampling]\nmax_new_tokens = {room}\n[learner]\nmicro_batch_tokens = 2000\n"
        + ('[[reward]]\nfunction = "m:f"\n' if reward else "")
        + f"[environment]\n{text}"
    )


class SayingEngine:
    """Says what `script(index, turn, context)` gives: text, that an <eos> follows; or token ids, taken as they are.

    None: the request is never answered. `asked` are the requests.
    """

    def __init__(self, tokenizer: Tokenizer, script: Callable[[int, int, str], str | Sequence[int] | None]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.asked: list[GenRequest] = []
        self.given_up: list[str] = []
        self.version = 3
        self._turns: dict[int, int] = {}

    async def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        """One sample per request."""
        self.asked.append(request)
        (index,) = request.indices
        turn = self._turns[index] = self._turns.get(index, -1) + 1
        said = self.script(index, turn, self.tokenizer.decode(request.prompt_ids.tolist()))
        try:
            await asyncio.sleep(3600 if said is None else 0)
        except asyncio.CancelledError:
            self.given_up.append(request.id)
            raise
        assert said is not None
        ids = [*self.tokenizer.encode_part(said), *self.tokenizer.eos_ids] if isinstance(said, str) else list(said)
        finish = "stop" if len(ids) <= request.max_new_tokens else "length"
        tokens = np.array(ids[: request.max_new_tokens], np.int32)
        probs = np.full(len(tokens), -0.25, np.float32)
        yield GenDelta(request.id, index, tokens, probs, ((self.version + turn, len(tokens)),), finish)

    async def abort(self, ids: Any) -> int:
        """Noted."""
        self.given_up += list(ids or ())
        return 0


def play(
    environment: Any,
    engine: Any,
    config: Config,
    tokenizer: Tokenizer,
    row: dict[str, Any],
    *,
    samples: int,
    limit_s: float,
) -> tuple[list[Finished], EnvironmentFailure | None]:
    """The finished samples of one group by index, and the failure that came out at the end."""
    prompt = encode_prompt(row, config.data, tokenizer, environment.tools)
    request = GenRequest("7:1", prompt, tuple(range(samples)), 5, config.sampling.max_new_tokens)
    done: list[Finished] = []

    async def run() -> EnvironmentFailure | None:
        await environment.open()
        try:
            async for item in environment.play(engine, request, row):
                assert isinstance(item, Finished)
                done.append(item)
        except EnvironmentFailure as failure:
            return failure
        finally:
            await environment.close()
        return None

    failure = asyncio.run(asyncio.wait_for(run(), limit_s))
    return sorted(done, key=lambda item: item.sample.index), failure
