"""Hostile frames for the decoder and for the services: damaged ones, and whole ones whose values nobody would send.

`python tests/security/fuzzing.py --frames 500000` (`make fuzz`) is the long form and writes
benchmarks/results/fuzz.txt; the tests run a short one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zmq

from asyncrl import wire
from asyncrl.config import dump, parse
from asyncrl.errors import WireError
from asyncrl.net.keys import read_keys, write_keys
from asyncrl.net.requester import Requester
from asyncrl.net.responder import Call
from asyncrl.runtime.run_dir import RunDir, endpoint

GROWTH_BYTES = 40 << 20  # of a service, after a fifth of the frames
ROOT = Path(__file__).resolve().parents[2]
NUMBERS = (
    -1,
    -2,
    -(2**31),
    -(2**63),
    0,
    1,
    7,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e308, -1e308, 5e-324, 0.5)
TEXTS = (
    "",
    "\0",
    "x" * 3000,
    "../../../etc/passwd",
    "\u202e\u00fc\U0001f600",
    "{",
    "[" * 3000,
    '{"a":',
    "null",
    "[]",
    "{}",
    '{"max_staleness":-1}',
    "producer-0",
    "learner",
    "full",
    "1e999",
    "NaN",
    '{"data_source":1}',
)
BYTES = (b"", b"\xff", b"\x93\x01", b"x" * 5000)


def examples() -> list[wire.Message]:
    """One of each message, from the test of the wire."""
    spec = importlib.util.spec_from_file_location("wire_examples", ROOT / "tests" / "unit" / "test_wire.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[wire.Message] = module.EXAMPLES
    return found


# ---------------------------------------------------------------- whole messages with hostile values


def hostile(value: Any, hint: Any, dice: random.Random, *, rate: float = 0.3) -> Any:
    """A value of the type of `hint` near `value`: some of its parts are what nobody would send."""
    if isinstance(value, msgspec.Struct):
        return hostile_message(value, dice, rate=rate)  # type: ignore[arg-type]
    kinds = [kind for kind in typing.get_args(hint) or () if kind is not type(None)]
    if isinstance(value, tuple):
        inner = kinds[0] if kinds else type(value[0]) if value else int
        fixed = bool(kinds) and kinds[-1] is not Ellipsis
        items = [hostile(item, kinds[at] if fixed else inner, dice, rate=rate) for at, item in enumerate(value)]
        if fixed or dice.random() > rate:
            return tuple(items)
        return tuple(dice.choice(((), items * 2, items * 40 if len(items) < 9 else items, items[::-1])))
    if isinstance(value, dict):
        key_hint, item_hint = (*kinds, str, float)[:2]
        pairs = {
            hostile(key, key_hint, dice, rate=rate): hostile(item, item_hint, dice, rate=rate)
            for key, item in value.items()
        }
        return {} if dice.random() < rate / 2 else pairs
    if dice.random() > rate:
        return value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return dice.choice((*NUMBERS, value + 1, value - 1))
    if isinstance(value, float):
        return dice.choice(FLOATS)
    if isinstance(value, str):
        return dice.choice((*TEXTS, value + "x"))
    return dice.choice(BYTES) if isinstance(value, bytes) else value


def hostile_message(message: wire.Message, dice: random.Random, *, rate: float = 0.3) -> wire.Message:
    """The message with some fields replaced; at least one where it has any."""
    hints = typing.get_type_hints(type(message))
    names = message.__struct_fields__
    certain = dice.choice(names) if names else ""
    changes = {
        name: hostile(getattr(message, name), hints[name], dice, rate=1.0 if name == certain else rate)
        for name in names
    }
    return msgspec.structs.replace(message, **changes)


def frames_of(message: wire.Message, payloads: Sequence[bytes], *, request: int, kind: int) -> list[bytes] | None:
    """The frames, or None where msgpack cannot hold it."""
    try:
        return [bytes(frame) for frame in wire.encode(message, payloads, request=request, kind=kind)]
    except (OverflowError, UnicodeEncodeError):
        return None


# ---------------------------------------------------------------- damaged frames


def mutated(frames: list[bytes], dice: random.Random) -> list[bytes]:
    """The frames with one to four injuries; half of the time with a checksum that fits again."""
    found = [bytearray(frame) for frame in frames]
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(found)) if found else 0
        dice.choice(INJURIES)(found, at, dice)
    whole = [bytes(frame) for frame in found]
    return repaired(whole) if dice.random() < 0.5 else whole


def repaired(frames: list[bytes]) -> list[bytes]:
    """With counts and checksum of what is there, so that the header itself is looked at."""
    if len(frames) < 2 or len(frames[0]) != wire.PREFIX.size:
        return frames
    _, _, kind, _, request, _, _ = wire.PREFIX.unpack(frames[0])
    digest = xxhash.xxh3_64()
    for frame in frames[1:]:
        digest.update(frame)
    kind = kind if kind in (wire.REQUEST, wire.REPLY, wire.REQUEST_MANY) else wire.REQUEST
    head = wire.codec._HEAD.pack(wire.MAGIC, wire.SCHEMA, kind, len(frames) - 2, request, sum(map(len, frames[2:])))
    check = digest.intdigest() ^ xxhash.xxh3_64_intdigest(head)
    return [head + check.to_bytes(8, "little"), *frames[1:]]


def _flip(frames: list[bytearray], at: int, dice: random.Random) -> None:
    if frames and frames[at]:
        frames[at][dice.randrange(len(frames[at]))] ^= 1 << dice.randrange(8)


def _cut(frames: list[bytearray], at: int, dice: random.Random) -> None:
    if frames and frames[at]:
        del frames[at][dice.randrange(len(frames[at])) :]


def _insert(frames: list[bytearray], at: int, dice: random.Random) -> None:
    if frames:
        where = dice.randint(0, len(frames[at]))
        frames[at][where:where] = dice.randbytes(dice.randint(1, 9))


def _bomb(frames: list[bytearray], at: int, dice: random.Random) -> None:
    """A length that is not there: array, map, text or bytes of up to 2^32 elements."""
    if frames and frames[at]:
        where = dice.randrange(len(frames[at]))
        lead = dice.choice((0xDD, 0xDF, 0xDB, 0xC6, 0xDC, 0xDE))
        frames[at][where : where + 5] = bytes([lead]) + struct.pack(">I", dice.choice((2**32 - 1, 2**31, 70_000)))


def _nest(frames: list[bytearray], at: int, dice: random.Random) -> None:
    if frames:
        frames[at][0:0] = b"\x91" * dice.choice((10, 200, 5000))


def _text(frames: list[bytearray], at: int, dice: random.Random) -> None:
    if frames:
        where = dice.randint(0, len(frames[at]))
        frames[at][where:where] = b"\xa3\xff\xfe\xfd"


def _swap(frames: list[bytearray], at: int, dice: random.Random) -> None:
    if len(frames) > 1:
        frames[0], frames[at] = frames[at], frames[0]


def _frame(frames: list[bytearray], at: int, dice: random.Random) -> None:
    if frames and dice.random() < 0.5:
        del frames[at]
    else:
        frames.append(bytearray(dice.randbytes(dice.randint(0, 40))))


INJURIES: tuple[Callable[[list[bytearray], int, random.Random], None], ...] = (
    _flip,
    _flip,
    _flip,
    _cut,
    _insert,
    _bomb,
    _nest,
    _text,
    _swap,
    _frame,
)


def fitting(message: Any, facts: dict[str, Any], dice: random.Random) -> Any:
    """The message with what is true where the service would ask for it: epoch, group, token, worker, step."""
    if isinstance(message, tuple):
        return tuple(fitting(item, facts, dice) for item in message)
    if not isinstance(message, msgspec.Struct):
        return message
    changes = {name: facts[name] for name in message.__struct_fields__ if name in facts and dice.random() < 0.9}
    nested = {
        name: fitting(getattr(message, name), facts, dice)
        for name in message.__struct_fields__
        if isinstance(getattr(message, name), (msgspec.Struct, tuple))
    }
    return msgspec.structs.replace(message, **(nested | changes))


def attacks(
    seed: int,
    *,
    damaged: float = 0.5,
    kind: int = wire.REQUEST,
    facts: Callable[[], dict[str, Any]] = dict,
    kinds: Sequence[type] = (),
) -> Iterator[list[bytes]]:
    """Frames without end: damaged ones, and whole ones with hostile values in otherwise fitting messages."""
    dice = random.Random(seed)
    known = [message for message in examples() if not kinds or isinstance(message, tuple(kinds))]
    for request in itertools.count(1):
        if request % 500 == 1:  # made once, hurt often
            pool = [
                frames_of(
                    fitting(one, facts(), dice), [dice.randbytes(size)] * (size > 0), request=request + at, kind=kind
                )
                for at, one in enumerate(known)
                for size in (0, 140)
            ]
        if dice.random() < damaged:
            frames = dice.choice(pool)
            yield mutated(frames, dice) if frames else [b""]
        else:
            message = hostile_message(fitting(dice.choice(known), facts(), dice), dice)
            payloads = [dice.randbytes(dice.choice((0, 7, 140, 4000)))] * dice.choice((0, 1, 1, 2))
            yield frames_of(message, payloads, request=request, kind=kind) or [b""]


# ---------------------------------------------------------------- targets


def decoder_takes(frames: Sequence[bytes]) -> Any:
    """The message, or None where it is refused; anything but a refusal is raised."""
    try:
        return wire.decode(frames, max_bytes=1 << 20).message
    except WireError:
        return None


class Inside:
    """A buffer service in this process whose owner has gone mad: state machine and store, without sockets."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts, self._left = folder, 0, 0
        self.service: Any = None
        self.taken = 0

    def _start(self) -> None:
        from buffer_lab import TOML

        from buffers.main import open_service, open_store

        self.close()
        self._starts += 1
        self._left = 600
        with contextlib.redirect_stdout(io.StringIO()):
            config = parse(TOML.format(store="sqlite", buffer="", dir=self._folder / str(self._starts)))
            RunDir(config.run_dir).create()
            self.service = open_service(config, open_store(config, lambda: False))
            opening = (
                wire.Hello("producer", "producer-0", 1, "h", "", "fp"),
                wire.Register("learner", 1, "h", 0, "", False, "fp", {0: "d0"}),
                wire.LeaseRequest("producer-0", 0, 4, 1.0),
            )
            for number, message in enumerate(opening, start=1):
                self._handle(wire.encode(message, request=number))

    def _handle(self, frames: Sequence[Any]) -> None:
        self.service.handle([Call(_Nobody(), b"peer", wire.decode(frames))])  # type: ignore[arg-type]

    def facts(self, dice: random.Random) -> dict[str, Any]:
        """What a peer could know."""
        found: dict[str, Any] = {"producer": "producer-0", "worker": "reward-0", "fingerprint": "fp"}
        if self.service is None:
            return found
        groups, meta = list(self.service.machine.table.groups.values()), self.service.machine.table.meta
        if groups:
            group = dice.choice(groups)
            found |= {"group": group.id, "token": getattr(group, "token", 0)}
        return found | {"epoch": meta.epoch, "step": min(meta.version + 1, wire.LARGEST)}

    def take(self, frames: Sequence[bytes]) -> None:
        """Raises what the service did not expect."""
        if self._left <= 0 or self.service is None or self.service.stop_reason:
            self._start()
        self._left -= 1
        with contextlib.redirect_stdout(io.StringIO()):
            self._handle(frames)
            if self._left % 20 == 0:
                self.service.tick()
        self.taken += 1

    def close(self) -> None:
        if self.service is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                self.service.close()
            self.service = None


class _Nobody:
    """Takes answers."""

    def reply(self, *_: Any, **__: Any) -> None:
        return


class Live:
    """A service as a process with keys, and a worker that joined it and means no good."""

    def __init__(self, folder: Path, role: str) -> None:
        from buffer_lab import TOML

        write_keys(folder / f"{role}.key")
        guest = read_keys(folder / f"{role}.producer.key")
        lines = f'key_file = "{folder / role}.key"\n'
        self.config = parse(TOML.format(store="sqlite", buffer="", dir=folder / role) + lines)
        self.run = RunDir(self.config.run_dir).create()
        self.run.config.write_text(dump(self.config))
        self.log = self.run.logs / f"{role}.log"
        module = {"buffer": "buffers.main", "weightsync": "weightsync.main"}[role]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(self.run.config)],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            )
        self.asker = Requester(endpoint(self.config, role), keys=guest, resend_s=2.0)
        self._thrower = Requester(endpoint(self.config, role), keys=guest)._socket  # as it is
        self.sent = 0
        self.status(timeout_s=60)

    def status(self, *, timeout_s: float = 60) -> dict[str, Any]:
        """It answers."""
        found: dict[str, Any] = msgspec.json.decode(
            self.asker.request(wire.StatusRequest(), timeout_s=timeout_s).message.json
        )
        return found

    def throw(self, frames: Sequence[bytes]) -> None:
        """Send a frame as it is; every 256 the service has to answer."""
        self._thrower.send_multipart([*frames] or [b""])
        self.sent += 1
        if self.sent % 256 == 0:
            self.status()
            with contextlib.suppress(zmq.Again):
                while True:
                    self._thrower.recv_multipart(zmq.NOBLOCK)

    def rss(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> int:
        self.asker.close()
        self._thrower.close(0)
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(60)


class Outcome(msgspec.Struct):
    """What was thrown and what became of it."""

    frames: int = 0
    decoded: int = 0
    inside: int = 0
    growth_bytes: dict[str, int] = {}
    uncaught: list[str] = []
    seconds: float = 0.0


def fuzz(folder: Path, *, frames: int, seed: int, roles: Sequence[str] = ("buffer", "weightsync")) -> Outcome:
    """All targets: every frame to the decoder and to one of two live services, one whole frame of four inside."""
    outcome, dice, started = Outcome(uncaught=[]), random.Random(seed), time.monotonic()
    inside = Inside(folder)
    live = {role: Live(folder, role) for role in roles}
    base: dict[str, int] = {}
    source = attacks(seed, damaged=0.8, facts=lambda: inside.facts(dice))
    try:
        for number in range(frames):
            injured = next(source)
            outcome.frames += 1
            try:
                message = decoder_takes(injured)
                outcome.decoded += message is not None
                if message is not None and dice.random() < 0.25:
                    inside.take(injured)
            except Exception as error:  # every kind of it is a finding
                where = traceback.extract_tb(error.__traceback__)[-1]
                outcome.uncaught.append(f"{error!r} at {Path(where.filename).name}:{where.lineno}"[:300])
                inside.service = None
            if live:
                live["buffer" if number % 3 else "weightsync"].throw(injured)
            if number == frames // 5:
                base = {role: one.rss() for role, one in live.items()}
        for role, one in live.items():
            one.status()
            outcome.growth_bytes[role] = one.rss() - base.get(role, one.rss())
    finally:
        inside.close()
        for role, one in live.items():
            if not one.alive() or one.close():
                outcome.uncaught.append(f"{role} ended: {one.log.read_text()[-600:]}")
    outcome.inside, outcome.seconds = inside.taken, time.monotonic() - started
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    """The long form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        outcome = fuzz(Path(folder), frames=args.frames, seed=args.seed)
    growth = ", ".join(f"{role} {size / 2**20:+.1f} MiB" for role, size in outcome.growth_bytes.items())
    lines = [
        f"make fuzz: {outcome.frames} frames, seed {args.seed}, {outcome.seconds:.0f} s, Python "
        f"{sys.version.split()[0]}, msgspec {msgspec.__version__}, {os.cpu_count()} CPU cores",
        f"decoder: {outcome.frames} frames, {outcome.decoded} decoded to a message, the others WireError",
        "live services over CURVE, with a key of a producer: two of three frames to the buffer, one to weight sync",
        f"service in the process, as the owner of the run: {outcome.inside} messages",
        f"uncaught: {len(outcome.uncaught)}",
        f"memory after the first fifth: {growth} (limit {GROWTH_BYTES >> 20} MiB)",
    ]
    print("\n".join(lines + outcome.uncaught))
    good = not outcome.uncaught and all(size <= GROWTH_BYTES for size in outcome.growth_bytes.values())
    if args.out is not None and good:
        args.out.write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "contract")]
    sys.exit(main())
