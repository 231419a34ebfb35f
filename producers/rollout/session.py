"""One session of a policy as tokens: contexts and answers become one sample. Pure: no engine, no waiting.

Guarantees:
1. tokens go in and out unchanged: answers are stored as they were sampled, contexts as they were given; nothing is
   turned into text and back;
2. a response holds every sampled token once. `mask` is 1 there and 0 for observations, which have log-prob 0 and the
   version of the last sampled token before them (at the start of a row: the first one after them);
3. a context that continues the tokens so far continues the row; any other opens a row with its own prompt
   (`wire.SampleHead.rows`). Each row is a sequence that a learner trains by itself;
4. observations after the last sampled token of a row, and rows without a sampled token, are left out;
5. a context continues a row only with the images that the row holds so far.

Example, prompt [1, 2]: a turn of [5, 6], the observation [7], a turn of [8] give the response [5, 6, 7, 8] with mask
[1, 1, 0, 1]. With the next context [1, 9], which does not begin like [1, 2, 5, 6, 7, 8], a turn of [4] opens a row:
response [5, 6, 7, 8, 1, 9, 4], mask [1, 1, 0, 1, 0, 0, 1], rows ((4, 2),).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import WorkError
from asyncrl.versions import Runs, joined_runs
from asyncrl.wire import FloatArray, IntArray, Support, join_supports
from producers.rollout.rollout import Finished

SEEDS = 1 << 56  # a lease's seed has seven bytes
TURN_SEED = 0x9E3779B97F4A7C15  # odd: the turns of a sample have seeds of their own


class _Piece(NamedTuple):
    """Tokens of one turn, or of an observation: then they have neither log-probs nor runs nor support."""

    tokens: IntArray
    logprobs: FloatArray | None = None
    runs: Runs = ()
    support: Support | None = None


class _Row:
    """One sequence: its prompt and the tokens after it."""

    def __init__(self, context: IntArray, *, own: bool) -> None:
        self.context = context  # prompt and all tokens after it
        self.images: list[bytes] = []
        self.places: list[int] = []  # where the last of the images begin in the context: all but those of the group
        self.prompt_tokens = len(context)
        self.own = own
        self.pieces: list[_Piece] = []  # tokens after the prompt
        self.sampled = 0  # tokens up to the last sampled one
        self.turns: list[tuple[int, int]] = []  # (number of the turn, place after the prompt of its last token)
        self.experts: Any = None  # of all tokens up to the last sampled one, as the last turn's pass chose them

    def add(self, piece: _Piece) -> None:
        self.context = np.concatenate([self.context, piece.tokens])
        self.pieces.append(piece)

    def drop_observations(self) -> None:
        """Drop everything after the last sampled token."""
        end = self.prompt_tokens + self.sampled
        self.context = self.context[:end]
        while self.pieces and self.pieces[-1].logprobs is None:
            self.pieces.pop()
        while self.places and self.places[-1] >= end:
            self.places.pop()
            self.images.pop()


class Session:
    """`prompt_ids` i4 `[P]` is the prompt of the group with its `images`, `index` that of the sample."""

    def __init__(self, prompt_ids: IntArray, *, index: int, images: Sequence[bytes] = ()) -> None:
        self.index = index
        self.turns = 0
        self._asked = (0, 0)  # turn and requests for it: an engine may still be at work on one that was given up
        self.others: list[tuple[int, str, Runs]] = []  # turns of other policies: after how many own turns, whose, runs
        self._id = ""
        self._finish = "stop"
        self._rows = [_Row(_ids(prompt_ids), own=False)]
        self._rows[0].images += images

    @property
    def context(self) -> IntArray:
        """All tokens of the open row with its prompt: the context of the next turn."""
        return self._rows[-1].context

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the open row."""
        return self._rows[-1].prompt_tokens

    @property
    def rows(self) -> int:
        """Number of rows, with the open one."""
        return len(self._rows)

    @property
    def response_tokens(self) -> int:
        """Tokens after the prompt of the open row."""
        return len(self.context) - self.prompt_tokens

    def room(self, *, longest: int, max_new_tokens: int) -> int:
        """Tokens that the open row may still grow by; `longest`: tokens of a row with its prompt."""
        return max(0, min(longest - len(self.context), max_new_tokens - self.response_tokens))

    def request(self, group: GenRequest, *, max_prompt_tokens: int, max_new_tokens: int) -> GenRequest:
        """The engine request of the next turn, with the sampling of the group's request. Each turn has its own seed,
        each request its own id. An engine takes prompts of `max_prompt_tokens`; tokens beyond count as begun.
        """
        again = self._asked[1] + 1 if self._asked[0] == self.turns else 1
        self._asked = self.turns, again
        begun = len(self.context) - min(self.prompt_tokens, max_prompt_tokens)
        return replace(
            group,
            id=f"{group.id}:{self.index}:{self.turns}" + (f".{again}" if again > 1 else ""),
            prompt_ids=self.context,
            indices=(self.index,),
            seed=(group.seed + self.turns * TURN_SEED) % SEEDS,
            max_new_tokens=max_new_tokens,
            begun=begun,
            delta_tokens=0,
            images=tuple(self._rows[-1].images),
            image_places=tuple(self._rows[-1].places),
        )

    def extend(
        self, prompt_ids: IntArray | Sequence[int], images: Sequence[bytes] = (), places: Sequence[int] = ()
    ) -> bool:
        """Set the context of the next turn, with its images and where they begin: True if it continues the open row
        (new tokens are an observation), False if it opened another row.
        """
        ids, row = _ids(prompt_ids), self._rows[-1]
        known, seen = len(row.context), len(row.images)
        if len(ids) >= known and np.array_equal(ids[:known], row.context) and list(images[:seen]) == row.images:
            self.observe(ids[known:], images[seen:], [place - known for place in places[seen:]])
            return True
        if not len(ids):
            raise WorkError("sample.invalid", "a context without tokens", where=f"session of sample {self.index}")
        if not row.turns:
            self._rows.pop()  # no turn in it
        self._rows.append(_Row(ids, own=True))
        self._rows[-1].images += images
        self._rows[-1].places += places
        return False

    def observe(
        self, token_ids: IntArray | Sequence[int], images: Sequence[bytes] = (), places: Sequence[int] = ()
    ) -> None:
        """Add an observation to the open row; `places`: where its images begin in it."""
        ids, row = _ids(token_ids), self._rows[-1]
        row.images += images
        row.places += [len(row.context) + place for place in places]
        if len(ids):
            row.add(_Piece(ids))

    def drop_context(self) -> None:
        """Take back what was added after the last turn: no turn followed it."""
        if len(self._rows) > 1 and not self._rows[-1].turns:
            self._rows.pop()
        self._rows[-1].drop_observations()

    def add_turn(self, delta: GenDelta) -> None:
        """Add the complete answer (`asyncrl.engine.join_deltas`) to `context`."""
        if not len(delta.token_ids) or len(delta.token_ids) != len(delta.logprobs):
            raise WorkError(
                "engine.broken",
                f"a turn of {len(delta.token_ids)} tokens and {len(delta.logprobs)} log-probs",
                where=f"{delta.id} sample {delta.index}",
            )
        row = self._rows[-1]
        logprobs = np.asarray(delta.logprobs, np.float32)
        row.add(_Piece(_ids(delta.token_ids), logprobs, delta.runs, delta.support))
        row.sampled = len(row.context) - row.prompt_tokens
        row.turns.append((self.turns, row.sampled - 1))
        row.experts = delta.experts
        self.turns += 1
        self._id, self._finish = delta.id, delta.finish or "stop"

    def finish(
        self,
        reward: float | None = None,
        turn_rewards: Sequence[float] = (),
        *,
        finish: str = "",
        parts: Mapping[str, float] | None = None,
    ) -> Finished:
        """The sample. `reward` is the total, with `turn_rewards` (one per turn, from the first on); None: reward
        workers score it. `finish`: stop | length, else that of the last turn.

        Raises:
            WorkError: `sample.invalid` without a turn, or with more rewards than turns.
        """
        spoken = [row for row in self._rows if row.turns]
        if not spoken or len(turn_rewards) > self.turns:
            what = f"{len(turn_rewards)} rewards for {self.turns} turns" if spoken else "there is no turn"
            raise WorkError("sample.invalid", what, where=f"session of sample {self.index}")
        joined = _Joined()
        for row in spoken:
            joined.take(row, turn_rewards)
        sample = GenDelta(
            self._id,
            self.index,
            np.concatenate(joined.tokens),
            np.concatenate(joined.logprobs),
            joined.runs,
            finish or self._finish,
            support=join_supports(joined.supports),
            experts=None if joined.rows or len(spoken) > 1 else spoken[0].experts,
        )
        mask = np.concatenate(joined.mask)
        plain = bool(mask.all()) and not joined.rows
        return Finished(
            sample,
            reward,
            None if plain else mask,
            tuple(joined.rows),
            tuple(joined.turns),
            dict(parts or {}),
            tuple(joined.images),
            tuple(self.others),
        )


class _Joined:
    """The rows of a session, concatenated."""

    def __init__(self) -> None:
        self.tokens: list[IntArray] = []
        self.logprobs: list[FloatArray] = []
        self.mask: list[Any] = []
        self.runs: Runs = ()
        self.supports: list[tuple[Support | None, int]] = []
        self.rows: list[tuple[int, int]] = []
        self.turns: list[tuple[int, float]] = []
        self.images: list[tuple[int, bytes]] = []
        self._at = 0

    def take(self, row: _Row, turn_rewards: Sequence[float]) -> None:
        """One more row, up to its last sampled token."""
        if row.own:
            self.rows.append((self._at, row.prompt_tokens))
            self._add(_Piece(row.context[: row.prompt_tokens]), row)
        start, left = self._at, row.sampled
        end = row.prompt_tokens + left
        later = row.images[len(row.images) - len(row.places) :]
        self.images += [
            (start + place - row.prompt_tokens, image)
            for place, image in zip(row.places, later, strict=True)
            if place < end
        ]
        for piece in row.pieces:
            if left > 0:
                self._add(piece, row)
                left -= len(piece.tokens)
        self.turns += [
            (start + place, float(turn_rewards[number]))
            for number, place in row.turns
            if number < len(turn_rewards) and turn_rewards[number]
        ]

    def _version_before(self, row: _Row) -> Runs:
        """The version of the last sampled token before; else of the first one in this row."""
        if self.runs:
            return ((self.runs[-1][0], 0),)
        return ((next(piece.runs for piece in row.pieces if piece.runs)[0][0], 0),)

    def _add(self, piece: _Piece, row: _Row) -> None:
        count, sampled = len(piece.tokens), piece.logprobs is not None
        self.tokens.append(piece.tokens)
        self.logprobs.append(np.zeros(count, np.float32) if piece.logprobs is None else piece.logprobs)
        self.mask.append(np.full(count, sampled, np.uint8))
        self.runs = joined_runs(self.runs, piece.runs if sampled else ((self._version_before(row)[0][0], count),))
        self.supports.append((piece.support, count))
        self._at += count


def _ids(tokens: Any) -> IntArray:
    return np.asarray(tokens, dtype=np.int32).reshape(-1)
