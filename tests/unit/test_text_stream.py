"""The text of an answer as it grows: what is emitted is the text, a stop is found at its token, decoding is linear."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_folder import write_folder
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from producers.agents.dialogue import TextStream
from producers.data.tokenizer import Tokenizer

WORDS = ("\u2581one", "\u2581two", "three", "\u2581", "f", "our")


class Counting:
    """A tokenizer that counts the tokens which it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoded = 0
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """One of bytes, and one whose decoder drops the first space."""
    of_bytes = write_folder(tmp_path_factory.mktemp("bytes"))
    of_words = tmp_path_factory.mktemp("words")
    fast = FastTokenizer(models.BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=[]))
    fast.add_special_tokens(["</s>"])
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>").save_pretrained(of_words)
    return [Tokenizer(folder, trust_remote_code=False) for folder in (of_bytes, of_words)]


def pieces(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [list(ids[begin:end]) for begin, end in itertools.pairwise(edges)]


@given(
    ids=st.lists(st.integers(0, 255), max_size=60), cuts=st.lists(st.integers(0, 99), max_size=12), words=st.booleans()
)
def test_what_is_emitted_is_the_text(
    tokenizers: list[Tokenizer], ids: list[int], cuts: list[int], *, words: bool
) -> None:
    """Also of bytes that are no characters, and of spaces that a decoder drops at the start alone."""
    if words:
        ids = [number % len(WORDS) for number in ids]
    tokenizer = tokenizers[words]
    heard: list[str] = []
    stream = TextStream(tokenizer, (), heard.append)
    for piece in pieces(ids, cuts):
        assert stream.find_stop(piece) is None
    stream.rest()
    assert "".join(heard) == tokenizer.decode(ids)


@given(text=st.text("abé\U0001f600 ", max_size=30), cuts=st.lists(st.integers(0, 99), max_size=8))
def test_a_stop_is_found_at_its_last_token(tokenizers: list[Tokenizer], text: str, cuts: list[int]) -> None:
    tokenizer, stop = tokenizers[0], "\U0001f600|"
    ids = tokenizer.encode(text + stop + "and more")
    heard: list[str] = []
    stream = TextStream(tokenizer, (stop, "never"), heard.append)
    before = 0
    for piece in pieces(ids, cuts):
        place = stream.find_stop(piece)
        if place is not None:
            break
        before += len(piece)
    assert place is not None and place > before and stream.stop == stop
    assert tokenizer.decode(ids[:place]) == text + stop and "".join(heard) == text


def test_decoding_takes_linear_time(tokenizers: list[Tokenizer]) -> None:
    counting = Counting(tokenizers[0])
    stream = TextStream(counting, ("\n\n",), None)
    for _ in range(500):
        assert stream.find_stop([64 + number for number in range(8)]) is None
    assert counting.decoded <= 3 * 4_000
