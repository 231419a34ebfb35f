"""Self-play (SPIN, arXiv 2401.01335): sample 0 of a group is the answer of its row, the others are generated.

`learner.preference.demonstrations` asks for it. Guarantees:
1. the row's answer has the reward 1 and the generated samples 0, so that the answer is the chosen one of the pair;
   reward workers score held-out prompts alone;
2. the answer ends with the tokenizer's end of sequence, its log-probs are zeros; its version is the one that the
   engine held when the row was read. Nothing is cut: a row without an answer, or with one that is longer than
   `sampling.max_new_tokens`, is dropped with its reason (dead letters).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from asyncrl.config import SamplingConfig
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.evaluation.ids import is_evaluation
from asyncrl.wire import Lease
from producers.data.prompts import BadPrompt, Row
from producers.engines.dataset import answer_text
from producers.rollout.kept_turns import TurnTrail
from producers.rollout.partial_samples import Trail
from producers.rollout.rollout import Finished
from producers.worker import Producer

Deliver = Callable[[list[Finished]], Awaitable[bool]]


class SelfPlayProducer(Producer):
    """Sends the row's answer, then generates the other samples."""

    def _request(self, lease: Lease, prompt_ids: Any, sampling: SamplingConfig, version: int) -> GenRequest:
        request = super()._request(lease, prompt_ids, sampling, version)
        if is_evaluation(lease.group):
            return request
        return replace(request, indices=tuple(index for index in request.indices if index))

    async def _play(
        self, lease: Lease, row: Row, trail: Trail | TurnTrail, sampling: SamplingConfig, deliver: Deliver
    ) -> None:
        if is_evaluation(lease.group):
            await super()._play(lease, row, trail, sampling, deliver)
            return

        async def deliver_zero(finished: list[Finished]) -> bool:
            return await deliver([item._replace(reward=0.0) for item in finished])

        if 0 in lease.missing:
            try:
                answer = self._demonstration(lease, row)
            except BadPrompt as problem:
                reason = problem.reason
                await self._patiently(lambda: self.client.give_back([lease], reason=reason, dead=True))
                return
            if not await deliver([Finished(answer, reward=1.0)]):
                return
        if any(lease.missing):
            await super()._play(lease, row, trail, sampling, deliver_zero)

    def _demonstration(self, lease: Lease, row: Row) -> GenDelta:
        """The row's answer as a finished sample. Raises `BadPrompt`."""
        data, limit = self.config.data, self.config.sampling.max_new_tokens
        if data.response_key not in row:
            raise BadPrompt(f"answer: no column {data.response_key!r}")
        text = answer_text(data.response_key, row[data.response_key], row.get(data.prompt_key))
        tokens = np.asarray(self.tokenizer.encode_answer(text), dtype=np.int32)
        if tokens.size > limit:
            raise BadPrompt(f"too_long: an answer of {tokens.size} tokens, sampling.max_new_tokens = {limit}")
        runs = ((self.receiver.version, tokens.size),)
        return GenDelta(f"{lease.group}:{lease.token}", 0, tokens, np.zeros(tokens.size, np.float32), runs, "stop")
