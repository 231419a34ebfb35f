"""Loads a model for the slot sampler, and says early why a model cannot be used.

Called by the hf engine at its start. Guarantees:
1. files come from `model.path` alone, never from the network;
2. every refusal is a `config.model` (or `config.conflict` for memory) that names the reason: sliding windows, recurrent
   or hybrid layers, another cache layout, no masked attention, or log-probs that disagree with a plain forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from producers.engines.kv import CaptureCache, KVStore

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: Config, *, device: torch.device, max_len: int) -> torch.nn.Module:
    """The model of `model.path`, in evaluation mode, on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the output goes to a log file
    folder = Path(config.model.path)
    if not (folder / "config.json").exists():
        raise ConfigError("config.model", "no config.json in the folder", where=str(folder))
    name = config.producers.dtype if config.producers.dtype != "auto" else config.model.dtype
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": config.model.trust_remote_code}
    try:
        refuse_unfit(AutoConfig.from_pretrained(folder, **options), max_len=max_len, where=str(folder))
        # A boolean mask per row is the contract: sdpa takes it, eager and flash attention do not.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=TORCH_DTYPES[name], attn_implementation="sdpa", **options
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("config.model", f"{type(error).__name__}: {error}", where=str(folder)) from error
    ready: torch.nn.Module = model.requires_grad_(False)
    return ready.to(device).train(False)


def refuse_unfit(shape: Any, *, max_len: int, where: str) -> None:
    """Raise `config.model` for a configuration whose layers keep more, or less, than K and V of every token."""
    text = shape.get_text_config() if hasattr(shape, "get_text_config") else shape

    def refuse(why: str) -> ConfigError:
        return ConfigError(
            "config.model", f"{text.model_type}: {why}; the hf engine keeps K and V of all tokens of every layer",
            where=where, remedy="use another engine (producers.engine) for this model",
        )  # fmt: skip

    window = getattr(text, "sliding_window", None)
    windowed = window is not None and getattr(text, "use_sliding_window", True) and window < max_len
    others = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    if [kind for kind in others if kind != "sliding_attention"]:
        raise refuse(f"layers of type {', '.join(others)}")
    if windowed:
        raise refuse(f"sliding window of {window} tokens, shorter than prompt + response = {max_len}")
    if getattr(text, "is_encoder_decoder", False):
        raise refuse("an encoder-decoder")
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    stretched = rope.get("rope_type", "default") != "default"  # yarn and others reach beyond the stated limit
    if limit is not None and limit < max_len and not stretched:
        raise refuse(f"max_position_embeddings = {limit}, below prompt + response = {max_len}")


@torch.inference_mode()
def probe(model: torch.nn.Module, *, device: torch.device, where: str) -> tuple[Tensor, Tensor]:
    """K and V of one token, `[layers, 1, kv_heads, 1, head_dim]`: what sizes the store."""
    cache = CaptureCache()
    one = torch.zeros((1, 1), dtype=torch.int64, device=device)
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    try:
        model(input_ids=one, position_ids=one, attention_mask=mask, past_key_values=cache, use_cache=True)
        return cache.stacked()
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(
            "config.model", f"its layers do not store plain keys and values: {type(error).__name__}: {error}",
            where=where, remedy="use another engine (producers.engine) for this model",
        ) from error  # fmt: skip


def check_memory(keys: Tensor, values: Tensor, *, slots: int, max_len: int, beside: int = 0) -> None:
    """Raise `config.conflict` with the arithmetic where the K/V store would not fit, with `beside` bytes for a second
    copy of the weights."""
    store = KVStore.nbytes(keys, values, slots=slots, max_len=max_len)
    free = free_bytes(keys.device)
    if store + beside > 0.9 * free:
        layers, _, heads, _, width = keys.shape
        copy = f", a second copy of the weights {beside / 2**30:.1f} GiB" if beside else ""
        raise ConfigError(
            "config.conflict",
            f"K/V of producers.slots = {slots} x {max_len} tokens x {layers} layers x {heads} heads x "
            f"{width} needs {store / 2**30:.1f} GiB{copy}; {free / 2**30:.1f} GiB are free on {keys.device}",
            remedy="lower producers.slots, sampling.max_new_tokens or data.max_prompt_tokens, or set "
            "weightsync.in_place = true (generation stands still during a transfer)",
        )


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, or of the host for a CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62  # unknown: let the allocation decide
