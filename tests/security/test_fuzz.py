"""The short form of `make fuzz`, and what the long one found."""

import random
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))  # buffer_lab

import fuzzing

from asyncrl import wire
from asyncrl.errors import WireError


@pytest.mark.slow
def test_hostile_frames_end_nothing(tmp_path: Path) -> None:
    outcome = fuzzing.fuzz(tmp_path, frames=3000, seed=random.randrange(1 << 30))
    assert outcome.uncaught == []
    assert outcome.frames == 3000 and outcome.decoded > 300 and outcome.inside > 50
    assert all(size <= fuzzing.GROWTH_BYTES for size in outcome.growth_bytes.values()), outcome


def test_the_fuzzer_reaches_every_message_and_every_field() -> None:
    """And hurts each: what it does not send, it cannot find."""
    dice = random.Random(1)
    for message in fuzzing.examples():
        changed: set[str] = set()
        for _ in range(150):
            hurt = fuzzing.hostile_message(message, dice)
            changed |= {name for name in message.__struct_fields__ if getattr(hurt, name) != getattr(message, name)}
        # an empty collection has nothing in it to hurt, None no type
        fields = {name for name in message.__struct_fields__ if getattr(message, name) not in ((), {}, None)}
        assert fields <= changed, (type(message).__name__, fields - changed)


def test_the_fuzzer_notices_a_service_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_frames: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(fuzzing, "decoder_takes", broken)
    outcome = fuzzing.fuzz(tmp_path, frames=5, seed=1, roles=())
    assert len(outcome.uncaught) == 5 and "a bug" in outcome.uncaught[0]


FOUND = {
    "a negative step ended the buffer": (wire.Register("l", 1, "h", -2, "", True, "fp"), "step"),
    "a step beyond 64 bits was written and could not be read": (wire.Commit(1, 2**64 - 1, 0, "d"), "step"),
    "a version that nothing can hold": (wire.LeaseRequest("p", 2**63, 1, 0.0), "engine_version"),
    "digests of impossible versions": (wire.Register("l", 1, "h", 0, "", True, "fp", {2**64 - 1: "d"}), "digests"),
    "a negative number of groups": (wire.LeaseRequest("p", 0, -1, 0.0), "max_groups"),
    "a negative epoch": (wire.Claim(-1, 0, 0, 0.0), "epoch"),
}


@pytest.mark.parametrize("case", FOUND)
def test_what_was_found_is_refused_at_the_door(case: str) -> None:
    message, field = FOUND[case]
    with pytest.raises(WireError) as caught:
        wire.decode(wire.encode(message))
    assert caught.value.code == "wire.decode"
    assert f"$[{message.__struct_fields__.index(field) + 1}]" in str(caught.value), "the sender is told where"


def test_no_version_yet_is_minus_one() -> None:
    for message in (wire.LeaseRequest("p", -1, 1, 0.0), wire.Claim(1, 1, -1, 0.0), wire.Tune("{}", "me", -1)):
        assert wire.decode(wire.encode(message)).message == message
    with pytest.raises(WireError):
        wire.decode(wire.encode(msgspec.structs.replace(wire.Tune("{}", "me"), undo_to=-2)))
