"""The worker for `producers.engine = "dataset"`: answers each lease with its row (`producers.engines.dataset`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.config import Config
from asyncrl.config.mode import answer_columns, answer_keys, is_paired
from asyncrl.engine import GenDelta
from asyncrl.errors import ConfigError
from asyncrl.images.decoding import ImageProblem
from asyncrl.wire import Lease, Leases
from buffers.client.producer import ProducerClient
from producers.data.images import store_images
from producers.data.prompts import BadPrompt, Row
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
        if missing := [key for key in answer_columns(config, row).values() if key not in row]:
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
            rewards = row_rewards(row, self.config)
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
                rewards={index: rewards[index] for index in lease.missing},
            )
        )
        self.samples += len(made)
        self.refused += len(reply.refused)
        await self._stop_work(reply.cancelled, but=lease)


def make_sample(lease: Lease, index: int, tokens: Tokens, version: int) -> GenDelta:
    """One answer as a finished sample."""
    logprobs = np.zeros(tokens.size, np.float32)
    return GenDelta(f"{lease.group}:{lease.token}", index, tokens, logprobs, ((version, tokens.size),), "stop")


def row_rewards(row: Row, config: Config) -> tuple[float, ...]:
    """Rewards of the answers: 1 for the chosen answer of a pair or a desirable one, else 0.

    Raises:
        BadPrompt: mode kto, and the row has no label.
    """
    if config.learner.mode != "kto":
        return (1.0, 0.0) if is_paired(config) else (0.0,)
    label = row.get(config.data.label_key)
    if not isinstance(label, bool | int) or label not in (0, 1):
        raise BadPrompt(f"label: column {config.data.label_key!r} is neither true nor false")
    return (float(label),)
