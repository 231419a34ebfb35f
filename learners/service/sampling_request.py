"""Body of a sampling request of the Tinker API."""

from __future__ import annotations

from typing import Any

import msgspec

from learners.service.protocol import BadRequest

MOST_SAMPLES = 1024


class SamplingParams(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Chunk(msgspec.Struct, frozen=True):
    type: str
    tokens: list[int] = []


class Prompt(msgspec.Struct, frozen=True):
    chunks: list[Chunk]


class SampleRequest(msgspec.Struct, frozen=True):
    """Body of /api/v1/asample. Fields after `prompt_logprobs_last_n` are refused unless they are off."""

    prompt: Prompt
    sampling_params: SamplingParams
    sampling_session_id: str
    seq_id: int
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    target_prompt_logprobs: Any = None
    record_stability_info: bool | None = None

    def tokens(self) -> list[int]:
        """The prompt. Raises `BadRequest` for what the service cannot read or give."""
        for name in self.__struct_fields__[-5:]:
            if getattr(self, name):
                raise BadRequest(f"{name} is not served")
        if any(chunk.type != "encoded_text" for chunk in self.prompt.chunks):
            raise BadRequest("the prompt has images or audio; this service reads tokens alone")
        if not 1 <= self.num_samples <= MOST_SAMPLES:
            raise BadRequest(f"num_samples = {self.num_samples}: 1 to {MOST_SAMPLES} are served")
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]
