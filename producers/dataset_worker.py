"""The worker for `producers.engine = "dataset"`: answers each lease with its row (`producers.engines.dataset`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.mode import answer_keys, is_paired
from asyncrl.engine import GenDelta
from asyncrl.errors import ConfigError
from asyncrl.images.decoding import ImageProblem
from asyncrl.wire import Lease, Leases
from buffers.client.producer import ProducerClient
from producers.data.images import store_images
from producers.data.prompts import BadPrompt
from producers.engines.dataset import DatasetEngine, NoWeights, Tokens, encode_row
from producers.support.retry import Patience
from producers.worker import Producer


class DatasetProducer(Producer):
    """Answers each lease with its row."""

    poll_s = 0.05  # no swaps here: every step of the learner outdates the version of a request
    engine: Any
    receiver: Any

    def __init__(
        self, config: Config, *, client: ProducerClient, engine: DatasetEngine, receiver: NoWeights, patience: Patience
    ) -> None:
        super().__init__(config, client=client, engine=engine, receiver=receiver, patience=patience)  # type: ignore[arg-type]
        row = self.prompts.columns
        missing = [key for key in answer_keys(config) if key not in row]
        if missing and (is_paired(config) or not isinstance(row.get(config.data.prompt_key), list)):
            raise ConfigError(
                "config.data",
                f"a row has no column {missing[0]!r}; it has: {', '.join(sorted(row))}",
                where=config.data.source or config.data.path,
            )

    def _note_answer(self, answer: Leases) -> None:
        self.engine.version = answer.version

    async def _group(self, lease: Lease) -> None:
        version = self.engine.version
        try:
            row = self.prompts.row_for(lease.group)
            images = self.prompts.images_of(row)
            prompt_ids, answers = encode_row(row, self.config, self.tokenizer, inputs=self.images, images=images)
            await store_images(images, self._store)
        except (BadPrompt, ImageProblem) as problem:
            reason = problem.reason
            await self._patiently(lambda: self.client.give_back([lease], reason=reason, dead=True))
            return
        made = [make_sample(lease, index, answers[index], version) for index in lease.missing]
        sent = {key: value for key, value in row.items() if key not in answer_keys(self.config)}
        reply = await self._patiently(
            lambda: self.client.submit(
                lease,
                prompt_ids=prompt_ids,
                samples=made,
                row=sent,
                digests={version: self.engine.digest},
                rewards={index: row_reward(index, len(answers)) for index in lease.missing},
            )
        )
        self.samples += len(made)
        self.refused += len(reply.refused)
        await self._stop_work(reply.cancelled, but=lease)


def make_sample(lease: Lease, index: int, tokens: Tokens, version: int) -> GenDelta:
    """One answer as a finished sample."""
    logprobs = np.zeros(tokens.size, np.float32)
    return GenDelta(f"{lease.group}:{lease.token}", index, tokens, logprobs, ((version, tokens.size),), "stop")


def row_reward(index: int, answers: int) -> float:
    """1 for the chosen answer of a pair, else 0."""
    return float(answers == 2 and index == 0)
