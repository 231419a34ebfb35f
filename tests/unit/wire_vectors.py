"""Conformance vectors of the wire protocol for other languages: makes `tests/vectors/wire.json`.

Run as `python tests/unit/wire_vectors.py` after a deliberate change of the schema (`python tests/unit/test_wire.py`,
which writes the golden bytes, runs it too). docs/other-languages.md says what the parts mean. A value stands in the
file as JSON has it, but {"int": "123"} where a number is beyond 2^53, {"hex": "00ff"} for bytes, and
{"map": [[key, value]]} for a map of msgpack: its keys may be numbers.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncrl import wire
from asyncrl.errors import WireError

PLACE = Path(__file__).parents[1] / "vectors" / "wire.json"
EXACT = 1 << 53  # JSON numbers are doubles in most languages


def plain(value: Any) -> Any:
    """A decoded msgpack value in the form of the file."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {"map": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > EXACT:
        return {"int": str(value)}
    return value


def hexed(frames: list[Any]) -> list[str]:
    return [bytes(frame).hex() for frame in frames]


def good(examples: list[wire.Message]) -> list[dict[str, Any]]:
    """Every message as whole frames, with what is in its header."""
    rows = []
    for number, example in enumerate(examples):
        payloads = [] if number % 3 else [bytes(range(number % 7)), b"payload"]
        request, kind = (1 << 60) + number if number % 5 == 0 else number, number % 3
        frames = wire.encode(example, payloads, request=request, kind=kind)
        header = msgspec.msgpack.decode(bytes(frames[1]), strict=False)
        rows.append(
            {
                "name": type(example).__name__,
                "kind": kind,
                "request": plain(request),
                "header": plain(header),
                "payloads": hexed(payloads),
                "frames": hexed(frames),
            }
        )
    return rows


def sealed(header: bytes, *, schema: int = wire.SCHEMA, kind: int = 0, count: int = 0) -> list[bytes]:
    """Frames of any header with a right check."""
    head = struct.pack("<4sBBHQQ", wire.MAGIC, schema, kind, count, 7, 0)
    check = xxhash.xxh3_64_intdigest(header) ^ xxhash.xxh3_64_intdigest(head)
    return [head + check.to_bytes(8, "little"), header]


def accepted() -> list[dict[str, Any]]:
    """Headers that Python writes otherwise and reads all the same."""
    encode = msgspec.msgpack.encode
    cases = [
        ("fields with a default may be left out at the end", encode([1, "reward", "js-0", 1, "host"]),
         wire.Hello("reward", "js-0", 1, "host")),
        ("a whole number may stand for a float", encode([32, "js-0", [[7, 1, 3, 1, {"exact": 1}]]]),
         wire.Scores("js-0", (wire.Score(7, 1, 3, 1.0, {"exact": 1.0}),))),
        ("numbers may be wider than needed", b"\x94\x1e\xa4js-0" + b"\xcf" + (8).to_bytes(8, "big") + encode(0.5),
         wire.RewardRequest("js-0", 8, 0.5)),
    ]  # fmt: skip
    return [
        {"why": why, "frames": hexed(sealed(header)), "same_as": wire.encode_header(message).hex()}
        for why, header, message in cases
    ]


def bad(example: wire.Message) -> list[dict[str, Any]]:
    """Frames that must be refused, with the code of the error."""
    frames = [bytes(frame) for frame in wire.encode(example, [b"12345"], request=9)]

    def prefix(position: int, form: str, value: object) -> list[bytes]:
        changed = bytearray(frames[0])
        struct.pack_into(form, changed, position, value)
        return [bytes(changed), *frames[1:]]

    def flipped(frame: int, place: int) -> list[bytes]:
        changed = bytearray(frames[frame])
        changed[place] ^= 1
        return [*frames[:frame], bytes(changed), *frames[frame + 1 :]]

    encode = msgspec.msgpack.encode
    cases: list[tuple[str, str, list[bytes]]] = [
        ("nothing", "wire.prefix", []),
        ("no header", "wire.prefix", frames[:1]),
        ("a short prefix", "wire.prefix", [frames[0][:31], *frames[1:]]),
        ("another magic", "wire.prefix", prefix(0, "<4s", b"HTTP")),
        ("an unknown kind", "wire.prefix", prefix(5, "<B", 9)),
        ("fewer payload frames than announced", "wire.prefix", frames[:2]),
        ("another schema", "wire.schema", prefix(4, "<B", wire.SCHEMA + 1)),
        ("another payload size", "wire.size", prefix(16, "<Q", 6)),
        ("another request number", "wire.checksum", prefix(8, "<Q", 10)),
        ("a flipped bit in the header", "wire.checksum", flipped(1, 3)),
        ("a flipped bit in the payload", "wire.checksum", flipped(2, 0)),
        ("a flipped bit in the check", "wire.checksum", flipped(0, 31)),
        ("an empty header", "wire.decode", sealed(b"")),
        ("a header that is no msgpack", "wire.decode", sealed(b"\xc1")),
        ("a header that is no array", "wire.decode", sealed(encode({}))),
        ("an unknown tag", "wire.decode", sealed(encode([999]))),
        ("a surplus field", "wire.decode", sealed(encode([6, "surplus"]))),
        ("a field of another type", "wire.decode", sealed(encode([30, 1, 2, 3.0]))),
        ("a missing field", "wire.decode", sealed(encode([30, "js-0"]))),
        ("text that is no UTF-8", "wire.decode", sealed(b"\x92\x07\xa2\xff\xfe")),
    ]
    return [{"why": why, "error": code, "frames": hexed(found)} for why, code, found in cases]


def arrays() -> dict[str, Any]:
    """A payload of arrays with its table of fields: every start is at a multiple of 64."""
    values = {
        "prompt": np.array([1, 2], np.int32),
        "response": np.array([3, -4, 1 << 30], np.int32),
        "logprobs": np.array([-0.5, -0.125, 0.0], np.float32),
        "mask": np.array([1, 0, 1], np.uint8),
    }
    fields, payload = wire.pack_arrays(values)
    return {
        "fields": [[field.name, field.dtype, field.offset, field.count] for field in fields],
        "payload": payload.hex(),
        "values": {name: array.tolist() for name, array in values.items()},
    }


def vectors(examples: list[wire.Message]) -> dict[str, Any]:
    """The whole file."""
    texts = [b"", b"a", b"ARL1", bytes(range(256)), bytes(1000)]
    hello = next(example for example in examples if isinstance(example, wire.Samples))
    return {
        "schema": wire.SCHEMA,
        "xxh3_64": [{"bytes": text.hex(), "hash": f"{xxhash.xxh3_64_intdigest(text):016x}"} for text in texts],
        "good": good(examples),
        "accepted": accepted(),
        "bad": bad(hello),
        "arrays": arrays(),
    }


def text_of(examples: list[wire.Message]) -> str:
    """The file's text: one case per line, so that a change of one message is a change of one line."""
    parts = []
    for name, value in vectors(examples).items():
        if isinstance(value, list):
            body = "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
        else:
            body = json.dumps(value)
        parts.append(f"{json.dumps(name)}: {body}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write(examples: list[wire.Message]) -> None:
    PLACE.parent.mkdir(exist_ok=True)
    PLACE.write_text(text_of(examples))


def error_of(frames: list[bytes]) -> str:
    """The code with which these frames are refused; empty where they are taken."""
    try:
        wire.decode(frames)
    except WireError as error:
        return error.code
    return ""


if __name__ == "__main__":
    from test_wire import EXAMPLES

    write(EXAMPLES)
    sys.exit(0)
