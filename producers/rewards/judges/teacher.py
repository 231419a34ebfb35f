"""A teacher: a language model that tells the log-prob of every token of a sample, and maybe its likeliest tokens.

The model is a folder on this host, which makes forward passes of transformers, or runs on a server: vLLM, SGLang, or
any OpenAI-compatible address whose completions `echo` a prompt with log-probs. Guarantees:
1. it gets the exact tokens of the sample, never its text encoded again, and an answer about other tokens is refused;
2. log-probs are of `softmax(logits / temperature)`, with the temperature of the run, like those of the policy;
3. every sequence of a session is read with its own prompt; tokens of such prompts get 0. A folder of a vision-language
   model reads the images of the prompt;
4. a sample longer than `max_tokens`, or than the model's positions, is `too_long`; nothing is cut;
5. only rows of its data sources get an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.config.model_facts import HEAD_CAP, HEAD_SCALES, find_head_scale
from asyncrl.errors import ConfigError
from asyncrl.images.decoding import ImageProblem
from asyncrl.runtime.model_folder import find_positions, model_json
from producers.rewards.judges.classifier import LocalModel, Text, folder_digest
from producers.rewards.judges.remote import Remote
from producers.rewards.judges.templates import sample_images
from producers.rewards.outcome import (
    JudgeSettings,
    Model,
    Problem,
    Report,
    TeacherSettings,
    Verdict,
)
from producers.rewards.sample import RewardSample

#: Log-prob of an impossible token: the lowest that samples may have.
LOWEST = -1000.0
CHUNK = 1024  # tokens whose logits exist at once
Array = npt.NDArray[Any]


class Part(NamedTuple):
    """One sequence of a sample: its tokens, how many of them are its prompt, its answer's place in the response, and
    the encoded images of its prompt."""

    tokens: list[int]
    prompt: int
    start: int
    images: tuple[bytes, ...] = ()

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]


class Told(NamedTuple):
    """Numbers of the answer of one sequence: f4 `[T]`, i4 `[T, K]`, f4 `[T, K]`."""

    logprobs: Array
    ids: Array
    top: Array


def iter_parts(sample: RewardSample) -> Iterator[Part]:
    """The sequences of a sample, as in `wire.SampleHead`: the first continues the prompt unless a row starts at 0."""
    rows, size = sample.rows, len(sample.response_ids)
    if not rows or rows[0][0]:
        end = rows[0][0] if rows else size
        yield Part([*sample.prompt_ids, *sample.response_ids[:end]], len(sample.prompt_ids), 0)
    for (start, prompt), end in zip(rows, [*(start for start, _ in rows[1:]), size], strict=False):
        yield Part(sample.response_ids[start:end], prompt, start + prompt)


def join(sample: RewardSample, told: Sequence[tuple[Part, Told]], top_k: int) -> Verdict:
    """The answer about a sample from those about its sequences."""
    size = len(sample.response_ids)
    logprobs, ids = np.zeros(size, np.float32), np.zeros((size, top_k), np.int32)
    top = np.full((size, top_k), LOWEST, np.float32)
    for part, one in told:
        place = slice(part.start, part.start + one.logprobs.size)
        logprobs[place] = np.clip(one.logprobs, LOWEST, 0.0)
        if top_k:
            ids[place], top[place] = one.ids, np.clip(one.top, LOWEST, 0.0)
    arrays = {"teacher_logprobs": logprobs.tobytes()}
    if top_k:
        arrays |= {"teacher_ids": ids.tobytes(), "teacher_top": top.tobytes()}
    return Verdict(0.0, arrays=arrays)


def check_sample(sample: RewardSample, teacher: TeacherSettings, most: int) -> list[Part]:
    """The sequences of a sample that the teacher reads. Raises Problem for one that it does not."""
    if teacher.data_sources and sample.data_source not in teacher.data_sources:
        raise Problem("raised", f"no teacher has rows of data_source {sample.data_source!r}")
    found = list(iter_parts(sample))
    longest = max(len(part.tokens) for part in found)
    if longest > most:
        raise Problem("too_long", f"{longest} tokens, the teacher takes {most} (teacher.max_tokens)")
    return found


def make_teacher(settings: JudgeSettings, teacher: TeacherSettings) -> Model:
    """The teacher of these settings."""
    if settings.table.url:
        return Remote(settings, exchange=PromptLogprobs(settings, teacher))
    return LocalTeacher(settings, teacher)


# ---------------------------------------------------------------- a model folder


class LocalTeacher(LocalModel):
    """A model of transformers on this host."""

    def __init__(self, settings: JudgeSettings, teacher: TeacherSettings) -> None:
        super().__init__(settings)
        self._teacher = teacher
        self._most = self.table.max_tokens
        self._cap: float | None = None
        policy = model_json(settings.policy)
        known = (policy.get("text_config") or policy).get("vocab_size")
        self._vocabulary = int(known or 0) or None  # a teacher may pad further

    def _load(self) -> None:
        config = self._load_model("language", "language model").get_text_config()
        if scale := find_head_scale({name: getattr(config, name, None) for name in HEAD_SCALES}):
            raise ConfigError("config.model", f"{config.model_type}: {scale} is not supported", where=self.table.model)
        self._cap = getattr(config, HEAD_CAP, None)
        self._most = min(self._most, find_positions(config.to_dict()) or self._most)

    def version(self) -> str:
        """Digest of the model's files: small ones whole, of weights both ends and the size."""
        return f"{folder_digest(Path(self.table.model))}-{self._teacher.temperature:g}-{self._teacher.top_k}"

    async def score(self, samples: Sequence[RewardSample], done: Report) -> None:
        """Read all samples, in batches of sequences of similar length."""
        todo: list[tuple[int, Part]] = []
        told: dict[int, list[tuple[Part, Told]]] = {}
        left: dict[int, int] = {}
        for place, sample in enumerate(samples):
            try:
                parts = self._add_images(sample, check_sample(sample, self._teacher, self._most))
            except Problem as problem:
                done(place, problem)
                continue
            left[place], told[place] = len(parts), []
            todo += [(place, part) for part in parts]
        todo.sort(key=lambda item: len(item[1].tokens))
        for first in range(0, len(todo), self.table.concurrency):
            batch = todo[first : first + self.table.concurrency]
            outcomes = await asyncio.to_thread(self._halve, self._forward, [part for _, part in batch])
            for (place, part), outcome in zip(batch, outcomes, strict=True):
                left[place] -= 1
                if place not in told:  # another part of the sample has failed
                    continue
                if isinstance(outcome, Problem):
                    del told[place]
                    done(place, outcome)
                    continue
                told[place].append((part, outcome))
                if not left[place]:
                    done(place, join(samples[place], told.pop(place), self._teacher.top_k))

    def _add_images(self, sample: RewardSample, parts: list[Part]) -> list[Part]:
        """The sequences with the images of the prompt. Raises Problem for a sample that is not read with its images."""
        images = sample_images(sample)
        if not images or self._inputs is None:
            return parts
        if sample.images or len(parts) > 1:
            raise Problem("raised", "a teacher reads images of the prompt of a single context, this sample has more")
        try:
            row = self._inputs.row(np.asarray(parts[0].tokens, np.int32), images)
            if row.stray[: parts[0].prompt].any():
                raise ValueError("fewer tokens of the images than the policy has")
        except (ValueError, ImageProblem) as error:
            raise Problem("raised", f"images: {error}") from None
        return [parts[0]._replace(images=images)]

    @torch.inference_mode()
    def _forward(self, parts: list[Part]) -> list[Told]:
        """One forward pass over rows padded on the right; logits of at most `CHUNK` tokens exist at once."""
        states, ids, _ = self._states([Text(part.tokens, part.images) for part in parts])
        found = []
        for row, part in enumerate(parts):
            targets = ids[row, part.prompt : len(part.tokens)]
            answer = states[row, part.prompt - 1 : len(part.tokens) - 1]
            pieces = [
                self._read(*pair) for pair in zip(torch.split(answer, CHUNK), torch.split(targets, CHUNK), strict=True)
            ]
            found.append(Told(*(np.concatenate(every) for every in zip(*pieces, strict=True))))
        return found

    def _read(self, states: torch.Tensor, targets: torch.Tensor) -> Told:
        logits = self._model.get_output_embeddings()(states).float()
        if self._cap is not None:
            logits = (logits / self._cap).tanh() * self._cap
        logs = (logits / self._teacher.temperature).log_softmax(-1)
        top = logs[:, : self._vocabulary].topk(self._teacher.top_k, dim=-1)
        mine = logs.gather(-1, targets[:, None]).squeeze(-1)
        return Told(mine.cpu().numpy(), top.indices.int().cpu().numpy(), top.values.cpu().numpy())


# ---------------------------------------------------------------- a server


class PromptLogprobs:
    """A request for log-probs of given tokens, in the form of each interface."""

    longest_answer = 256 << 20

    def __init__(self, settings: JudgeSettings, teacher: TeacherSettings) -> None:
        self._table = settings.table
        self._teacher = teacher
        self.path = "/generate" if teacher.api == "sglang" else "/completions"

    def body(self, sample: RewardSample) -> dict[str, Any]:
        parts = check_sample(sample, self._teacher, self._table.max_tokens)
        if len(parts) > 1:
            raise Problem("raised", "a server reads one context; this session has several: use a model folder")
        tokens, top_k = parts[0].tokens, self._teacher.top_k
        if self._teacher.api == "sglang":
            sampling = {"max_new_tokens": 1, "temperature": 0}
            asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top_k}
            return {"input_ids": tokens, "sampling_params": sampling, **asked}
        body = {"model": self._table.model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        return body | ({"prompt_logprobs": top_k} if self._teacher.api == "vllm" else {"echo": True, "logprobs": 1})

    def read(self, answer: Any, sample: RewardSample) -> Verdict:
        part = next(iter_parts(sample))
        read = {"sglang": self._read_sglang, "vllm": self._read_vllm, "openai": self._read_openai}[self._teacher.api]
        told = read(answer, part)
        if not np.isfinite(told.logprobs).all() or np.isnan(told.top).any():
            raise ValueError("its log-probs are not finite")
        return join(sample, [(part, told)], self._teacher.top_k)

    def _read_vllm(self, answer: Any, part: Part) -> Told:
        """A dict for each token of the prompt: token id -> its log-prob and rank; of the token itself, too."""
        entries = _last(answer["choices"][0]["prompt_logprobs"], part)
        mine = [entry[str(token)]["logprob"] for entry, token in zip(entries, part.answer, strict=True)]
        ranked = [
            sorted((one["rank"], int(token), one["logprob"]) for token, one in entry.items()) for entry in entries
        ]
        return self._make_told(mine, [[(token, value) for _, token, value in row] for row in ranked])

    def _read_sglang(self, answer: Any, part: Part) -> Told:
        """Triples of log-prob, token id and text."""
        found = answer["meta_info"]
        mine = _last(found["input_token_logprobs"], part)
        if [one[1] for one in mine] != part.answer:
            raise ValueError("it answered about other tokens")
        top = _last(found["input_top_logprobs"], part) if self._teacher.top_k else [[]] * len(mine)
        return self._make_told([one[0] for one in mine], [[(one[1], one[0]) for one in row] for row in top])

    def _read_openai(self, answer: Any, part: Part) -> Told:
        """A log-prob for each token of the echoed prompt, and for the token after it."""
        echoed = answer["choices"][0]["logprobs"]["token_logprobs"]
        return self._make_told(_last(echoed[: len(part.tokens)], part), [[]] * len(part.answer))

    def _make_told(self, mine: Sequence[float], top: Sequence[Sequence[tuple[int, float]]]) -> Told:
        top_k = self._teacher.top_k
        if any(len(row) < top_k for row in top):
            raise ValueError(f"it names fewer than {top_k} tokens")
        pairs = np.array([row[:top_k] for row in top], np.float64).reshape(len(mine), top_k, 2)
        return Told(np.array(mine, np.float32), pairs[..., 0].astype(np.int32), pairs[..., 1].astype(np.float32))


def _last(entries: Sequence[Any], part: Part) -> Sequence[Any]:
    """Those of the answer, from a list with one for each token of the sequence."""
    if len(entries) != len(part.tokens):
        raise ValueError(f"it answered about {len(entries)} tokens, {len(part.tokens)} were sent")
    return entries[part.prompt :]
