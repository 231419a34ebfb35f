"""One sample at an SGLang server: its tokens, their versions, and the next request. It does not talk to the server.

Guarantees:
1. a delta holds tokens with certain versions: those of a turn while no weights have changed since it was sent, else
   those in the server's last event. So after a swap no delta comes before the end of the sample;
2. a sample may take several turns: after an abort by the server, or a stop at a token that is not a stop token of the
   request (the end token of the server's tokenizer). The next turn requests the rest.

Example: prompt `[5, 6]`, 10 tokens requested, stop tokens `{3}`. The server stops after `[7, 2]` because 2 is its end
token; the second turn requests 8 tokens after `[5, 6, 7, 2]`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from asyncrl.engine import GenRequest
from asyncrl.images.model_inputs import ImageInputs
from producers.engines import served
from producers.engines.served_images import collapse, image_url

EVENTS = 16  # of a sample without deltas: a stream repeats all tokens in every event
LEAST_INTERVAL = 8  # tokens between two of them


class Sample(served.Sample):
    """One index of one request. `name` begins with the request's id and a slash, because servers abort by prefix, and
    ends with a semicolon, so that no name is a prefix of another."""

    def __init__(self, request: GenRequest, index: int, outbox: served.Outbox) -> None:
        super().__init__(request, index, outbox)
        self.turns = 0
        self.aborts = 0  # by the server

    @property
    def name(self) -> str:
        """Id of the turn under way."""
        return f"{self.request.id}/{self.index}/{self.turns};"

    @property
    def remaining(self) -> int:
        """Tokens still to come at most."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def ids(self) -> list[int]:
        """The prompt of the next turn."""
        return [*self.request.prompt_ids.tolist(), *self.tokens]

    def ask(self, *, salt: str, inputs: ImageInputs | None = None) -> dict[str, Any]:
        """The body of the next turn. All sampling settings are set: others would come from the server's defaults.
        `inputs`: of a vision-language model. Raises `sample.invalid` if a sampled token is a placeholder of images."""
        self.turns += 1
        request, ids, more = self.request, self.ids, {}
        if request.images and inputs is not None:
            ids = collapse(inputs, request, self.tokens, where=self.name)
            more = {"image_data": [image_url(image) for image in request.images], "return_prompt_token_ids": True}
        every = request.delta_tokens or max(LEAST_INTERVAL, self.remaining // EVENTS)
        return {
            **more,
            "rid": self.name,
            "input_ids": ids,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": salt,
            "cache_salt": salt,
            "sampling_params": {
                "max_new_tokens": self.remaining,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or -1,
                "min_p": request.min_p,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "min_new_tokens": 0,
                "stop_token_ids": list(request.stop_ids),
                "ignore_eos": not request.stop_ids,
                "skip_special_tokens": False,
                "stream_interval": every,
                "sampling_seed": sample_seed(request.seed, self.index),
            },
        }

    def is_stopped(self) -> bool:
        """Whether its last token ends it."""
        return bool(self.tokens) and self.tokens[-1] in self.request.stop_ids


def sample_seed(seed: int, index: int) -> int:
    """The server's seed of a sample, 63 bits."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
