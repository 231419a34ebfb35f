"""Stands in for CUDA where Megatron-core asks for it and there is none, so that its learner runs on a CPU.

Entered by `megatron` around every call into Megatron-core, in the learner's process alone, on devices without CUDA.
Megatron-core takes a CUDA device for granted in many places that a forward, a backward and an update pass through.
Guarantees:
1. outside of `cuda_stand_ins` the process is as it was: every name is put back, also after an error;
2. on a device of type cuda nothing is replaced;
3. what is replaced is listed in `STAND_INS` and in `_OnHost`, and does nothing that a CPU has no need of: devices named
   "cuda" mean the host, streams and synchronisation are empty, generators are those of the host, and float tensors of
   the host say the type names of CUDA that Megatron-core asserts.
Import transformers before it is entered: its modules look at `torch.cuda` types while they are imported.

Example: `torch.zeros(3, device="cuda")` inside it is a tensor on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asyncrl.runtime.device import Device

_TYPES = {"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"}


class _Stream:
    """A stream of a device that finishes everything at once. A class, since annotations name it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""


def _host(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _generator_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_generator_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


#: What is put in the place of attributes of `torch.cuda`.
STAND_INS: dict[str, Any] = {
    "current_device": _host,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "manual_seed": _seed,
    "get_rng_state": _generator_state,
    "set_rng_state": _set_generator_state,
    "Stream": _Stream,
    "current_stream": _Stream,
    "default_stream": _Stream,
}


class _OnHost(TorchFunctionMode):
    """Reads devices named "cuda" as the host, and lets tensors there answer with the type names of CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not given:
            said = func(*args)
            return said.replace("torch.", "torch.cuda.") if said in _TYPES else said
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(given.get("device")):
            given["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_cuda(value) else value for value in args)
        return func(*args, **given)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


def _tracker_state(*_: Any, **__: Any) -> torch.Tensor:
    """Megatron-core's own way to the generator of the device."""
    return torch.get_rng_state()


@contextmanager
def cuda_stand_ins(device: Device) -> Iterator[None]:
    """Megatron-core may be called inside. May be entered again inside itself."""
    if device.type == "cuda":
        yield
        return
    from megatron.core.tensor_parallel import random

    places = [(torch.cuda, name, value) for name, value in STAND_INS.items()]
    places += [
        (random, "_get_cuda_rng_state", _tracker_state),
        (random, "_set_cuda_rng_state", _set_generator_state),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        with _OnHost():
            yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
