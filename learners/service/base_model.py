"""The frozen model that all clients share, and the adapter that is active in it.

Adapters are LoRA (arXiv 2106.09685, equation 3): `y = W x + (alpha / r) B A x`, A `[r, in]`, B `[out, r]`, float32.
They are added by hooks, so the modules and the weights stay those of the folder. Guarantees:
1. a forward pass has one sequence and one adapter: its bits depend on nothing that another client does;
2. without an active adapter the model computes what its folder computes;
3. adapters compute in the dtype of the model, as an engine that loads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asyncrl.config import Config
from asyncrl.config.model_facts import HEAD_CAP
from asyncrl.errors import ConfigError
from asyncrl.runtime import model_folder
from asyncrl.runtime.device import Device
from learners.backends.base import DTYPES
from learners.backends.fsdp2.loading import language_layers
from learners.models.policy_model import check_head
from learners.service.messages import AdapterForm
from learners.service.protocol import BadRequest

ALPHA = 32.0  # as in https://thinkingmachines.ai/blog/lora/
HEAD_ROWS = 1024  # rows of logits that exist at a time


class Adapter:
    """Pairs (A, B) by the name of their module."""

    def __init__(self, form: AdapterForm, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.form = form
        self.pairs = pairs
        self.scaling = ALPHA / form.rank

    def parameters(self) -> list[Tensor]:
        return [one for pair in self.pairs.values() for one in pair]

    def tensors(self) -> dict[str, Tensor]:
        """Names as in `weightsync.encoding.adapter`, without peft's prefix."""
        halves = ("lora_A", "lora_B")
        return {
            f"{module}.{half}.weight": one
            for module, pair in self.pairs.items()
            for half, one in zip(halves, pair, strict=True)
        }


class BaseModel:
    def __init__(self, config: Config) -> None:
        """Load `model.path`, frozen. Raises `config.model`, `config.trust`."""
        self.device = Device.find().torch_device
        try:
            hf = model_folder.load_model(
                config.model.path,
                "language",
                trust_remote_code=config.model.trust_remote_code,
                dtype=DTYPES[config.model.dtype][1],
                attn_implementation="sdpa",
            )
        except (OSError, ValueError) as error:
            raise ConfigError("config.model", f"{config.model.path}: {error}", where="model.path") from error
        check_head(hf.config)
        self.hf = hf.to(self.device).eval().requires_grad_(False)
        text = hf.config.get_text_config()
        self.vocabulary = int(text.vocab_size)
        self.positions = model_folder.find_positions(model_folder.model_json(config.model.path))
        self._cap: float | None = getattr(text, HEAD_CAP, None)
        self._head: nn.Module = hf.get_output_embeddings()
        self._active: Adapter | None = None
        self.modules = {kind: dict(_find_modules(hf, kind)) for kind in ("attn", "mlp", "unembed")}
        for found in self.modules.values():
            for name, module in found.items():
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            adapter = self._active
            if adapter is None or name not in adapter.pairs:
                return None  # the output as it is
            a, b = (half.to(inputs[0].dtype) for half in adapter.pairs[name])
            return output + functional.linear(functional.linear(inputs[0], a), b) * adapter.scaling

        return add

    @contextmanager
    def activate(self, adapter: Adapter | None) -> Iterator[None]:
        """Compute with this adapter; None: the base alone."""
        self._active = adapter
        try:
            yield
        finally:
            self._active = None

    def make_adapter(self, form: AdapterForm, tensors: dict[str, Tensor] | None = None) -> Adapter:
        """A new adapter: A as torch initializes linear layers, drawn from the seed in the order of names, B = 0. With
        `tensors`, those of `Adapter.tensors`.

        Raises:
            BadRequest: the form has no module, or the tensors do not fit.
        """
        wanted = {"attn": form.train_attn, "mlp": form.train_mlp, "unembed": form.train_unembed}
        found = {name: one for kind, is_on in wanted.items() if is_on for name, one in self.modules[kind].items()}
        if not found or form.rank < 1:
            raise BadRequest(f"rank {form.rank}, {len(found)} modules: an adapter needs a rank and a module")
        generator, pairs = torch.Generator().manual_seed(form.seed or 0), dict[str, tuple[Tensor, Tensor]]()
        for name in sorted(found):
            rows, columns = found[name].weight.shape
            bound = 1 / math.sqrt(columns)  # kaiming_uniform with a = sqrt(5), as peft
            a = torch.empty(form.rank, columns).uniform_(-bound, bound, generator=generator)
            pairs[name] = (a, torch.zeros(rows, form.rank))
        adapter = Adapter(form, pairs)
        if tensors is not None:
            expected = {name: one.shape for name, one in adapter.tensors().items()}
            if expected != {name: one.shape for name, one in tensors.items()}:
                raise BadRequest("the saved weights do not fit this base model")
            for name in pairs:
                pairs[name] = (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
        for name, pair in pairs.items():
            a, b = (one.to(self.device, torch.float32, copy=True).requires_grad_(True) for one in pair)
            pairs[name] = (a, b)
        return adapter

    def check_tokens(self, tokens: Sequence[int], *, more: int = 0) -> None:
        """Raise `BadRequest` unless the model can read these tokens and `more` behind them."""
        if not tokens or min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise BadRequest(f"tokens must be ids below {self.vocabulary}, at least one")
        if self.positions is not None and len(tokens) + more > self.positions:
            raise BadRequest(f"{len(tokens)} + {more} tokens, and the model reads {self.positions}")

    def logprobs(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Log-probs `[n]` or `[n, k]` in float32 of `targets`: `targets[i]` follow `tokens[:i + 1]`; with gradient."""
        hidden = self.hf.base_model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        parts = []
        for start in range(0, len(tokens), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            parts.append(checkpoint(self._head_logprobs, hidden[part], targets[part], use_reentrant=False))
        return torch.cat(parts)

    def _head_logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = self._head(hidden).float()
        if self._cap is not None:
            logits = (logits / self._cap).tanh() * self._cap
        found: Tensor = logits.log_softmax(-1).gather(-1, targets.reshape(len(targets), -1)).reshape(targets.shape)
        return found


def _find_modules(hf: Any, kind: str) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers by their place: attention or the rest of the decoder layers, or the head."""
    inside = {id(module) for layer in language_layers(hf) for module in layer.modules()}
    for name, module in hf.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        place = "unembed" if module is hf.get_output_embeddings() else "attn" if "attn" in name else "mlp"
        if place == kind and (place == "unembed" or id(module) in inside):
            yield name, module
