"""The samples that a run keeps for people: which ones, their tokens' texts, and the log-probs of engine and learner."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
from made_batches import a_batch, a_group, a_sample
from step_lab import Table, ThreadGang

from learners.batch import sample_log as shown

WORDS = "abcdefgh"


def decode(ids: list[int]) -> str:
    return "".join(WORDS[one] for one in ids)


def batch(rewards: list[list[float]], *, mask: bool = False):  # type: ignore[no-untyped-def]
    groups = []
    for number, row in enumerate(rewards):
        samples = [
            a_sample(
                index,
                np.arange(3),
                np.array([-0.5, -1.0, -2.0], np.float32),
                reward,
                mask=np.array([1, 0, 1], np.uint8) if mask else None,
            )
            for index, reward in enumerate(row)
        ]
        groups.append(a_group(number, np.array([4, 5]), samples))
    return a_batch(7, 6, groups)


@pytest.mark.parametrize(("count", "expected"), [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 3, 2]), (9, [1, 3, 0, 2])])
def test_the_best_and_the_worst_are_kept(count: int, expected: list[int]) -> None:
    assert shown.places(batch([[0.5, 1.0], [0.0, 0.7]]), count) == expected


def test_a_line_has_words_and_both_log_probs_of_every_token() -> None:
    made = shown.lines(batch([[1.0, 0.0]], mask=True), 2, decode, {0: [-0.25, -9.0, -2.5]})
    assert [(line["prompt"], line["response"], line["reward"]) for line in made] == [
        ("ef", "abc", 1.0),
        ("ef", "abc", 0),
    ]
    assert made[0]["tokens"] == ["a", "b", "c"]
    assert made[0]["engine"] == [-0.5, None, -2.0]  # the policy did not sample the second
    assert made[0]["learner"] == [-0.25, None, -2.5]
    assert "learner" not in made[1]  # of a skipped update nothing is known


def test_a_long_sample_is_cut() -> None:
    many = shown.MAX_TOKENS + 5
    long = a_sample(0, np.zeros(many, np.int64), np.zeros(many, np.float32), 1.0)
    line = shown.lines(a_batch(1, 0, [a_group(0, np.array([1]), [long])]), 1, decode, {})[0]
    assert line["length"] == many and len(line["tokens"]) == len(line["engine"]) == shown.MAX_TOKENS


def test_a_character_of_several_tokens_stands_at_its_last_one() -> None:
    text = "zä€!".encode()

    def by_byte(ids: list[int]) -> str:
        return bytes(text[one] for one in ids).decode(errors="replace")

    assert shown.pieces(range(len(text)), by_byte) == ["z", "", "ä", "", "", "€", "!"]
    cut = shown.pieces(range(2), by_byte)
    assert cut == ["z", shown.BROKEN]


def test_a_tokenizer_that_drops_leading_spaces_keeps_them_between_tokens() -> None:
    words = ["the", "cat", "sat"]
    assert shown.pieces([0, 1, 2], lambda ids: " ".join(words[one] for one in ids)) == ["the", " cat", " sat"]


def gathered(made, mine, count):  # type: ignore[no-untyped-def]
    """What rank 0 of a gang hears; each rank has its part of `mine`."""
    table = Table(len(mine))
    found: list[object] = [None] * len(mine)

    def rank(number: int) -> None:
        gang = ThreadGang(number, len(mine), table)
        found[number] = shown.gather(gang, mine[number], made if number == 0 else None, count)

    ranks = [threading.Thread(target=rank, args=(number,)) for number in range(len(mine))]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(timeout=60)
    assert found[1:] == [{}] * (len(mine) - 1)
    return found[0]


def test_ranks_send_what_rank_0_keeps() -> None:
    full = {place: np.full(3, -1.0 - place, np.float32) for place in range(4)}
    made = batch([[0.5, 1.0], [0.0, 0.7]])  # kept: 1 and 2
    assert gathered(made, [{0: full[0], 2: full[2]}, {1: full[1], 3: full[3]}], 2) == {1: [-2.0] * 3, 2: [-3.0] * 3}
    assert gathered(made, [{0: full[0]}, {1: full[1]}], 2) == {1: [-2.0] * 3}  # the other one was not trained
    assert gathered(made, [full], 0) == {}


def test_a_sample_of_several_sequences_is_shown_as_one() -> None:
    """Sequences: tokens 0-1 behind the group's prompt; tokens 4-5 behind tokens 2-3; then the next sample."""
    long = a_sample(0, np.arange(6), np.full(6, -0.5, np.float32), 1.0, mask=np.array([1, 1, 0, 0, 1, 1], np.uint8))
    long = msgspec.structs.replace(long, rows=((2, 2),))
    other = a_sample(1, np.arange(2), np.full(2, -0.5, np.float32), 0.0)
    made = a_batch(3, 2, [a_group(0, np.array([7]), [long, other])])
    mine = {0: np.array([-1.0, -2.0], np.float32), 1: np.array([-3.0, -4.0], np.float32), 2: np.zeros(2, np.float32)}
    found = gathered(made, [mine], 2)
    line = shown.lines(made, 2, decode, found)[0]
    assert line["learner"] == [-1.0, -2.0, None, None, -3.0, -4.0]
    assert line["engine"] == [-0.5, -0.5, None, None, -0.5, -0.5]
    assert found[1] == [0.0, 0.0]


def test_a_line_names_the_images_of_its_prompt() -> None:
    made = batch([[1.0]])
    digests = ["a" * 64, "b" * 64]
    group = msgspec.structs.replace(made.groups[0], row={"images": digests})
    assert shown.lines(msgspec.structs.replace(made, groups=(group,)), 1, decode, {})[0]["images"] == digests
    plain = shown.lines(made, 1, decode, {})[0]
    assert "images" not in plain and "shown" not in plain


def test_a_line_names_the_images_of_later_turns() -> None:
    made = batch([[1.0]])
    sample = msgspec.structs.replace(made.groups[0].samples[0], images=((1, "a" * 64),))
    group = msgspec.structs.replace(made.groups[0], samples=(sample,))
    assert shown.lines(msgspec.structs.replace(made, groups=(group,)), 1, decode, {})[0]["shown"] == ["a" * 64]
