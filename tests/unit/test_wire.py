"""Messages: golden bytes of every one, strict decoding behind one boundary, validation of samples.

`python tests/unit/test_wire.py` writes the golden file, and the vectors for other languages, again after a deliberate
change of the schema.
"""

import json
import random
import struct
import sys
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import xxhash

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.wire.batch_arrays import group_data as wire_group
from asyncrl.wire.codec import decode_header

GOLDEN = Path(__file__).with_name("golden_messages.json")
FIELDS = (wire.Field("prompt", "i4", 0, 2), wire.Field("response", "i4", 64, 3), wire.Field("logprobs", "f4", 128, 3))
TENSOR = wire.Tensor("model.embed_tokens.weight", "F32", (4, 2), 0, 0, 32)
MANIFEST = wire.Manifest(3, "aa", (64,), ("bb",), "cc")
HEAD = wire.Samples(
    "producer-0",
    7,
    2,
    (wire.SampleHead(1, 3, "stop", ((4, 2), (5, 1))),),
    {4: "d4", 5: "d5"},
    FIELDS,
    '{"data_source":"add"}',
    2,
    "processed",
    {1: 0.5},
    {1: {"exact": 0.5}},
)
EXAMPLES: list[wire.Message] = [
    wire.Hello("producer", "producer-0", 12, "host", "run", "fp"),
    wire.Welcome("run", 2, 3, 4, {"weightsync": "ipc:///w"}),
    wire.Refused("fenced", "older epoch", "buffer"),
    wire.Ok("fine", ((7, 2),)),
    wire.Heartbeat("producer", "producer-0", 12, "host", "", {"busy_share": 0.5}),
    wire.StatusRequest(),
    wire.StatusReply("{}"),
    wire.Stop("done"),
    wire.Replies(((7, b"\x92\x04\xa0"), (8, b"\x92\x04\xa0"))),
    wire.Tune('{"max_staleness":4}', "ada@host", -1),
    wire.Tuned(2, '{"max_staleness":[2,4]}', ""),
    wire.LeaseRequest("producer-0", 4, 2, 5.0),
    wire.Leases(
        (wire.Lease(7, 2, 1, (0, 1), 99, 6),),
        4,
        "capacity",
        False,
        (wire.Begun(7, 1, 3, ((4, 2), (5, 1)), {4: "d4", 5: "d5"}, FIELDS[1:]),),
    ),
    HEAD,
    wire.Pieces("producer-0", 7, 2, (wire.Piece(1, 5, 3, ((4, 2), (5, 1))),), {4: "d4", 5: "d5"}, FIELDS[1:]),
    wire.PiecesReply({1: 8}, {2: "token"}, ((7, 2),)),
    wire.SamplesReply((1,), (2,), {3: "token"}, ((7, 2),)),
    wire.SamplesAt("p0", wire.Place(5 << 32, 64, 100, 2000, 99)),
    wire.LeaseReturn("producer-0", ((7, 2),), "stopping", False),
    wire.StoreImages("producer-0", ("aa" * 32,)),
    wire.FetchImages(("aa" * 32, "bb" * 32)),
    wire.Images(("aa" * 32,), {"bb" * 32: "image: missing"}),
    wire.RewardRequest("reward-0", 8, 5.0, "slow"),
    wire.RewardWork((wire.RewardItem(7, 1, 3, 1, "{}", "stop", FIELDS[:2], "slow"),), False),
    wire.Scores(
        "reward-0",
        (wire.Score(7, 1, 3, 1.0, {"exact": 1.0}),),
        (wire.RewardFailure(7, 2, 4, "raised", "x"),),
        "v",
        "slow",
    ),
    wire.ScoresReply(1, {"7:2": "token"}),
    wire.TeacherLogprobs("teacher-big-0", "big", 7, 1, 3, "v", (wire.Field("teacher_logprobs", "f4", 0, 3),)),
    wire.Register("learner", 12, "host", 20, "{}", True, "fp", {20: "d"}),
    wire.Registered(2, "run", 24, "/run/segments", "n"),
    wire.Claim(2, 21, 20, 5.0, True),
    wire.NotYet("step 21 waits", 3, 4),
    wire.Batch(
        21,
        20,
        (wire.GroupHead(7, 2, "{}", (b"\x01",), {1: 0.5}, {1: {"exact": 0.5}}, {"ready": 1.5}),),
        False,
        {"issued": 1},
        (wire.Place(1, 0, 10, 20, 7),),
        '{"learner.algorithm.clip_high":0.3}',
        {"length_bias": -0.5},
    ),
    wire.Commit(2, 21, 21, "d"),
    wire.Quarantine(2, 21, (7,), "nan"),
    wire.LedgerRequest(2, 20),
    wire.LedgerReply("{}"),
    wire.Checkpointed(2, 20),
    wire.Goodbye(2, True, "done"),
    wire.EvaluationsRequest(1),
    wire.EvaluationsReply(('{"step":20}',), "of step 40"),
    wire.Publish("learner", 2, MANIFEST, {"local": "/dev/shm/x"}, (TENSOR,)),
    wire.Published(5, True),
    wire.RoundRequest(2, 5, 1.0, "preparing", "sent"),
    wire.RoundReply(5, "committed", 1, {"producer-0": "serving"}, {"producer-0": 1}, "127.0.0.1:1", ""),
    wire.MemberPoll("producer-0", 12, "host", "fp", "serving", 3, "cc", 5, 1.0, ("local",), "aa", ""),
    wire.Instruction("receive", 5, MANIFEST, (TENSOR,), "local", "/dev/shm/x", 1, 2, 1, 30.0, 3, ""),
    wire.Fetch("cc", "dd", 2, 4 << 20, 1 << 20),
    wire.Fetched(2, 4 << 20, 64 << 20),
]
NAMES = [type(example).__name__ for example in EXAMPLES]


def sample_payload(**changes: np.ndarray) -> tuple[tuple[wire.Field, ...], bytes]:
    arrays = {
        "prompt": np.array([1, 2], dtype=np.int32),
        "response": np.array([3, 4, 5], dtype=np.int32),
        "logprobs": np.array([-0.5, -0.1, -2.0], dtype=np.float32),
    }
    return wire.pack_arrays({**arrays, **changes})


def test_parts_are_packed_like_whole_arrays() -> None:
    parts = [np.arange(3, dtype=np.int32), np.arange(10, dtype=np.int32)[::2], np.zeros(0, np.int32)]
    probs = [np.array([-0.5], np.float32)]
    packed = wire.pack_parts({"response": ("i4", parts), "logprobs": ("f4", probs)})
    assert packed == wire.pack_arrays({"response": np.concatenate(parts), "logprobs": probs[0]})
    with pytest.raises(ValueError, match="int64"):
        wire.pack_parts({"response": ("i4", [np.zeros(1, np.int64)])})


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 2e-4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_bad_logprob_is_seen_anywhere(bad: float, place: int) -> None:
    logprobs = np.array([-0.5, -0.1, -2.0], dtype=np.float32)
    logprobs[place] = bad
    fields, payload = sample_payload(logprobs=logprobs)
    assert wire.validate_samples(head(fields=fields), payload, group_size=4).startswith("logprobs")


def head(**changes: object) -> wire.Samples:
    return msgspec.structs.replace(HEAD, **changes)


def test_every_message_has_an_example() -> None:
    assert sorted(NAMES) == sorted(kind.__name__ for kind in get_args(wire.AnyMessage))


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_golden_bytes(example: wire.Message) -> None:
    golden = json.loads(GOLDEN.read_text())[type(example).__name__]
    assert wire.encode_header(example).hex() == golden
    frames = wire.encode(example, [b"payload"], request=9)
    packet = wire.decode(frames)
    assert packet.message == example
    assert (packet.request, packet.kind, bytes(packet.payloads[0])) == (9, wire.REQUEST, b"payload")


def test_bytes_of_before_a_field_was_added_still_decode() -> None:
    """Fields are added at the end, with a default."""
    old = bytes.fromhex("96159196070201920001630604a86361706163697479c290")
    assert decode_header(old) == wire.Leases((wire.Lease(7, 2, 1, (0, 1), 99, 6),), 4, "capacity")
    old = bytes.fromhex("9514aa70726f64756365722d300402cb4014000000000000")
    assert decode_header(old) == wire.LeaseRequest("producer-0", 4, 2, 5.0)


def test_tags_are_unique() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(wire.AnyMessage)]
    assert len(set(tags)) == len(tags)


def break_prefix(frames: list[bytes], position: int, form: str, value: object) -> list[bytes]:
    prefix = bytearray(frames[0])
    struct.pack_into(form, prefix, position, value)
    return [bytes(prefix), *frames[1:]]


def test_what_is_wrong_with_a_frame_is_named() -> None:
    frames = wire.encode(HEAD, [b"12345"])
    cases = {
        "wire.prefix": [[], [b"x"], frames[1:], frames[:2], break_prefix(frames, 0, "<4s", b"HTTP")],
        "wire.schema": [break_prefix(frames, 4, "<B", wire.SCHEMA + 1)],
        "wire.size": [[*frames[:2], b"1234"], break_prefix(frames, 16, "<Q", 6)],
        "wire.checksum": [[*frames[:2], b"12346"], break_prefix(frames, 24, "<Q", 1)],
    }
    for code, broken in cases.items():
        for one in broken:
            with pytest.raises(WireError) as caught:
                wire.decode(one)
            assert caught.value.code == code
    with pytest.raises(WireError) as caught:
        wire.decode(frames, max_bytes=4)
    assert caught.value.code == "wire.size"


def reseal(header: bytes) -> list[bytes]:
    """Frames of a header with a right checksum, so that the decoder behind it is reached."""
    frames = wire.encode(wire.Ok())
    head = wire.PREFIX.pack(wire.MAGIC, wire.SCHEMA, 0, 0, 1, 0, 0)[:-8]
    check = xxhash.xxh3_64_intdigest(header) ^ xxhash.xxh3_64_intdigest(head)
    return [head + check.to_bytes(8, "little"), header, *frames[2:]]


def test_surplus_fields_unknown_tags_and_nesting_are_refused() -> None:
    encode = msgspec.msgpack.encode
    nested = b"\x91" * 5000 + b"\xc0"
    for header in (
        encode([4, "fine", "surplus"]),
        encode([999]),
        encode([4, 5]),
        encode({}),
        b"",
        b"\xc1",
        nested,
        encode([4, "x"])[:-1] + b"\xff",
        encode([7, b"\xff\xfe".decode("latin1")])[:-1],
    ):
        with pytest.raises(WireError) as caught:
            wire.decode(reseal(header))
        assert caught.value.code == "wire.decode"


def test_mutated_headers_raise_nothing_else() -> None:
    """F19: whatever the bytes, WireError or a message. The checksum is made right so that the decoder is reached."""
    rng = random.Random(0)
    decoded = 0
    for round_ in range(20_000):
        header = bytearray(wire.encode_header(EXAMPLES[round_ % len(EXAMPLES)]))
        for _ in range(rng.randint(1, 4)):
            header[rng.randrange(len(header))] = rng.randrange(256)
        if rng.random() < 0.2:
            del header[rng.randrange(len(header)) :]
        try:
            wire.decode(reseal(bytes(header)))
            decoded += 1
        except WireError:
            pass
    assert 0 < decoded < 20_000


@pytest.mark.parametrize("field", ["fingerprint", "state", "digest", "has_plan", "relay", "base"])
def test_texts_that_the_weight_sync_keeps_are_bounded(field: str) -> None:
    poll = next(one for one in EXAMPLES if isinstance(one, wire.MemberPoll))
    assert wire.decode_header(wire.encode_header(msgspec.structs.replace(poll, **{field: "x" * 500})))
    with pytest.raises(WireError) as error:
        wire.decode_header(wire.encode_header(msgspec.structs.replace(poll, **{field: "x" * 501})))
    assert error.value.code == "wire.decode"


def test_arrays_round_trip_aligned_and_read_only() -> None:
    arrays = {"a": np.arange(5, dtype=np.int32), "b": np.ones(3, dtype=np.float32), "c": np.zeros(0, dtype=np.uint8)}
    fields, payload = wire.pack_arrays(arrays)
    assert all(field.offset % wire.ALIGNMENT == 0 for field in fields)
    back = wire.unpack_arrays(fields, payload)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
    with pytest.raises(ValueError, match="read-only"):
        back["a"][0] = 1
    with pytest.raises(ValueError, match="cannot be sent"):
        wire.pack_arrays({"x": np.zeros(2, dtype=np.float64)})


@pytest.mark.parametrize(
    "field",
    [
        wire.Field("a", "i4", 0, 100),
        wire.Field("a", "i4", -4, 1),
        wire.Field("a", "i4", 2, 1),
        wire.Field("a", "O", 0, 1),
        wire.Field("a", "i4", 1 << 62, 1),
        wire.Field("a", "i4", 0, -1),
    ],
)
def test_fields_that_leave_the_payload_are_refused(field: wire.Field) -> None:
    with pytest.raises(WireError):
        wire.unpack_arrays([field], bytes(64))


def test_validation_accepts_good_samples_and_names_each_poison() -> None:
    fields, payload = sample_payload()
    good = {"group_size": 4, "vocab_size": 10, "newest_version": 5}
    assert wire.validate_samples(head(fields=fields), payload, **good) == ""

    def verdict(start: str, change: dict[str, object], **arrays: np.ndarray) -> None:
        made, data = sample_payload(**arrays)
        reason = wire.validate_samples(head(**{"fields": made, **change}), data, **good)
        assert reason.startswith(start + ":"), reason

    f4 = np.float32
    one = wire.SampleHead(1, 3, "stop", ((4, 3),))
    verdict("logprobs", {}, logprobs=np.array([-0.5, np.nan, -1], dtype=f4))
    verdict("logprobs", {}, logprobs=np.array([-0.5, -np.inf, -1], dtype=f4))
    verdict("logprobs", {}, logprobs=np.array([-0.5, 0.5, -1], dtype=f4))
    verdict("length", {}, logprobs=np.array([-0.5], dtype=f4))
    verdict("vocabulary", {}, response=np.array([3, 4, 10], dtype=np.int32))
    verdict("vocabulary", {}, prompt=np.array([-1, 4], dtype=np.int32))
    verdict("length", {"prompt_tokens": 3})
    verdict("length", {"samples": (msgspec.structs.replace(one, length=2),)})
    verdict("empty", {"samples": ()})
    verdict("empty", {"samples": (wire.SampleHead(1, 0, "stop", ()),)})
    verdict("index", {"samples": (one, one)})
    verdict("index", {"samples": (msgspec.structs.replace(one, index=4),)})
    verdict("finish", {"samples": (msgspec.structs.replace(one, finish="?"),)})
    verdict("version", {"samples": (msgspec.structs.replace(one, runs=((6, 3),)),)})
    verdict("runs", {"samples": (msgspec.structs.replace(one, runs=((4, 3), (5, 0))),)})
    verdict("layout", {"fields": fields[:2]})
    verdict("layout", {}, logprobs=np.array([3, 4, 5], dtype=np.int32))
    verdict("digests", {"digests": {4: "d4", 3: "d" * 65}})
    verdict("digests", {"digests": dict.fromkeys(range(100), "d")})


if __name__ == "__main__":
    import wire_vectors

    wire_vectors.write(EXAMPLES)
    GOLDEN.write_text(json.dumps({type(one).__name__: wire.encode_header(one).hex() for one in EXAMPLES}, indent=0))
    sys.exit(0)


def teach(**changes: np.ndarray) -> tuple[wire.TeacherLogprobs, bytes]:
    arrays = {"teacher_logprobs": np.array([-0.5, -0.1, -2.0], np.float32), **changes}
    fields, payload = wire.pack_arrays({name: array for name, array in arrays.items() if array is not None})
    return wire.TeacherLogprobs("t", "big", 7, 1, 3, "v", fields), payload


def test_what_a_teacher_says_is_checked() -> None:
    ids, top = np.array([1, 2, 3, 4, 5, 6], np.int32), np.full(6, -1.0, np.float32)
    assert wire.checked_teacher(*teach(), length=3, top_k=0)[1] == ""
    whole, why = wire.checked_teacher(*teach(teacher_ids=ids, teacher_top=top), length=3, top_k=2, vocab_size=7)
    assert why == "" and whole["teacher_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    nan = np.array([-0.5, np.nan, -2.0], np.float32)
    for given, limits, words in (
        ({}, {"length": 4}, "3 log-probs for 4 tokens"),
        ({}, {"length": 3, "top_k": 2}, "0 likeliest tokens"),
        ({"teacher_logprobs": nan}, {"length": 3}, "not finite"),
        ({"teacher_logprobs": -nan}, {"length": 3}, "not finite"),
        ({"teacher_logprobs": np.array([-0.5, 0.1, -2.0], np.float32)}, {"length": 3}, "above 0"),
        ({"teacher_logprobs": np.array([1, 2, 3], np.int32)}, {"length": 3}, "layout"),
        ({"teacher_logprobs": None, "teacher_top": top}, {"length": 3}, "missing"),
        ({"other": top}, {"length": 3}, "field other"),
        ({"teacher_ids": ids, "teacher_top": top}, {"length": 3, "top_k": 0}, "0 each were asked for"),
        ({"teacher_ids": ids, "teacher_top": top[:5]}, {"length": 3, "top_k": 2}, "5 log-probs"),
        ({"teacher_ids": ids, "teacher_top": top}, {"length": 3, "top_k": 2, "vocab_size": 6}, "vocabulary"),
    ):
        assert words in wire.checked_teacher(*teach(**given), **limits)[1], (given, limits)  # type: ignore[arg-type]


def test_a_batch_holds_what_a_teacher_said() -> None:
    fields, payload = sample_payload()
    samples = head(fields=fields)
    answer, said = teach()
    group = wire.GroupHead(7, 2, "", (wire.encode_header(answer), wire.encode_header(samples)), {1: 0.0}, {})
    [sample] = wire_group(group, (said, payload)).samples
    assert sample.teaching is not None
    assert (sample.teaching.teacher, sample.teaching.version, sample.teaching.top_ids) == ("big", "v", None)
    assert sample.teaching.logprobs.tolist() == pytest.approx([-0.5, -0.1, -2.0])
    short, said = teach(teacher_logprobs=np.array([-0.5], np.float32))
    group = wire.GroupHead(7, 2, "", (wire.encode_header(samples), wire.encode_header(short)), {1: 0.0}, {})
    with pytest.raises(WireError, match="teacher big: length"):
        wire_group(group, (payload, said))
