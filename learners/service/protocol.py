"""Bodies of the Tinker API that are not JSON: passes over data, their outputs, and samples, as protocol buffers.

The messages and their numbers are those of the client `tinker` 0.38; fields that the service does not use are left out
and skipped by the decoder. Tokens are int32, other arrays float32 or int64, as little-endian bytes.
Example: a datum of 3 tokens has 12 bytes of tokens, and `target_tokens` of dtype int64, shape [3] and 24 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

CONTENT_TYPE = "application/x-protobuf"
#: message: fields as `number name type`; `*` repeats, other types are messages. A map is a repeated key and value.
_MESSAGES = """
Sparse: 1 values bytes
Tensor: 1 dense bytes, 2 sparse_csr Sparse, 3 dtype int32, 4 shape int64*
Text: 1 tokens bytes
Other: 1 data bytes
Chunk: 1 encoded_text Text, 2 image Other, 3 dmel Other
Input: 1 key string, 2 value Tensor
Datum: 1 model_input Chunk*, 2 loss_fn_inputs Input*
Value: 1 number double, 2 text string
Setting: 1 key string, 2 value Value
Pass: 1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 6 forward_only bool, 7 config Setting*
Batched: 1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*
Field: 1 key string, 2 value Batched
Record: 2 fields Field*, 3 num_datums int64
Metric: 1 key string, 2 value double
Output: 1 loss_fn_output_type string, 2 loss_fn_outputs Record*, 3 metrics Metric*
Sequence: 1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes
Samples: 1 sequences Sequence*, 2 prompt_logprobs bytes
"""
_DTYPES = {1: "float32", 2: "int64"}
_LENGTH = 1  # number of the stop reason "length"; 0 is "stop"


class BadRequest(Exception):
    """The client's request cannot be served; the text says why."""


class Array(msgspec.Struct, frozen=True):
    """One entry of a datum's `loss_fn_inputs`."""

    dtype: str
    shape: list[int]
    data: bytes

    def values(self) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape).copy()


class Datum(msgspec.Struct, frozen=True):
    tokens: bytes  # int32
    inputs: dict[str, Array]


class Pass(msgspec.Struct, frozen=True):
    """A forward_backward, or with `forward_only` a forward."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    config: dict[str, float]
    forward_only: bool


def read_pass(body: bytes) -> Pass:
    """Decode the body of /api/v1/forward_backward.

    Raises:
        BadRequest: it is damaged, or has images, audio, sparse arrays or texts as settings of the loss.
    """
    try:
        message = _CLASSES["Pass"].FromString(body)
    except DecodeError as error:
        raise BadRequest(f"the body is no forward_backward request: {error}") from None
    config = {}
    for one in message.config:
        if one.value.text:
            raise BadRequest(f"loss_fn_config: {one.key} is a text; the losses of this service take numbers")
        config[one.key] = one.value.number
    data = [_read_datum(one) for one in message.data]
    return Pass(message.model_id, message.seq_id, data, message.loss_fn, config, message.forward_only)


def _read_datum(message: Any) -> Datum:
    if any(chunk.HasField("image") or chunk.HasField("dmel") for chunk in message.model_input):
        raise BadRequest("model_input has images or audio; this service reads tokens alone")
    tokens = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    return Datum(tokens, {one.key: _read_array(one.key, one.value) for one in message.loss_fn_inputs})


def _read_array(name: str, message: Any) -> Array:
    dtype, shape = _DTYPES.get(message.dtype), list(message.shape)
    if message.HasField("sparse_csr") or dtype is None:
        raise BadRequest(f"{name} is sparse, or neither float32 nor int64")
    items = len(message.dense) // np.dtype(dtype).itemsize
    shape = shape or [items]
    if min(shape) < 0 or int(np.prod(shape)) * np.dtype(dtype).itemsize != len(message.dense):
        raise BadRequest(f"{name} has shape {shape} and {len(message.dense)} bytes of {dtype}")
    return Array(dtype, shape, message.dense)


def write_output(fields: Mapping[str, Sequence[npt.NDArray[np.float32]]], metrics: Mapping[str, float]) -> bytes:
    """Encode the answer of a pass. `fields`: name -> an array for each datum; all have the same trailing shape."""
    record = _CLASSES["Record"](num_datums=len(next(iter(fields.values()))))
    for name, arrays in fields.items():
        offsets = np.cumsum([0, *(one.nbytes for one in arrays)], dtype=np.int64).tobytes()
        data = b"".join(one.tobytes() for one in arrays)
        value = _CLASSES["Batched"](data=data, offsets=offsets, dtype=1, trailing_shape=arrays[0].shape[1:])
        record.fields.append(_CLASSES["Field"](key=name, value=value))
    entries = [_CLASSES["Metric"](key=key, value=value) for key, value in metrics.items()]
    output = _CLASSES["Output"](loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=entries)
    return bytes(output.SerializeToString())


def write_samples(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], bool]], prompt_logprobs: Sequence[float] | None
) -> bytes:
    """Encode the answer of a sampling request. A sequence is its tokens, their log-probs, and whether it stopped by
    itself; prompt log-probs that were not asked for are NaN.
    """
    parts = [
        _CLASSES["Sequence"](
            stop_reason=0 if stopped else _LENGTH,
            tokens=np.asarray(tokens, np.int32).tobytes(),
            logprobs=np.asarray(logprobs, np.float32).tobytes(),
        )
        for tokens, logprobs, stopped in sequences
    ]
    prompt = b"" if prompt_logprobs is None else np.asarray(prompt_logprobs, np.float32).tobytes()
    return bytes(_CLASSES["Samples"](sequences=parts, prompt_logprobs=prompt).SerializeToString())


def _build() -> dict[str, Any]:
    """Classes of the messages above, in a pool of their own: the client's package may be in the same process."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="training_service.proto", package="asyncrl", syntax="proto3")
    for line in _MESSAGES.strip().splitlines():
        name, _, fields = line.partition(": ")
        message = file.message_type.add(name=name)
        for number, field, kind in (one.split() for one in fields.split(", ")):
            base = kind.removesuffix("*")
            label = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            entry = message.field.add(name=field, number=int(number), label=label)
            if base[0].isupper():
                entry.type, entry.type_name = kinds.TYPE_MESSAGE, f".asyncrl.{base}"
            else:
                entry.type = kinds.Type.Value(f"TYPE_{base.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found: dict[str, Any] = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.rpartition(".")[2]: one for name, one in found.items()}


_CLASSES = _build()
