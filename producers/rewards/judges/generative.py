"""A judge that is a local language model: it writes an answer with a number, or gives the probability of yes.

Two forms, by `answer`:
- `Written` (pattern) generates with any engine (`judge.engine`: hf, vllm, ...), which has its own copy of the model, at
  version 0, independent of the policy's weights;
- `YesNo` (yes_no) reads the probabilities of the next token in one forward pass of transformers.
Guarantees: samples are scored together, `concurrency` at once; a text longer than `max_tokens` is `too_long`, nothing
is cut; an answer that ends by its length before its number is `unparsed`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from asyncrl import config as configuration
from asyncrl.engine import Engine, GenRequest
from asyncrl.errors import ConfigError
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.model_inputs import open_inputs
from asyncrl.plugins import find
from producers.data.tokenizer import Tokenizer
from producers.engines.initial_weights import commit_folder
from producers.rewards.judges.classifier import LocalModel, Text, folder_digest
from producers.rewards.judges.templates import judge_messages, number_in, question_digest, sample_images, yes_share
from producers.rewards.outcome import (
    JudgeSettings,
    Outcome,
    Problem,
    Report,
    Verdict,
    make_problem,
    require_finite,
    score_batches,
    score_each,
)
from producers.rewards.sample import RewardSample

END_S = 10.0  # for the engine to stop


def engine_config(settings: JudgeSettings) -> configuration.Config:
    """The configuration of a judge's engine."""
    table = settings.table
    prompt = table.max_tokens - table.max_new_tokens
    if prompt < 1:
        what = f"judge.max_tokens = {table.max_tokens} leaves no room before max_new_tokens = {table.max_new_tokens}"
        raise ConfigError("config.conflict", what, where=f"judge {table.name!r}")
    plain = {
        "model": {"path": table.model, "dtype": settings.dtype, "trust_remote_code": table.trust_remote_code},
        "data": {
            "source": "judge:rows",
            "max_prompt_tokens": prompt,
            "max_image_pixels": settings.max_image_pixels,
        },
        "sampling": {"max_new_tokens": table.max_new_tokens, "temperature": table.temperature or 1.0},
        "producers": {"engine": table.engine, "slots": table.concurrency, "device": table.device},
        "reward": [{"function": "judge:score"}],
    }
    return msgspec.convert(plain, configuration.Config)


class Questions:
    """The questions of a judge as token ids, with images if it sees them."""

    def __init__(self, settings: JudgeSettings) -> None:
        self._inputs = open_inputs(engine_config(settings)) if settings.table.sees_images else None
        self.tokenizer = Tokenizer(settings.table.model, trust_remote_code=settings.table.trust_remote_code)
        self._table = settings.table
        if self._inputs is not None and not self.tokenizer.has_template():
            what = "judge.prompt has {images}, and its tokenizer has no chat template"
            raise ConfigError("config.tokenizer", what, where=self._table.model)

    def encode(self, sample: RewardSample, *, limit: int) -> Text:
        """The question, as a chat if the tokenizer has a template. Raises Problem: it is `too_long`, or an image of the
        sample is missing or damaged."""
        messages = judge_messages(self._table, sample)
        images: tuple[bytes, ...] = ()
        if self.tokenizer.has_template():
            ids = self.tokenizer.encode_chat(messages)
        else:
            ids = self.tokenizer.encode("\n".join(message["content"] for message in messages))
        if self._inputs is not None:
            images = sample_images(sample)
            try:
                ids = self._inputs.expand(ids, images).tolist()
            except (ValueError, ImageProblem) as error:  # other placeholders than images: the response may have one
                raise Problem("raised", f"images: {error}") from None
        if not 0 < len(ids) <= limit:
            raise Problem("too_long", f"{len(ids)} tokens, the judge takes {limit} (judge.max_tokens)")
        return Text(ids, images)

    def version(self) -> str:
        """Digest of the model's files and of the question."""
        return question_digest(self._table, folder_digest(Path(self._table.model)))


class Written:
    """A written answer, from an engine."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.table = settings.table
        self._settings = settings
        self._questions = Questions(settings)
        self._config = engine_config(settings)
        self._engine: Engine | None = None
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start the engine and give it its weights."""
        engine: Engine = find("asyncrl.engines", self.table.engine)(self._config)
        self._engine = engine
        await engine.start()
        await commit_folder(engine, self.table.model, dtype=self._settings.dtype)

    def version(self) -> str:
        """Digest of the model's files and of the question."""
        return self._questions.version()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close(grace_s=END_S)

    async def score(self, samples: Sequence[RewardSample], done: Report) -> None:
        """Score all samples, `concurrency` at once: the engine decodes them together."""
        limit_s, at_once = self._settings.timeout_s, self.table.concurrency
        await score_each(samples, self._one, done, timeout_s=limit_s, at_once=at_once)

    async def _one(self, sample: RewardSample) -> Verdict:
        assert self._engine is not None
        prompt = self._questions.encode(sample, limit=self._config.data.max_prompt_tokens)
        greedy = self.table.temperature == 0
        number = next(self._numbers)
        request = GenRequest(
            f"judge-{number}",
            np.asarray(prompt.ids, np.int32),
            (0,),
            number,
            self.table.max_new_tokens,
            temperature=self.table.temperature or 1.0,
            top_k=1 if greedy else 0,
            stop_ids=self._questions.tokenizer.eos_ids,
            images=prompt.images,
        )
        ids: list[int] = []
        finish = ""
        try:
            async for delta in self._engine.generate(request):
                ids += delta.token_ids.tolist()
                finish = delta.finish
        except asyncio.CancelledError:
            await self._engine.abort([request.id])
            raise
        found = number_in(self.table, self._questions.tokenizer.decode(ids), cut=finish != "stop")
        require_finite(found.value)
        return found


class YesNo(LocalModel):
    """P(yes) / (P(yes) + P(no)) of the next token."""

    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__(settings)
        self._questions = Questions(settings)
        self._words: dict[str, list[int]] = {}

    def _load(self) -> None:
        self._load_model("language", "language model")
        words = (*self.table.yes, *self.table.no)
        self._words = {word: self.first_tokens(word) for word in words}
        both = {token for word in self.table.yes for token in self._words[word]}
        if shared := [word for word in self.table.no if both & set(self._words[word])]:
            what = f"{shared[0]!r} and one of yes = {list(self.table.yes)} begin with the same token"
            raise ConfigError("config.conflict", what, where=f"judge {self.table.name!r}")

    def first_tokens(self, word: str) -> list[int]:
        """First token ids of the word, with and without a leading space."""
        heads = {self._questions.tokenizer.encode_answer(text)[0] for text in (word, f" {word}")}
        space = self._questions.tokenizer.encode_answer(" x")[0]  # a separate space token has no meaning
        plain = self._questions.tokenizer.encode_answer(word)[0]
        return sorted(head for head in heads if head == plain or head != space)

    def version(self) -> str:
        """Digest of the model's files and of the question."""
        return self._questions.version()

    async def score(self, samples: Sequence[RewardSample], done: Report) -> None:
        """Score all samples, `concurrency` rows in a forward pass."""

        def encode(sample: RewardSample) -> Text:
            return self._questions.encode(sample, limit=self.table.max_tokens)

        await score_batches(samples, done, encode=encode, forward=self._forward, rows=self.table.concurrency)

    def _forward(self, rows: list[Text]) -> list[Outcome]:
        try:
            logprobs = self._logprobs(rows)
        except Exception as error:  # any error of torch is a failure of these samples
            return [make_problem(error)] * len(rows)
        outcomes: list[Outcome] = []
        for row in logprobs:
            by_word = {word: float(torch.logsumexp(row[tokens], 0)) for word, tokens in self._words.items() if tokens}
            try:
                outcomes.append(yes_share(self.table, self._once(by_word)))
            except Problem as problem:
                outcomes.append(problem)
        return outcomes

    def _once(self, by_word: dict[str, float]) -> dict[str, float]:
        """Words with the same first tokens count once."""
        seen: dict[tuple[int, ...], str] = {}
        for word in by_word:
            seen.setdefault(tuple(self._words[word]), word)
        return {word: by_word[word] for word in seen.values()}

    @torch.inference_mode()
    def _logprobs(self, rows: list[Text]) -> torch.Tensor:
        """Log-probs `[rows, vocabulary]` after the last token of each row."""
        states, _, last = self._states(rows)
        return torch.log_softmax(self._model.get_output_embeddings()(states[last]).float(), -1).cpu()
