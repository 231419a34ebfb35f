"""What a turn of the policy says: its reasoning, its text and its tool calls.

By a parser of text (`producers.tools.parsers`), or by those of an engine (`environment.parser = "vllm:kimi_k2"`,
`environment.reasoning_parser = "vllm:deepseek_r1"`), which see special tokens and token ids. Guarantees:
1. it raises nothing, whatever the policy says: an error of a parser is a malformed call;
2. `cut_reasoning` gives the turn's own tokens behind its reasoning; nothing is encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.config.sections.environment import EnvironmentConfig, engine_parser
from asyncrl.environment import ToolCall
from producers.data.tokenizer import Tokenizer
from producers.tools.engine_parsers import Schemas, Split, Splitter, make_splitter, read_arguments
from producers.tools.parsers import SHOWN, find_parser


class Reading(NamedTuple):
    """The parts of a turn, and a message for each malformed call."""

    text: str  # without reasoning, calls and special tokens
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
    reasoning: str = ""


class TurnReader:
    """Reads turns as the configuration says. Raises `config.environment`, `config.type` or `config.extra`."""

    def __init__(self, config: EnvironmentConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        package, calls = engine_parser(config.parser)
        also, reasoning = engine_parser(config.reasoning_parser)
        self._parser = find_parser(config.parser) if not package else None
        self._split: Splitter | None = None
        if package or also:
            self._split = make_splitter(package or also, calls=calls, reasoning=reasoning, tokenizer=tokenizer)
            added = tokenizer.added_tokens()
            self._added = frozenset(added)
            self._special = re.compile("|".join(re.escape(token.content) for token in added.values() if token.special))
        self.splits_reasoning = bool(reasoning)

    def read(self, text: str, ids: Sequence[int], tools: Schemas, *, stop: str = "") -> Reading:
        """The parts of a turn from its text without special tokens and its ids. `stop` ended it and is left out."""
        split = Split("", text, [])
        if self._split is not None:
            ending = len(ids) - (bool(ids) and ids[-1] in self._tokenizer.eos_ids)
            whole = self._tokenizer.decode(ids[:ending], special=True)
            try:
                reasoning, shown, calls = self._split(whole.partition(stop)[0] if stop else whole, ids, tools)
                split = Split(self._special.sub("", reasoning), self._special.sub("", shown), calls)
            except Exception as error:  # the parsers of a package raise whatever they meet
                return Reading(text, malformed=(f"it cannot be parsed: {type(error).__name__}: {str(error)[:SHOWN]}",))
        if self._parser is not None:
            parsed = self._parser(split.text)
            shown = split.text.partition("<tool_call>")[0].strip() if parsed.calls else split.text
            return Reading(shown, *parsed, reasoning=split.reasoning)
        found = [(name, arguments, read_arguments(arguments)) for name, arguments in split.calls]
        return Reading(
            split.text.strip() if found else split.text,
            tuple(ToolCall(name, arguments) for name, _, arguments in found if arguments is not None),
            tuple(
                f"the arguments of {name} are no JSON object: {text[:SHOWN]}"
                for name, text, arguments in found
                if arguments is None
            ),
            split.reasoning,
        )

    def cut_reasoning(self, ids: Sequence[int], reasoning: str) -> tuple[int, ...]:
        """The tokens behind the reasoning and the token that closes it; all of them where nothing would be left."""
        decode = self._tokenizer.decode
        before, found, _ = decode(ids).partition(reasoning)
        low, high = 0, len(ids)
        while low < high:  # the fewest tokens that hold the reasoning
            middle = (low + high) // 2
            enough = len(decode(ids[:middle])) >= len(before + found)
            low, high = (low, middle) if enough else (middle + 1, high)
        closing = next((place for place in range(low, len(ids)) if ids[place] in self._added), len(ids))
        rest = list(ids[closing + 1 :])
        while rest and not decode(rest[:1], special=True).strip():  # templates leave out the space there
            del rest[0]
        return tuple(rest) if found and rest and rest[0] not in self._tokenizer.eos_ids else tuple(ids)
