"""A judge that is a sequence classifier of transformers: a reward model with one score, or a label's probability.

The export of `learner.mode = "reward_model"` is one. Guarantees:
1. with the policy's own tokenizer it gets the exact tokens of the sample, never the text encoded again;
2. samples are scored in batches of at most `concurrency`, sorted by length; a batch that does not fit in memory is
   retried in halves, and only a single sample that does not fit is a failure (`memory`);
3. a sample longer than `max_tokens`, or than the model's positions, is `too_long`; nothing is cut.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from asyncrl.errors import ConfigError
from asyncrl.images.forward import body_arguments, see_rows, stray_placeholders
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.images.rows import takes_images
from asyncrl.runtime.device import Device
from asyncrl.runtime.model_folder import Kind, load_model
from producers.data.prompt_forms import split_prompt
from producers.data.tokenizer import Tokenizer
from producers.rewards.outcome import (
    JudgeSettings,
    Outcome,
    Problem,
    Report,
    Verdict,
    make_problem,
    require_finite,
    score_batches,
)
from producers.rewards.sample import RewardSample

DIGESTED = ("config.json", "tokenizer.json", "model.safetensors.index.json")
T = TypeVar("T")
R = TypeVar("R")
HEAD_BYTES = 1 << 20  # of every file of weights, at both ends, in the digest


class Text(NamedTuple):
    """A row of a forward pass: token ids, and the encoded images of its first placeholders."""

    ids: list[int]
    images: tuple[bytes, ...] = ()


class LocalModel:
    """A judge whose model of transformers makes forward passes here. Subclasses load it in `_load`."""

    def __init__(self, settings: JudgeSettings) -> None:
        self.table = settings.table
        self._settings = settings
        self._place = Device("cpu")
        self._device = self._place.torch_device
        self._model: Any = None
        self._inputs: ImageInputs | None = None  # of a vision-language model

    async def start(self) -> None:
        """Load the model onto its device."""
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        raise NotImplementedError

    async def close(self) -> None: ...

    def _load_model(self, kind: Kind, what: str) -> Any:
        """Load the model; its configuration."""
        self._place = Device.find(self.table.device)
        self._device = self._place.torch_device
        try:
            model = load_model(
                self.table.model,
                kind,
                trust_remote_code=self.table.trust_remote_code,
                dtype=getattr(torch, self._settings.dtype),
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError("config.model", f"no {what}: {error}", where=self.table.model) from None
        if kind == "language" and takes_images(self.table.model):
            table, most = self.table, self._settings.max_image_pixels
            self._inputs = ImageInputs(table.model, max_pixels=most, trust_remote_code=table.trust_remote_code)
        self._model = model.to(self._device).requires_grad_(False).eval()
        return model.config

    def _halve(self, forward: Callable[[list[T]], list[R]], rows: list[T]) -> list[R | Problem]:
        """The results of a batch; in halves if it does not fit into memory."""
        try:
            return [*forward(rows)]
        except Exception as error:  # any error of torch is a failure of these samples
            problem = make_problem(error)
            if len(rows) == 1 or problem.reason != "memory":
                return [problem] * len(rows)
        self._place.empty_cache()
        half = len(rows) // 2
        return [*self._halve(forward, rows[:half]), *self._halve(forward, rows[half:])]

    def _states(self, rows: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """States `[R, W, H]` before the head and ids `[R, W]` of rows padded on the right, and the place of each row's
        last token. Raises ValueError if the placeholders of a row are not those of its images."""
        given, last = self._pad([row.ids for row in rows])
        body, ids, seen = self._model.base_model, given["input_ids"], None
        if self._inputs is not None:
            pairs = [(np.asarray(row.ids, np.int32), row.images) for row in rows]
            given["position_ids"], seen = see_rows(self._inputs, pairs, ids.shape[1], self._device)
            given["input_ids"] = seen.mask(ids)
        with stray_placeholders(body, seen):
            return body(**given, **body_arguments(body, seen)).last_hidden_state, ids, last

    def _pad(self, rows: list[list[int]]) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Rows padded on the right as arguments of the model, and the place of each row's last token."""
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self._device)
        ends = torch.tensor([len(row) - 1 for row in rows], device=self._device)
        return {"input_ids": ids, "attention_mask": mask}, (torch.arange(len(rows), device=self._device), ends)


class Classifier(LocalModel):
    def __init__(self, settings: JudgeSettings) -> None:
        super().__init__(settings)
        self._tokenizer: Tokenizer | None = None
        self._most = 0  # tokens
        self._as = "text"

    def _load(self) -> None:
        config = self._load_model("classifier", "sequence classifier")
        labels = int(config.num_labels)
        if labels > 1 and not 0 <= self.table.label < labels:
            raise ConfigError("config.conflict", f"it has {labels} labels: set judge.label", where=self.table.model)
        positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        self._most = min(self.table.max_tokens, positions or self.table.max_tokens)
        self._tokenizer = Tokenizer(self.table.model, trust_remote_code=self.table.trust_remote_code)
        self._as = self.table.input if self.table.input != "auto" else self._choose_input()
        if self._as == "chat" and not self._tokenizer.has_template():
            what = "judge.input = 'chat' and its tokenizer has no chat template"
            raise ConfigError("config.tokenizer", what, where=self.table.model)

    def _choose_input(self) -> str:
        """The form of the input: ids with the policy's tokenizer, else a chat if it has a template."""
        assert self._tokenizer is not None
        own, policy = (Path(folder) / "tokenizer.json" for folder in (self.table.model, self._settings.policy))
        if own.is_file() and policy.is_file() and own.read_bytes() == policy.read_bytes():
            return "ids"
        return "chat" if self._tokenizer.has_template() else "text"

    def version(self) -> str:
        """Digest of the model's files: small ones whole, of weights both ends and the size."""
        return f"{folder_digest(Path(self.table.model))}-{self._as}-{self.table.label}"

    async def score(self, samples: Sequence[RewardSample], done: Report) -> None:
        """Score all samples, in batches of similar length."""
        await score_batches(samples, done, encode=self._ids, forward=self._scores, rows=self.table.concurrency)

    def _ids(self, sample: RewardSample) -> Text:
        assert self._tokenizer is not None
        if self._as == "ids":
            ids = [*sample.prompt_ids, *sample.response_ids]
        elif self._as == "chat":
            prompt, _ = split_prompt(sample.row.get(self._settings.prompt_key))
            question = prompt if isinstance(prompt, list) else [{"role": "user", "content": sample.prompt}]
            answered = [*question, {"role": "assistant", "content": sample.response}]
            ids = self._tokenizer.encode_part(self._tokenizer.render_chat(answered, opened=False))
        else:
            ids = [*self._tokenizer.encode(sample.prompt), *self._tokenizer.encode_answer(sample.response)]
        if not 0 < len(ids) <= self._most:
            raise Problem("too_long", f"{len(ids)} tokens, the judge takes {self._most} (judge.max_tokens)")
        return Text(ids)

    def _scores(self, rows: list[Text]) -> list[Outcome]:
        return self._halve(self._forward, rows)

    @torch.inference_mode()
    def _forward(self, rows: list[Text]) -> list[Outcome]:
        """One forward pass over rows padded on the right. The score is read at each row's last token by hand: a
        model that looks for it by the padding's id would miss one that ends with that id."""
        given, last = self._pad([row.ids for row in rows])
        head = getattr(self._model, "score", None)
        if head is not None:
            logits = head(self._model.base_model(**given).last_hidden_state[last]).float()
        else:  # an encoder with a head over its first token
            logits = self._model(**given).logits.float()
        values = logits.softmax(-1)[:, self.table.label] if logits.shape[-1] > 1 else logits[:, 0]
        return [_verdict(value) for value in values.tolist()]


def _verdict(value: float) -> Outcome:
    try:
        return Verdict(require_finite(value))
    except Problem as problem:
        return problem


def folder_digest(folder: Path) -> str:
    """Digest of a model folder without reading all of its weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name in DIGESTED:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(msgspec.json.encode([file.name, size]))
        with file.open("rb") as stream:
            digest.update(stream.read(HEAD_BYTES))
            stream.seek(max(0, size - HEAD_BYTES))
            digest.update(stream.read(HEAD_BYTES))
    return digest.hexdigest()
