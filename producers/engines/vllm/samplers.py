"""vLLM's samplers with log-probs of the full softmax after temperature, also where top-k, top-p or min-p cut the draw.

vLLM has two: that of its first model runner (CPUs), and that of its second one (every CUDA host). Their own modes are
either before the temperature (raw) or after the cut (processed).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.sampler import Sampler

try:
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler
except ImportError:  # a vLLM without the second runner
    SecondSampler = None


def record_full_softmax(sampler: Any) -> bool:
    """Change a sampler of vLLM so; False for any other one, such as that of a plugin for other hardware."""
    if type(sampler) is Sampler:
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
        sampler.__class__ = FullSoftmax
    elif SecondSampler is not None and type(sampler) is SecondSampler:
        sampler.logprobs_mode = "processed_logprobs"
        sampler.__class__ = SecondFullSoftmax
    return isinstance(sampler, (FullSoftmax, SecondFullSoftmax))


class FullSoftmax(Sampler):  # type: ignore[misc]
    """Of the first runner: raw log-probs, divided by the temperature."""

    _temperature: torch.Tensor | None = None

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> Any:
        self._temperature = sampling_metadata.temperature
        return super().forward(logits, sampling_metadata, *args, **more)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-softmax after temperature, float32, of logits `[B, V]`."""
        logits = logits.to(torch.float32)
        if self._temperature is not None:
            logits = logits / self._temperature.to(torch.float32).unsqueeze(1)
        return logits.log_softmax(dim=-1)


class SecondFullSoftmax(SecondSampler or object):  # type: ignore[misc]
    """Of the second runner: what it takes for the processed logits are those before the cut."""

    def sample(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, *args: Any, return_logprobs: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The drawn tokens, and logits `[B, V]` after temperature; `args[1]` are the requests of the rows."""
        full = logits.to(torch.float32, copy=True) if return_logprobs else None
        sampled, processed = super().sample(logits, expanded_idx_mapping, *args, return_logprobs=return_logprobs)
        if full is None:
            return sampled, processed
        self.sampling_states.apply_temperature(full, expanded_idx_mapping, args[1])
        return sampled, full
