"""Checks the images of the first rows of a data file, for a model that sees them.

Each row is normalised as a producer does it, and the header of each image is read; nothing is decoded.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import Config, DataConfig
from asyncrl.config.sections.environment import AGENT
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.images.decoding import ImageProblem, check_image, require_pillow
from asyncrl.images.rows import normalise_row
from asyncrl.runtime.data_files import first_table_rows

LOOKED = 16  # rows of a file
#: Their turns hold no images. Of other engines `capabilities` knows, or the first sample of a run.
TEXT_ENVIRONMENTS, TEXT_ENGINES = (AGENT, "verifiers"), ("vllm", "vllm_http", "sglang")
REMEDY = "correct the row, or remove it: docs/images.md has the forms of images"


def check_images(config: Config, path: Path, *, where: str) -> Iterator[AsyncRLError]:
    """The first row whose images cannot be used."""
    data = config.data
    try:
        for number, row in enumerate(_first_rows(path)):
            prompt = row.get(data.prompt_key)
            if data.as_chat and isinstance(prompt, str):
                row = {**row, data.prompt_key: [{"role": "user", "content": prompt}]}  # noqa: PLW2901
            found, problem = _look(row, data, path.parent)
            if problem:
                yield ConfigError("config.data", f"row {number}: {problem}", where=where, remedy=REMEDY)
                return
            if found and (blind := _find_blind(config, row)):
                name, remedy = blind
                what = f"row {number} has images, and {name} reads text alone in environments of several turns"
                yield ConfigError("config.conflict", what, where=name.partition(" ")[0], remedy=remedy)
                return
    except ConfigError as error:
        yield error
    except (OSError, ImportError, *UNREADABLE):  # the check of the file itself reports it
        return


def _find_blind(config: Config, row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The setting of what takes no images in several turns of the row, and a remedy; None if everything does."""
    environment = config.environment_for(row) or config.environment
    if environment.is_single_turn:
        return None
    if environment.name in TEXT_ENVIRONMENTS:
        return f"environment.name = {environment.name!r}", "set it to 'single_turn', or write the environment"
    if config.producers.engine in TEXT_ENGINES:
        return f"producers.engine = {config.producers.engine!r}", "set it to 'hf'"
    return None


def _look(row: dict[str, Any], data: DataConfig, folder: Path) -> tuple[int, str]:
    """The number of images of a row, and why they cannot be used; empty if they can."""
    try:
        found = normalise_row(row, prompt_key=data.prompt_key, image_key=data.image_key, folder=folder)
        if found.images:
            require_pillow()
        for number, image in enumerate(found.images.values()):
            try:
                check_image(image)
            except ImageProblem as problem:
                return 0, f"image {number} of it: {problem.reason.removeprefix('image: ')}"
    except ImageProblem as problem:
        return 0, problem.reason.removeprefix("image: ")
    return len(found.images), ""


def _first_rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix in (".parquet", ".arrow"):
        rows: Any = first_table_rows(path, LOOKED)
    elif path.suffix == ".json":
        rows = json.loads(path.read_bytes())[:LOOKED]
    else:
        with path.open("rb") as lines:
            rows = [json.loads(line) for line in itertools.islice(filter(bytes.strip, lines), LOOKED)]
    return (row for row in rows if isinstance(row, dict))
