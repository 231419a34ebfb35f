"""The frames between a reward worker and its child: JSON with a length prefix, on two pipes. No pickle.

JSON and not msgpack, because rows may hold integers beyond 64 bits. Guarantees: a frame is read whole or not at all; a
frame that does not decode raises one of `asyncrl.errors.UNREADABLE`. The parent gives the child untrusted rows as plain
JSON values.
"""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any, Union

import msgspec

from producers.rewards.outcome import JudgeSettings
from producers.rewards.sample import RewardSample
from producers.sandbox import SandboxLimits

LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 1 << 30
WHOLE_BATCH = -1


class FunctionSpec(msgspec.Struct, frozen=True):
    """One `[[reward]]`: its name, label, weight, its data sources (none: all) and its arguments."""

    function: str
    label: str
    weight: float = 1.0
    data_sources: tuple[str, ...] = ()
    args: dict[str, Any] = {}


class SandboxSpec(msgspec.Struct, frozen=True):
    """Where the functions' programs run: a kind of `producers.sandbox.open_sandbox`, and its limits."""

    kind: str = "bubblewrap"
    limits: SandboxLimits = SandboxLimits()


class Setup(msgspec.Struct, frozen=True, tag=1):
    """First frame to the child."""

    functions: tuple[FunctionSpec, ...]
    prompt_key: str
    timeout_s: float
    memory_bytes: int = 0  # 0: no limit
    judge: JudgeSettings | None = (
        None  # a model instead of the functions, which then have only label, weight and sources
    )
    sandbox: SandboxSpec = SandboxSpec()


class Ready(msgspec.Struct, frozen=True, tag=2):
    """First frame from the child: a problem, or the version (digest of the functions' files)."""

    problem: str
    version: str


class Job(msgspec.Struct, frozen=True, tag=3):
    samples: tuple[RewardSample, ...]
    images: dict[str, bytes] = {}  # digest -> encoded image, of the samples


class Begin(msgspec.Struct, frozen=True, tag=4):
    """A call starts now, for one sample of the job or `WHOLE_BATCH`; its timeout begins."""

    place: int
    label: str


class Result(msgspec.Struct, frozen=True, tag=5):
    """One sample of the job is done: its reward and parts, or a failure `reason` with `detail`."""

    place: int
    reward: float = 0.0
    parts: dict[str, float] = {}
    reason: str = ""
    detail: str = ""
    answer: str = ""  # found by a function in the response
    arrays: dict[str, bytes] = {}  # of a teacher: fields of `wire.TeacherLogprobs`


Frame = Union[Setup, Ready, Job, Begin, Result]
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Frame] = msgspec.json.Decoder(Frame)


class Silence(Exception):
    """Nothing arrived in time."""


class Closed(Exception):
    """The other end is gone."""


class Pipe:
    """One end: reads frames from `source`, writes them to `sink` (file descriptors)."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._held = bytearray()
        os.set_blocking(sink, False)  # so that a stopped reader cannot block the writer forever

    def send(self, frame: Frame, timeout_s: float = 60.0) -> None:
        """Write a frame; waits while the pipe is full. Raises Closed, or Silence without a reader for `timeout_s`."""
        data = _encoder.encode(frame)
        view = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while view:
                if not select.select([], [self._sink], [], timeout_s)[1]:
                    raise Silence
                view = view[os.write(self._sink, view) :]
        except OSError as error:
            raise Closed(str(error)) from None

    def receive(self, timeout_s: float | None) -> Any:
        """The next frame. Raises Silence after `timeout_s` (None: waits), Closed at the end of the pipe."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self._take()) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._source], [], [], left)[0]:
                raise Silence
            data = os.read(self._source, 1 << 16)
            if not data:
                raise Closed("end of the pipe")
            self._held += data
        return frame

    def _take(self) -> Frame | None:
        if len(self._held) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._held)
        if size > MAX_FRAME_BYTES:
            raise Closed(f"a frame of {size} bytes")
        end = LENGTH.size + size
        if len(self._held) < end:
            return None
        frame = _decoder.decode(self._held[LENGTH.size : end])
        del self._held[:end]
        return frame

    def close(self) -> None:
        os.close(self._source)
        os.close(self._sink)
