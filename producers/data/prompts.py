"""The prompts of a run: from a group id to a row of the data and its token ids. No torch.

The buffer counts groups 0, 1, 2, ...; a producer maps them to rows. Guarantees:
1. `row_for(group)` is a function of (data, run.seed, group): `epoch, position = divmod(group, rows)`, and the row is
   the epoch's permutation at that position (the position itself without `data.shuffle`, that of the user's order with
   `data.sampler`), so every producer agrees. With `data.ratios` each part of the data has its own epochs
   (`producers.data.mixing`). With `data.sampler = "difficulty"` it is the row that the buffer chose;
2. an iterable without a length is read as far as the group requires and kept in memory; its first epoch is in its own
   order, because a permutation needs the length; later epochs are permuted like any other;
3. an error of the data as a whole is `config.data` with file, row and column; an error of one row is a `BadPrompt` with
   a reason, and the run goes on. Videos and audio are refused, and images unless the model sees them: of the first row
   as an error of the data;
4. rows are plain JSON values: they travel with the samples, with digests instead of images (`asyncrl.images.rows`).

Example: 5 rows and group 12 give epoch 2, position 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from asyncrl.config import DataConfig
from asyncrl.config.media import FRAMES_REMEDY, MEDIA_COLUMNS, MEDIA_REMEDY, find_media
from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.digests import image_digests
from asyncrl.images.model_inputs import ImageInputs
from asyncrl.images.rows import VIDEOS
from asyncrl.plugins import load_object
from asyncrl.runtime.data_files import list_files, read_table, split_paths, unknown_kind
from producers.data.images import PromptImages
from producers.data.mixing import Mix
from producers.data.openai_items import ApiError
from producers.data.prompt_forms import apply_settings, is_chat, split_prompt
from producers.data.sampler import AllRows, Sampler
from producers.data.tokenizer import Tokenizer

Row = dict[str, Any]
_MASK = (1 << 64) - 1


class BadPrompt(Exception):
    """This row cannot be generated from; `reason` goes to the dead letters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Prompts:
    """Rows by group id. `sees`: the model takes images (`asyncrl.images.rows.takes_images`)."""

    def __init__(self, data: DataConfig, *, seed: int, sees: bool = False) -> None:
        self._data = data
        self._seed = seed
        self._shuffle = data.shuffle or bool(data.sampler)
        self._rows = _load_source(data.source) if data.source else _load_files(data.path)
        self._mix = self._make_mix(data) if data.ratios else None
        self._rows.raw = (data.image_key, data.prompt_key, VIDEOS) if sees else ()
        self._images = PromptImages(data, self._read) if sees else None
        self._orders: dict[int, dict[int, npt.NDArray[np.int64]]] = {}  # by part of a mix and epoch
        first = self._rows.get(0)
        if first is None:
            raise ConfigError("config.data", "it has no rows", where=data.source or data.path)
        unseen = "" if sees or not first.get(data.image_key) else f"column {data.image_key!r}"
        if media := find_media(first, sees=sees) or unseen:
            what = f"row 0 has {media}, and prompts are text alone" if not sees else f"row 0 has {media}"
            remedy = FRAMES_REMEDY if sees and "video" in media else MEDIA_REMEDY
            raise ConfigError("config.data", what, where=data.source or data.path, remedy=remedy)
        if data.prompt_key not in first:
            raise ConfigError(
                "config.data",
                f"row 0 has no column {data.prompt_key!r} (data.prompt_key); it has: "
                f"{', '.join(sorted(first)) or 'none'}",
                where=data.source or data.path,
            )
        self.columns = apply_settings(first, data)  # of the first row, as they are in the data
        self._sampler = self._make_sampler(data.sampler) if data.sampler else None

    def row_for(self, group: int, chosen: int = -1) -> Row:
        """The row of a group, with its prompt as `[data]` requires, and with digests instead of images. `chosen`: its
        number if the buffer chose it.

        Raises:
            BadPrompt: its images cannot be used, or the data has no such row.
            ConfigError: `config.data`, a source has no rows.
        """
        if chosen < 0:
            return self._prepare(self._find_number(group))
        if self._rows.length is None or chosen >= self._rows.length:
            raise BadPrompt(f"row: {chosen} was chosen, the data has {self._rows.length} rows")
        return self._prepare(chosen)

    @property
    def chosen_among(self) -> int:
        """The number of rows, if the buffer chooses among them; else 0."""
        return (self._rows.length or 0) if self._data.chosen_by_buffer else 0

    def images_of(self, row: Row) -> tuple[bytes, ...]:
        """The encoded images of a row of `row_for`, in order. Raises `BadPrompt` if the data has changed meanwhile."""
        try:
            return () if self._images is None else self._images.images_of(row)
        except ImageProblem as problem:
            raise BadPrompt(problem.reason) from None

    def _read(self, number: int) -> tuple[Row, Path]:
        row = self._rows.get(number)
        assert row is not None
        return apply_settings(row, self._data), self._rows.folder(number)

    def _prepare(self, number: int) -> Row:
        if self._images is None:
            row = self._read(number)[0]
            if image_digests(row):  # they would pass for the digests of images that a model sees
                raise BadPrompt("media: it has column 'images', and prompts are text alone")
            return row
        try:
            return {str(key): plain_value(value) for key, value in self._images.row(number).items()}
        except ImageProblem as problem:
            raise BadPrompt(problem.reason) from None

    def _find_number(self, group: int) -> int:
        if self._rows.length is None and self._rows.get(group) is not None:
            return group
        if self._mix is not None:
            part, number = self._mix.place(group)
            return self._mix.starts[part] + self._find_position(number, self._mix.sizes[part], part)
        length = self._rows.length
        assert length is not None  # `get` beyond the end of an iterable has found its length
        return self._find_position(group, length)

    def _find_position(self, number: int, length: int, part: int = 0) -> int:
        """The row of the `number`-th group of these rows, `length` of them."""
        epoch, position = divmod(number, length)
        if self._shuffle and not (epoch == 0 and self._rows.unsized):
            position = int(self._permutation(epoch, length, part)[position])
        return position

    def count(self, limit: int) -> int:
        """The number of rows, at most `limit`: an iterable without a length is read as far as that."""
        if self._rows.length is None:
            self._rows.get(limit - 1)
        return limit if self._rows.length is None else min(limit, self._rows.length)

    def sample(self, most: int) -> Iterator[Row | BadPrompt]:
        """Rows spread evenly over the data, `most` of them or all; of an iterable without a length the first ones."""
        count = self.count(most)
        length = self._rows.length or count
        for number in range(count):
            try:
                yield self._prepare(number * length // count)
            except BadPrompt as problem:
                yield problem

    def _permutation(self, epoch: int, length: int, part: int) -> npt.NDArray[np.int64]:
        orders = self._orders.setdefault(part, {})
        if epoch not in orders:
            if len(orders) > 1:  # at a border groups of at most two epochs are in flight
                orders.pop(min(orders))
            key = np.array([self._seed + part & _MASK, epoch], dtype=np.uint64)
            orders[epoch] = (
                np.random.Generator(np.random.Philox(key=key)).permutation(length)
                if self._sampler is None
                else self._sampler.order(epoch)
            )
        return orders[epoch]

    def _make_mix(self, data: DataConfig) -> Mix:
        for number, size in enumerate(self._rows.parts, start=1):
            if not size:
                raise ConfigError("config.data", f"part {number} has no rows", where=f"data.path = {data.path!r}")
        return Mix(self._rows.parts, data.ratios)

    def _make_sampler(self, name: str) -> Sampler | None:
        """The user's order; None if the buffer chooses."""
        if self._rows.length is None or self._rows.unsized:
            what = "it orders rows by number, and data.source gives no sequence"
            raise ConfigError("config.data", what, where=f"data.sampler = {name!r}")
        if self._data.chosen_by_buffer:
            return None
        return Sampler(name, AllRows(self._rows.get, self._rows.length), seed=self._seed)


class _Rows:
    """Rows by number, read on demand. `length` is None before the end of an iterable; `folder(number)` is where paths
    in a row begin; `parts` are the numbers of rows of the parts of `data.path`; the columns `raw`, of images and
    prompts, stay as the data has them.
    """

    raw: tuple[str, ...] = ()

    def __init__(
        self,
        read: Callable[[int], Any],
        length: int | None,
        where: str,
        rest: Iterator[Any] | None = None,
        folder: Callable[[int], Path] = lambda _: Path.cwd(),
        *,
        parts: tuple[int, ...] = (),
    ) -> None:
        self.length = length
        self.parts = parts
        self.folder = folder
        self.unsized = rest is not None
        self._read = read
        self._where = where
        self._rest = rest
        self._kept: list[Row] = []

    def get(self, number: int) -> Row | None:
        """The row, None beyond the end."""
        if self._rest is None:
            if self.length is not None and number >= self.length:
                return None
            return self._plain(number, self._read(number))
        while self.length is None and len(self._kept) <= number:
            try:
                self._kept.append(self._plain(len(self._kept), next(self._rest)))
            except StopIteration:
                self.length = len(self._kept)
        return self._kept[number] if number < len(self._kept) else None

    def _plain(self, number: int, row: Any) -> Row:
        if not isinstance(row, dict) and hasattr(row, "keys"):
            row = {key: row[key] for key in row.keys()}  # noqa: SIM118
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ConfigError("config.data", f"row {number} is a {kind}, not a mapping", where=self._where)
        # Bytes are dropped, but not media: they are read as images, or `find_media` refuses them.
        media = {*MEDIA_COLUMNS, *self.raw[:1]}
        kept = {key: value for key, value in row.items() if not isinstance(value, bytes) or key in media}
        return {str(key): value if key in self.raw else _plain_column(value) for key, value in kept.items()}


def _plain_column(value: Any) -> Any:
    return f"{len(value)} bytes" if isinstance(value, bytes) else plain_value(value)


def plain_value(value: Any) -> Any:
    """JSON form of a value: numpy becomes lists and numbers, NaN becomes None, anything unknown its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray | np.generic):
        return plain_value(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return str(value)


# ---------------------------------------------------------------- reading


def _load_source(dotted: str) -> _Rows:
    function = load_object(dotted, code="config.data", where="data.source")
    rows = function() if callable(function) else function
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, dict):
        return _Rows(rows.__getitem__, len(rows), dotted)
    if not isinstance(rows, Iterable) or isinstance(rows, str | dict):
        raise ConfigError(
            "config.data", f"{dotted} gives a {type(rows).__name__}, not an iterable of rows", where="data.source"
        )
    return _Rows(_nothing, None, dotted, iter(rows))


def _nothing(number: int) -> Any:
    raise IndexError(number)


def _load_files(paths: str) -> _Rows:
    each = [list_files(part) for part in split_paths(paths)]
    files = [path for part in each for path in part]
    parts = [_read_file(path) for path in files]
    rows = iter(parts)
    sizes = tuple(sum(len(next(rows)) for _ in part) for part in each)
    ends = np.cumsum([len(part) for part in parts])

    def part_of(number: int) -> int:
        return int(np.searchsorted(ends, number, side="right"))

    def read(number: int) -> Any:
        part = part_of(number)
        return parts[part][number - (int(ends[part - 1]) if part else 0)]

    return _Rows(
        read, int(ends[-1]) if parts else 0, paths, folder=lambda number: files[part_of(number)].parent, parts=sizes
    )


def _read_file(path: Path) -> Sequence[Any]:
    try:
        if path.suffix in (".parquet", ".arrow"):
            return _Table(path)
        if path.suffix == ".jsonl":
            return _read_lines(path)
        if path.suffix == ".json":
            rows = msgspec.json.decode(path.read_bytes())
            if not isinstance(rows, list):
                raise ConfigError("config.data", "it is not a list of rows", where=str(path))
            return rows
    except (OSError, *UNREADABLE) as error:
        raise ConfigError("config.data", str(error), where=str(path)) from None
    raise ConfigError("config.data", unknown_kind(path), where=str(path))


def _read_lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                rows.append(msgspec.json.decode(line))
            except UNREADABLE as error:
                raise ConfigError("config.data", str(error), where=f"{path}:{number}") from None
    return rows


class _Table(Sequence[Any]):
    """Rows of a Parquet or Arrow file; the columns stay in Arrow's form until a row is read."""

    def __init__(self, path: Path) -> None:
        self._table = read_table(path)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, number: Any) -> Any:
        return self._table.slice(number, 1).to_pylist()[0]


# ---------------------------------------------------------------- token ids


def _encode(prompt: Any, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """Ids of a text or of chat messages. Raises `BadPrompt` for what template or tokenizer refuses."""
    try:
        return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt, tools)
    except ConfigError as error:
        if error.code != "config.template":  # no row could be encoded
            raise
        raise BadPrompt(f"template: {error.message}") from None
    except Exception as error:  # the package of tokenizers raises bare Exception
        raise BadPrompt(f"prompt: {type(error).__name__}: {error}") from None


def encode_prompt(
    row: Row,
    data: DataConfig,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    inputs: ImageInputs | None = None,
    images: Sequence[bytes] = (),
) -> npt.NDArray[np.int32]:
    """Token ids of a row's prompt, i4 `[P]`. `tools`: schemas that a chat template may show, before those of the prompt
    itself; `inputs`: of a vision-language model, which gets the row's encoded `images`.

    Raises:
        BadPrompt: an image that cannot be read, images for a language model, videos or audio (also in other columns),
            no prompt, another type, messages that the template refuses, no tokens, or more than
            `data.max_prompt_tokens`.
        ConfigError: the whole data set cannot be encoded (chat messages without a template).
    """
    if media := find_media(row, sees=bool(image_digests(row))):
        raise BadPrompt(f"media: it has {media}, and prompts are text alone")
    try:
        prompt, own = split_prompt(row.get(data.prompt_key))
    except ApiError as error:
        raise BadPrompt(f"prompt: {error}") from None
    if is_chat(prompt) and not data.chat_template:
        message = f"column {data.prompt_key!r} holds chat messages and data.chat_template is off"
        raise ConfigError("config.data", message, where=data.source or data.path)
    if isinstance(prompt, str) or is_chat(prompt):
        ids = _encode(prompt, tokenizer, (*tools, *own))
    else:
        kind = "missing" if prompt is None else f"a {type(prompt).__name__}"
        raise BadPrompt(f"prompt: column {data.prompt_key!r} is {kind}, not text or chat messages")
    if not ids:
        raise BadPrompt("prompt: it has no tokens")
    if inputs is not None:
        try:
            ids = inputs.expand(ids, images).tolist()
        except ValueError as error:
            raise BadPrompt(f"image: {error}") from None
    if len(ids) > data.max_prompt_tokens:
        raise BadPrompt(f"too_long: {len(ids)} tokens, data.max_prompt_tokens = {data.max_prompt_tokens}")
    return np.asarray(ids, dtype=np.int32)
