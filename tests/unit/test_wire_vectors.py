"""The conformance vectors for other languages are those of this code, and mean what they say."""

import json
from typing import Any

import msgspec
import pytest
from test_wire import EXAMPLES
from wire_vectors import PLACE, error_of, plain, text_of

from asyncrl import wire

VECTORS: dict[str, Any] = json.loads(PLACE.read_text())


def frames_of(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in case["frames"]]


def test_the_file_is_that_of_this_schema() -> None:
    assert PLACE.read_text() == text_of(EXAMPLES), "python tests/unit/wire_vectors.py writes it again"


def test_every_good_message_is_read_and_written_alike() -> None:
    assert [case["name"] for case in VECTORS["good"]] == [type(example).__name__ for example in EXAMPLES]
    for case, example in zip(VECTORS["good"], EXAMPLES, strict=True):
        packet = wire.decode(frames_of(case))
        assert packet.message == example and plain(packet.request) == case["request"] and packet.kind == case["kind"]
        assert [bytes(payload).hex() for payload in packet.payloads] == case["payloads"]
        assert plain(msgspec.msgpack.decode(bytes(packet.header))) == case["header"]


@pytest.mark.parametrize("case", VECTORS["accepted"], ids=lambda case: case["why"])
def test_other_ways_to_write_a_message_are_accepted(case: dict[str, Any]) -> None:
    packet = wire.decode(frames_of(case))
    assert wire.encode_header(packet.message).hex() == case["same_as"] != bytes(packet.header).hex()


@pytest.mark.parametrize("case", VECTORS["bad"], ids=lambda case: case["why"])
def test_bad_frames_are_refused_with_their_code(case: dict[str, Any]) -> None:
    assert error_of(frames_of(case)) == case["error"]


def test_every_code_that_a_frame_can_be_refused_with_is_there() -> None:
    assert {case["error"] for case in VECTORS["bad"]} == {
        "wire.prefix",
        "wire.schema",
        "wire.size",
        "wire.checksum",
        "wire.decode",
    }
    assert not any(error_of(frames_of(case)) for case in (*VECTORS["good"], *VECTORS["accepted"]))


def test_arrays_are_found_by_their_fields() -> None:
    case = VECTORS["arrays"]
    fields = [wire.Field(*field) for field in case["fields"]]
    found = wire.unpack_arrays(fields, bytes.fromhex(case["payload"]))
    assert {name: array.tolist() for name, array in found.items()} == case["values"]
    assert all(field.offset % wire.ALIGNMENT == 0 for field in fields)
