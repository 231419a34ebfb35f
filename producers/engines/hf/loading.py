"""Loads a model for the hf engine, finds a decoder for it, and refuses unsupported models early.

Guarantees:
1. files come only from `model.path`, never from the network;
2. slots are tried first, then transformers' own caches (`cohort_cache`); either must pass the self-check, which
   compares log-probs with the model's plain forward;
3. every refusal is a `config.model` (or `config.conflict` for memory) with the reason: not a decoder of token ids, too
   few positions, or why both decoders failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.config import Config
from asyncrl.config.capabilities import refuse
from asyncrl.config.model_facts import ATTENTION_CAP, find_cap
from asyncrl.errors import ConfigError
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.runtime.host_facts import free_host_bytes
from asyncrl.runtime.model_folder import POSITIONS_REMEDY, load_config, model_json, positions_problem
from asyncrl.runtime.model_folder import load_model as read_model
from asyncrl.runtime.routers import Routers
from producers.engines.hf import attention
from producers.engines.hf.cache_interface import UNFIT, Memory
from producers.engines.hf.cohort_cache import CohortMemory
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.kv_cache import KVStore
from producers.engines.hf.prefix_cache import PrefixCache
from producers.engines.hf.self_check import check_decoder
from producers.engines.hf.slot_cache import PART_TOKENS, SlotMemory
from producers.engines.hf.slots import SlotTable
from producers.engines.model_files import weights_dtype

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRIED = ("slots", "caches")  # decoders, in this order
ANOTHER = "use another engine (producers.engine) for this model"


class Built(NamedTuple):
    """The decoder of a model. `kind`: slots or caches; `why`: the errors of those tried before."""

    decoder: Decoder
    kind: str
    why: str


def load_model(config: Config, *, device: torch.device, max_len: int) -> torch.nn.Module:
    """The model of `model.path`, in evaluation mode, on the device."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the output goes to a log file
    folder = Path(config.model.path)
    if not (folder / "config.json").exists():
        raise ConfigError("config.model", "no config.json in the folder", where=str(folder))
    refuse(config, model_json(folder), role="producer")
    name = weights_dtype(config)
    options: dict[str, Any] = {"trust_remote_code": config.model.trust_remote_code}
    try:
        refuse_unfit(load_config(folder, **options), max_len=max_len, where=str(folder))
        options |= {"dtype": TORCH_DTYPES[name]}
        wanted = "sdpa" if find_cap(model_json(folder), ATTENTION_CAP) is None else "eager"  # sdpa has no cap
        try:
            model = read_model(folder, "language", attn_implementation=wanted, **options)
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            model = read_model(folder, "language", attn_implementation="eager", **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError("config.model", f"{type(error).__name__}: {error}", where=str(folder)) from error
    ready: torch.nn.Module = model.requires_grad_(False)
    ready = ready.to(device).train(False)
    settle_attention(ready, device=device, where=str(folder))
    return ready


def refuse_unfit(shape: Any, *, max_len: int, where: str) -> None:
    """Raise `config.model` for a model with too few positions."""
    if problem := positions_problem(shape.to_dict(), max_len):
        raise ConfigError("config.model", f"{shape.model_type}: {problem}", where=where, remedy=POSITIONS_REMEDY)


@torch.inference_mode()
def settle_attention(model: Any, *, device: torch.device, where: str) -> None:
    """Replace "sdpa" if the model's plain forward fails with it (for example capped scores); refuse a model that also
    fails without it."""
    two = torch.zeros((1, 2), dtype=torch.int64, device=device)
    try:
        model(input_ids=two, use_cache=False)
        return
    except torch.OutOfMemoryError:
        raise
    except UNFIT as error:
        first = error
    try:
        model.set_attn_implementation("eager")
        model(input_ids=two, use_cache=False)
    except UNFIT as error:
        what = f"its plain forward fails: {type(first).__name__}: {first}"
        raise ConfigError("config.model", what, where=where, remedy=ANOTHER) from error


def build_decoder(
    model: torch.nn.Module,
    *,
    slots: int,
    max_prompt: int,
    max_new: int,
    recompute: bool,
    where: str,
    held_out: int = 0,
    extra_bytes: int = 0,
    tried: Sequence[str] = TRIED,
    images: ImageInputs | None = None,
    routers: Routers | None = None,
    ended: int = 0,
    drafts: int = 0,
) -> Built:
    """The first decoder that passes the self-check; slots alone with `images`, or with `routers` to record. Memory must
    have room for K/V of `held_out` more samples (a second decoder's), of `ended` samples that are kept for prompts that
    begin like them (slots without routers alone), and for `extra_bytes` of further copies of the weights. `drafts`: the
    most draft tokens per sample and step.

    Raises:
        ConfigError: `config.model` if none passes, `config.conflict` if the memory is too small, or the decoder that
            passes takes no drafts.
    """
    device = next(model.parameters()).device
    max_len = max_prompt + max_new
    why: list[str] = []
    for kind in tried if images is None and routers is None else [kind for kind in tried if kind == "slots"]:
        make: Any = (
            _cache_memory if kind == "caches" else partial(_slot_memory, images=images, whole=routers is not None)
        )
        try:
            memory, need = make(model, slots=slots, max_len=max_len, device=device, where=where)
            prefixes = None
            if ended and routers is None and isinstance(memory, SlotMemory):
                prefixes = PrefixCache(memory, most_tokens=ended * max_len)
            kept = ended if prefixes is not None else 0
            need = need // slots * (slots + held_out + kept)
            check_memory(
                need,
                slots=slots,
                held_out=held_out,
                ended=kept,
                max_len=max_len,
                device=device,
                extra_bytes=extra_bytes,
            )
            table = SlotTable(slots, max_new_tokens=max_new, device=device)
            decoder = Decoder(memory, table, recompute=recompute, routers=routers, prefixes=prefixes)
            check = partial(check_decoder, decoder, model, max_prompt=max_prompt, max_new=max_new, where=where)
            check(images=images, drafts=drafts)
            return Built(decoder, kind, "; ".join(why))
        except ConfigError as error:
            if error.code != "config.model":
                raise
            why.append(f"{kind}: {error.message}")
    raise ConfigError("config.model", "; ".join(why), where=where, remedy=ANOTHER)


def _slot_memory(
    model: torch.nn.Module,
    *,
    slots: int,
    max_len: int,
    device: torch.device,
    where: str,
    images: ImageInputs | None,
    whole: bool,
) -> tuple[Memory, int]:
    """The memory and its maximum size in bytes. `whole`: a prefill is one forward, which records experts."""
    part = max_len if whole else PART_TOKENS
    memory = SlotMemory(
        model, slots=slots, max_len=max_len, device=device, where=where, images=images, part_tokens=part
    )
    attention.install(model)
    return memory, KVStore.nbytes(memory.like, slots=slots, max_len=max_len)


def _cache_memory(
    model: torch.nn.Module, *, slots: int, max_len: int, device: torch.device, where: str
) -> tuple[Memory, int]:
    """The memory and its maximum size in bytes."""
    attention.remove(model)
    memory = CohortMemory(model, max_len=max_len, device=device, where=where)
    return memory, memory.nbytes(slots=slots, where=where)


def check_memory(
    need: int,
    *,
    slots: int,
    held_out: int = 0,
    ended: int = 0,
    max_len: int,
    device: torch.device,
    extra_bytes: int = 0,
) -> None:
    """Raise `config.conflict` with the arithmetic if `need` bytes of K/V for all slots, `held_out` more samples and
    `ended` ones, and `extra_bytes`, do not fit."""
    free = free_bytes(device)
    if need + extra_bytes > 0.9 * free:
        more = f" + {ended} ended" if ended else ""
        copies, instead = "a second copy", "weightsync.in_place = true (generation stands still meanwhile)"
        if held_out:
            copies, instead = "two more copies", "evaluation.lane = 'before_swap'"
            more += f" + {held_out} held out"
        copies = f", {copies} of the weights {extra_bytes / 2**30:.1f} GiB" if extra_bytes else ""
        token = need / (slots + held_out + ended) / max_len
        raise ConfigError(
            "config.conflict",
            f"K/V of producers.slots = {slots}{more} x {max_len} tokens x {token:.0f} "
            f"bytes needs {need / 2**30:.1f} GiB{copies}; {free / 2**30:.1f} GiB are free on {device}",
            remedy=f"lower producers.slots, sampling.max_new_tokens or data.max_prompt_tokens, or set {instead}",
        )


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, or of the host for a CPU."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return free_host_bytes()
