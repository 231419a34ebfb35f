"""Stands in for CUDA in Megatron-core on machines without it, so that its learner runs on a CPU.

Megatron-core assumes a CUDA device in many places; the backend wraps every call into it. Guarantees:
1. outside `cuda_stand_ins` the process is unchanged, also after an error;
2. on a device of type cuda nothing is replaced;
3. only `STAND_INS` and `_OnHost` replace something: devices named "cuda" mean the host, streams and synchronisation are
   empty, generators are those of the host, and float tensors report the type names of CUDA that Megatron-core asserts.

Import transformers first: its modules read `torch.cuda` types at import.
Example: `torch.zeros(3, device="cuda")` inside it is a tensor on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from asyncrl.runtime.device import Device

_TYPES = {"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"}


class _Stream:
    """A stream that finishes everything at once. A class, because annotations name it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...


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


#: Replacements for attributes of `torch.cuda`.
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
    "stream": nullcontext,
}


class _OnHost(TorchFunctionMode):
    """Maps devices named "cuda" to the host, and lets tensors there report the type names of CUDA."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.type and len(args) == 1 and not given:
            name = func(*args)
            return name.replace("torch.", "torch.cuda.") if name in _TYPES else name
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
    """Megatron-core's own access to the generator of the device."""
    return torch.get_rng_state()


def _counts(value: Any, *, as_numpy: bool = False, **_: Any) -> Any:
    """Megatron-core's own copy of token counts to the host, which leaves tensors there as they are."""
    return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value


@contextmanager
def cuda_stand_ins(device: Device) -> Iterator[None]:
    """Allow calls into Megatron-core in this block. Reentrant."""
    if device.type == "cuda":
        yield
        return
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    places = [(torch.cuda, name, value) for name, value in STAND_INS.items()]
    places += [
        (random, "_get_cuda_rng_state", _tracker_state),
        (random, "_set_cuda_rng_state", _set_generator_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _counts),
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
