"""The producer with the hf engine and `checkpoint_tokens`: pieces on the way, and samples that others began.

The buffer is played on a real socket, as in `test_producer_main`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from test_producer_main import GROUP, IDS, ROWS, Buffer, FakeReceiver, prepare, produce

from asyncrl import wire
from asyncrl.net.responder import Call
from asyncrl.versions import cut_runs

EVERY = 4


class Whole:
    """A sample as it was delivered."""

    def __init__(self, head: wire.SampleHead, tokens: Any, logprobs: Any, message: wire.Samples, prompt: Any) -> None:
        self.head, self.tokens, self.logprobs, self.message, self.prompt = head, tokens, logprobs, message, prompt


class KeepingBuffer(Buffer):
    """Keeps pieces; hands out `begun` (group, index) -> tokens, log-probs, runs, digests with the leases.

    `forgets`: how many answers to pieces say that nothing of the sample is there.
    """

    def __init__(self, total: int, *, forgets: int = 0) -> None:
        super().__init__(total)
        self.begun: dict[tuple[int, int], tuple[Any, Any, Any, dict[int, str]]] = {}
        self.pieces: dict[tuple[int, int], list[tuple[wire.Piece, Any, Any, wire.Pieces]]] = defaultdict(list)
        self.forgets = forgets

    def handle(self, calls: list[Call]) -> None:
        for call in calls:
            if isinstance(call.message, wire.Pieces):
                self._pieces(call, call.message)
            else:
                super().handle([call])

    def _pieces(self, call: Call, message: wire.Pieces) -> None:
        arrays, kept, at = wire.unpack_arrays(message.fields, bytes(call.payloads[0])), {}, 0
        for item in message.samples:
            part = slice(at, at + item.count)
            at += item.count
            mine = self.pieces[message.group, item.index]
            mine.append((item, arrays["response"][part], arrays["logprobs"][part], message))
            kept[item.index] = item.start + item.count
            if self.forgets:
                self.forgets, kept[item.index] = self.forgets - 1, 0
        call.reply(wire.PiecesReply(kept))

    def _lease(self, call: Call, message: wire.LeaseRequest) -> None:
        if not self.begun:
            super()._lease(call, message)
            return
        group, last = self.next, self.next == self.total
        leases = () if last else (wire.Lease(group, 70 + group, 2, tuple(range(GROUP)), 1000 + group, 4),)
        heads, payloads = [], []
        for (number, index), (tokens, logprobs, runs, digests) in self.begun.items():
            if leases and number == group:
                fields, payload = wire.pack_arrays({"response": tokens, "logprobs": logprobs})
                heads.append(wire.Begun(number, index, len(tokens), runs, digests, fields))
                payloads.append(payload)
        self.next += len(leases)
        call.reply(wire.Leases(leases, 0, done=last, begun=tuple(heads)), payloads)

    def whole(self) -> dict[tuple[int, int], Whole]:
        """All samples that came."""
        found = {}
        for group, messages in self.messages.items():
            for message, payload in messages:
                arrays, at = wire.unpack_arrays(message.fields, payload), 0
                for head in message.samples:
                    part = slice(at, at + head.length)
                    at += head.length
                    found[group, head.index] = Whole(
                        head, arrays["response"][part], arrays["logprobs"][part], message, arrays["prompt"]
                    )
        return found


class OneVersion(FakeReceiver):
    """Weights that never change."""

    versions = 1


def config(tmp_path: Path) -> Any:
    tmp_path.mkdir(parents=True, exist_ok=True)
    made = prepare(tmp_path, ROWS)
    return replace(made, producers=replace(made.producers, checkpoint_tokens=EVERY))


def run(tmp_path: Path, buffer: KeepingBuffer, monkeypatch: pytest.MonkeyPatch, receiver: Any = OneVersion) -> None:
    produce(tmp_path, config(tmp_path), buffer, monkeypatch, receiver=receiver)


def test_pieces_are_the_beginning_of_the_sample_that_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = KeepingBuffer(4)
    run(tmp_path, buffer, monkeypatch, FakeReceiver)
    whole = buffer.whole()
    assert len(whole) == 4 * GROUP and buffer.pieces
    for key, mine in buffer.pieces.items():
        at = 0
        for item, tokens, logprobs, message in mine:
            assert item.start == at and message.token == 70 + key[0]
            stop = at + item.count
            np.testing.assert_array_equal(tokens, whole[key].tokens[at:stop])
            np.testing.assert_array_equal(logprobs, whole[key].logprobs[at:stop])
            assert item.runs == cut_runs(whole[key].head.runs, at, stop)
            assert {version for version, _ in item.runs} <= set(message.digests)
            at = stop
        assert at < whole[key].head.length
    short = {key for key, one in whole.items() if one.head.length <= EVERY}
    assert not short & set(buffer.pieces)  # a sample that is no longer than that travels once


def test_the_continued_sample_is_the_one_that_the_dead_producer_would_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same weights, same stream of random numbers: token for token, whatever was there of it."""
    first = KeepingBuffer(3)
    run(tmp_path / "first", first, monkeypatch)
    second = KeepingBuffer(3)
    full = first.whole()
    for place, key in enumerate(sorted(first.pieces)):
        (_, _, _, message), one = first.pieces[key][0], full[key]
        count = min(EVERY * (1 + place % 3), one.head.length - 1)
        second.begun[key] = one.tokens[:count], one.logprobs[:count], ((0, count),), message.digests
    assert len(second.begun) >= 3
    run(tmp_path / "second", second, monkeypatch)
    again = second.whole()
    assert again.keys() == full.keys()
    for key, one in full.items():
        np.testing.assert_array_equal(again[key].tokens, one.tokens)
        np.testing.assert_allclose(again[key].logprobs, one.logprobs, atol=1e-5)
        assert again[key].head == one.head
        np.testing.assert_array_equal(again[key].prompt, one.prompt)
    for key, mine in second.pieces.items():
        assert mine[0][0].start == (len(second.begun[key][0]) if key in second.begun else 0)
    beats = second.beats[-1].stats
    assert beats["continued_samples"] <= len(second.begun)  # the last beat may be older than the last sample
    made = beats["generated_tokens"]
    assert made <= sum(one.head.length for one in full.values()) - sum(len(one[0]) for one in second.begun.values())


def test_runs_and_digests_of_both_producers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = KeepingBuffer(2)
    tokens, logprobs = np.full(6, IDS["1"], np.int32), np.full(6, -2.0, np.float32)
    buffer.begun = {(group, 1): (tokens, logprobs, ((7, 2), (9, 4)), {7: "d7", 9: "d9"}) for group in range(2)}
    run(tmp_path, buffer, monkeypatch)
    for group in range(2):
        one = buffer.whole()[group, 1]
        assert one.head.runs == ((7, 2), (9, 4), (0, one.head.length - 6)) and one.head.length > 6
        np.testing.assert_array_equal(one.tokens[:6], tokens)
        np.testing.assert_array_equal(one.logprobs[:6], logprobs)
        assert {7: "d7", 9: "d9"}.items() <= one.message.digests.items() and one.message.digests[0] not in ("d7", "d9")
        assert len(one.prompt) == 4 and one.head.length <= 40
        others = [buffer.whole()[group, index] for index in (0, 2, 3)]
        assert all(other.head.runs == ((0, other.head.length),) for other in others)


def test_a_buffer_that_forgot_gets_all_of_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = KeepingBuffer(2, forgets=3)
    run(tmp_path, buffer, monkeypatch)
    again = 0
    for key, mine in buffer.pieces.items():
        for (before, *_), (item, tokens, _, _) in itertools.pairwise(mine):
            assert item.start in (0, before.start + before.count)
            again += item.start == 0
            np.testing.assert_array_equal(tokens, buffer.whole()[key].tokens[item.start : item.start + item.count])
    assert again >= 1
