"""The losses of the Tinker API: sums over the tokens of a datum, of log-probs p and what the sampler noted, q.

With ratio r = exp(p - q), weights w and advantages A (https://tinker-docs.thinkingmachines.ai/losses):
cross_entropy -w p; importance_sampling -r A; ppo -min(r A, clip(r) A) (arXiv 1707.06347, equation 7);
cispo -sg(clip(r)) A p (arXiv 2506.13585, equation 4); dro -(p A - beta/2 (p - q)^2) (arXiv 2405.19107, equation 6).
Thresholds bound the ratio itself. Example: ppo with r = 1.5, A = 2 and thresholds 0.8, 1.2: -2.4, without gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from learners.service.protocol import BadRequest

#: Loss: settings with their defaults.
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}


def loss_settings(name: str, config: Mapping[str, float]) -> dict[str, float]:
    """The settings of a loss with their defaults. Raises `BadRequest` for an unknown loss or setting."""
    if name not in SETTINGS:
        raise BadRequest(f"loss_fn {name!r} is not served; there are {', '.join(SETTINGS)}")
    if unknown := sorted(set(config) - set(SETTINGS[name])):
        raise BadRequest(f"loss_fn_config of {name}: unknown {unknown[0]!r}")
    return {**SETTINGS[name], **config}


def needed_inputs(name: str) -> tuple[str, ...]:
    """Entries of `loss_fn_inputs` next to target_tokens. Without `weights` every token of cross_entropy weighs 1."""
    return () if name == "cross_entropy" else ("logprobs", "advantages")


def token_losses(name: str, logprobs: Tensor, inputs: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    """The loss of each token, of the shape of `logprobs`; the loss of a datum is their sum."""
    if name == "cross_entropy":
        weights = inputs.get("weights")
        return -logprobs if weights is None else -logprobs * weights
    difference, advantages = logprobs - inputs["logprobs"], inputs["advantages"]
    if name == "dro":
        return -(logprobs * advantages - 0.5 * settings["beta"] * difference.square())
    ratio = difference.exp()
    if name == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    if name == "cispo":
        return -clipped.detach() * advantages * logprobs
    return -torch.minimum(ratio * advantages, clipped * advantages)
