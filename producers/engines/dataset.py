"""The engine for `producers.engine = "dataset"`: it generates nothing, rows of the data become groups.

A row is a group: one sample (mode sft: the answer) or two (modes dpo and reward_model: chosen is sample 0 with reward
1, rejected is sample 1 with reward 0). `producers.dataset_worker` sends them. Guarantees:
1. group g is the row that `producers.data.prompts` maps it to, so any number of producers stream one order, epoch by
   epoch, and a group that is leased again is the same row;
2. the runs of a sample name the newest committed version when the row was read: its lag is the number of steps until
   its training. The digest is that of the data files: one run trains one data set;
3. a row without its columns, without tokens or longer than `data.max_prompt_tokens` and `sampling.max_new_tokens` is
   dropped with its reason (dead letters) and replaced by another; nothing is cut;
4. answers end with the tokenizer's end of sequence; their log-probs are zeros, because there is no policy.
The last message of a conversation is the answer; earlier turns of the assistant are part of the prompt and not trained.

Example: {"prompt": "12+07=", "chosen": "19", "rejected": "18"} is a group of 2 samples of 3 tokens each.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.config import Config
from asyncrl.config.mode import DATA_PREFIX, answer_keys, is_paired
from asyncrl.engine import EngineCapabilities, EngineHealth, GenDelta, GenRequest, PauseMode
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.runtime.data_files import data_files
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.wire import Buffer, Manifest, Tensor
from producers.data.prompts import BadPrompt, Row, encode_prompt
from producers.data.tokenizer import Tokenizer

DIGEST_BYTES = 16
Tokens = npt.NDArray[np.int32]


class DatasetEngine:
    """No model, no weights; its version is the newest that the buffer reported."""

    def __init__(self, config: Config) -> None:
        self.version = 0
        self.digest = ""
        self._config = config

    async def start(self) -> None:
        """Digest the data files."""
        self.digest = await asyncio.to_thread(data_digest, self._config)

    async def close(self, *, grace_s: float) -> None: ...

    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities("dataset", max_samples=self._config.producers.slots, max_tokens=0, kv=())

    async def pause(self, mode: PauseMode = "keep") -> None: ...

    async def resume(self) -> None: ...

    def health(self) -> EngineHealth:
        return EngineHealth(True, self.version, 0, 0)

    def fingerprint(self) -> str:
        return model_fingerprint(self._config.model.path, dtype=self._config.model.dtype)

    def generate(self, request: GenRequest) -> AsyncIterator[GenDelta]:
        raise AsyncRLError("internal", "the dataset engine generates nothing")

    async def abort(self, ids: Sequence[str] | None) -> int:
        return 0

    async def begin_update(self, manifest: Manifest, tensors: Sequence[Tensor]) -> None:
        raise AsyncRLError("internal", "the dataset engine takes no weights")

    async def apply_bucket(self, number: int, data: Buffer) -> str:
        return ""

    async def read_bucket(self, number: int, into: memoryview) -> bool:
        return False

    async def commit_update(self) -> str:
        return ""

    async def abort_update(self) -> None: ...


class NoWeights:
    """Null receiver for dataset runs."""

    waiting_for = ""
    version = 0

    async def wait_version(self, at_least: int, timeout_s: float) -> int:
        return at_least

    async def wait_newer(self, version: int, timeout_s: float) -> bool:
        await asyncio.sleep(timeout_s)
        return False

    async def run(self, stop: asyncio.Event) -> None:
        await stop.wait()  # bounded: the life of the role


def encode_row(
    row: Row,
    config: Config,
    tokenizer: Tokenizer,
    *,
    inputs: ImageInputs | None = None,
    images: Sequence[bytes] = (),
) -> tuple[Tokens, list[Tokens]]:
    """Token ids of the prompt, i4 `[P]`, and of each answer with its end of sequence, i4 `[T]`. `inputs` and `images`:
    see `producers.data.prompts.encode_prompt`.

    Raises:
        BadPrompt: the row cannot be trained on; its reason.
        ConfigError: the whole data set cannot be encoded.
    """
    data, limit = config.data, config.sampling.max_new_tokens
    prompt = row.get(data.prompt_key)
    texts: list[str] = []
    for key in answer_keys(config):
        if key in row:
            texts.append(answer_text(key, row[key], prompt))
        elif is_paired(config) or not isinstance(prompt, list) or len(prompt) < 2:
            raise BadPrompt(f"answer: no column {key!r}")
        else:
            texts.append(answer_text(data.prompt_key, prompt, prompt[:-1]))
            row = {**row, data.prompt_key: prompt[:-1]}
    prompt_ids = encode_prompt(row, data, tokenizer, inputs=inputs, images=images)
    answers = [np.asarray(tokenizer.encode_answer(text), dtype=np.int32) for text in texts]
    longest = max(answer.size for answer in answers)
    if longest > limit:
        raise BadPrompt(f"too_long: an answer of {longest} tokens, sampling.max_new_tokens = {limit}")
    return prompt_ids, answers


def answer_text(key: str, value: Any, prompt: Any) -> str:
    """The text of an answer: unchanged, or the last message of a conversation that continues the prompt."""
    if isinstance(value, list) and value and value[:-1] in ([], prompt):
        value = value[-1]
    if isinstance(value, Mapping) and value.get("role") == "assistant":
        value = value.get("content")
    if isinstance(value, str):
        return value
    raise BadPrompt(f"answer: column {key!r} is neither text nor a message of the assistant behind the prompt")


def data_digest(config: Config) -> str:
    """Digest of the data: the content of its files in their order, or the name of a source."""
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    whole.update(config.data.source.encode())
    for path in data_files(config.data.path):
        try:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise ConfigError("config.data", str(error), where=str(path)) from None
    return DATA_PREFIX + whole.hexdigest()
