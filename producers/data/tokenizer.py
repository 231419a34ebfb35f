"""Text to token ids and back, from a model folder, without torch.

Guarantees:
1. the `tokenizers` package alone reads `tokenizer.json`; transformers is imported only for a chat template or for a
   folder without `tokenizer.json`, and never downloads anything;
2. `eos_ids` is the union of the end-of-sequence tokens of `config.json`, `generation_config.json` and the tokenizer; a
   folder without any is refused (`config.tokenizer`), because such a policy could not end an answer;
3. chat templates are rendered by transformers' sandboxed Jinja.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.runtime.model_folder import load_tokenizer

Messages = Sequence[Mapping[str, Any]]


class Tokenizer:
    """The tokenizer of a model folder."""

    def __init__(self, path: str | Path, *, trust_remote_code: bool) -> None:
        self._folder = Path(path)
        self._trust_remote_code = trust_remote_code
        self._auto: Any = None
        self._fast = self._load_fast()
        self.end_id = -1  # the tokenizer's own end of sequence, else the first of the model's
        self.eos_ids = self._find_eos()

    def _load_fast(self) -> FastTokenizer | None:
        file = self._folder / "tokenizer.json"
        if not file.exists():
            self.transformers()
            return None
        try:
            fast = FastTokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception for any damage
            raise ConfigError("config.tokenizer", str(error), where=str(file)) from None
        fast.no_truncation()
        fast.no_padding()
        return fast

    def transformers(self) -> Any:
        """The same tokenizer as transformers has it. Raises `config.tokenizer`."""
        if self._auto is None:
            try:
                self._auto = load_tokenizer(self._folder, trust_remote_code=self._trust_remote_code)
            except (ImportError, OSError, ValueError, KeyError) as error:
                raise ConfigError("config.tokenizer", str(error), where=str(self._folder)) from None
        return self._auto

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with a BOS if the tokenizer adds one, never with an EOS at the end."""
        if self._fast is None:
            ids = list(self._auto.encode(text))
            bare = list(self._auto.encode(text, add_special_tokens=False))
        else:
            ids = self._fast.encode(text).ids
            bare = self._fast.encode(text, add_special_tokens=False).ids
        ends = bool(ids) and ids[-1] in self.eos_ids and ids[-1:] != bare[-1:]
        return ids[:-1] if ends else ids

    def ordinary_ids(self) -> list[int]:
        """Ids of the model's tokens that are neither special nor placeholders, in order."""
        known = self._auto.get_vocab() if self._fast is None else self._fast.get_vocab()
        ids = {*range(self._count_rows())} & set(known.values()) - set(self.added_tokens()) - set(self.eos_ids)
        return sorted(ids) or [self.end_id]

    def encode_answer(self, text: str) -> list[int]:
        """Ids of an answer: no special token at the start, one end of sequence at the end."""
        if self._fast is None:
            ids = list(self._auto.encode(text, add_special_tokens=False))
        else:
            ids = self._fast.encode(text, add_special_tokens=False).ids
        return ids if ids and ids[-1] in self.eos_ids else [*ids, self.end_id]

    def has_template(self) -> bool:
        """Whether chat messages can be encoded."""
        return bool(self.transformers().chat_template)

    def encode_part(self, text: str) -> list[int]:
        """Ids of a text in the middle of a sequence, without special tokens."""
        if self._fast is None:
            return list(self._auto.encode(text, add_special_tokens=False))
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids of chat messages by the tokenizer's template, with the opening of the answer."""
        return self.encode_part(self.render_chat(messages, opened=True, tools=tools))

    def render_chat(self, messages: Messages, *, opened: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of chat messages by the tokenizer's template; `opened`: with the opening of an answer.

        Raises:
            ConfigError: there is no template (`config.tokenizer`), or it refuses these messages (`config.template`).
        """
        auto = self.transformers()
        if not auto.chat_template:
            raise ConfigError(
                "config.tokenizer",
                "the prompts are chat messages and the tokenizer has no chat template",
                where=str(self._folder),
                remedy="give the tokenizer a chat template, or the prompts as plain text",
            )
        from jinja2 import TemplateError  # what transformers renders with

        try:
            return str(
                auto.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=opened,
                    tools=[dict(tool) for tool in tools] or None,
                )
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise ConfigError(
                "config.template",
                f"it refuses the messages: {error}",
                where=str(self._folder),
                remedy="use another template, or other messages",
            ) from None

    def has_ids(self, ids: Sequence[int]) -> bool:
        """Whether the model has a row for each of these ids."""
        count = self._count_rows()
        return all(0 <= token < count for token in ids)

    def _count_rows(self) -> int:
        """Tokens of the model, else those of the tokenizer."""
        tree = self._json("config.json")
        count = (tree.get("text_config") or {}).get("vocab_size") or tree.get("vocab_size")
        if isinstance(count, int):
            return count
        return len(self._auto) if self._fast is None else int(self._fast.get_vocab_size())

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids without special tokens, or with them."""
        plain = [int(token) for token in ids]
        if self._fast is None:
            return str(self._auto.decode(plain, skip_special_tokens=not special))
        return str(self._fast.decode(plain, skip_special_tokens=not special))

    def added_tokens(self) -> dict[int, AddedToken]:
        """By id, the tokens that were added to the vocabulary: special tokens, and marks as `</think>`."""
        return dict(self._auto.added_tokens_decoder if self._fast is None else self._fast.get_added_tokens_decoder())

    def _find_eos(self) -> tuple[int, ...]:
        found: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            tree = self._json(name)
            for section in (tree, tree.get("text_config") or {}):
                value = section.get("eos_token_id")
                found.update(value if isinstance(value, list) else [] if value is None else [value])
        names = ("tokenizer_config.json", "special_tokens_map.json")
        token = next((value for name in names if (value := self._json(name).get("eos_token"))), None)
        text = token.get("content") if isinstance(token, dict) else token
        if text is not None and self._fast is not None:
            known = self._fast.token_to_id(text)
            found.update([] if known is None else [known])
            self.end_id = -1 if known is None else int(known)
        if self._auto is not None and self._auto.eos_token_id is not None:
            found.add(self._auto.eos_token_id)
            self.end_id = int(self._auto.eos_token_id)
        if not found:
            raise ConfigError(
                "config.tokenizer",
                "neither the model nor the tokenizer names an end of sequence",
                where=str(self._folder),
            )
        self.end_id = min(found) if self.end_id < 0 else self.end_id
        return tuple(sorted(int(token) for token in found))

    def _json(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        try:
            tree = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
        except (OSError, *UNREADABLE) as error:
            raise ConfigError("config.tokenizer", str(error), where=str(file)) from None
        return tree if isinstance(tree, dict) else {}
