"""Code in the documentation: Python compiles, TOML has settings that exist, commands have options that exist."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.cli import parser as make_parser
from asyncrl.config import all_keys
from asyncrl.config.suggestions import flatten

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = "cli.md"  # usage lines, from the parser itself
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Block(NamedTuple):
    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        for number, (kind, text) in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
            if kind == language:
                found.append(Block(page.name, number, kind, text))
    return found


def lines_of(block: Block) -> Iterator[list[str]]:
    """The words of every command line, without comments and continued lines joined."""
    for line in block.text.replace("\\\n", " ").splitlines():
        command = re.split(r"\s{2,}(?![-\w]*=)|\s#", re.sub(r"^\$ ", "", line))[0]
        first = command.split(" ")[0]
        if first in ("asyncrl", "make", "python") and "..." not in command and "[" not in command.split("'")[0]:
            words = shlex.split(command)
            ends = [place for place, word in enumerate(words) if word in ("|", ">", "&&", "&")]
            yield words[: ends[0]] if ends else words


def test_there_are_blocks_of_every_kind() -> None:
    assert len(blocks("python")) >= 15 and len(blocks("toml")) >= 15
    assert sum(1 for block in blocks("") for _ in lines_of(block)) >= 60


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_settings_exist(block: Block) -> None:
    known = set(all_keys())
    for key, _ in flatten(tomllib.loads(block.text)):
        table = re.sub(r"\.\d+|^policies\.\w+\.", "", key)
        open_table = any(table.startswith(f"{name}.") for name in known)  # options, args
        assert table in known or open_table or any(name.startswith(f"{table}.") for name in known), key


@pytest.mark.parametrize("block", [block for block in blocks("") if block.page != GENERATED], ids=str)
def test_commands_exist(block: Block) -> None:
    parser = make_parser()
    for words in lines_of(block):
        if words[0] == "asyncrl":
            try:
                parser.parse_args(words[1:])
            except SystemExit as end:
                assert end.code == 0, shlex.join(words)
        elif words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= TARGETS, shlex.join(words)
        elif words[1].endswith(".py"):
            assert (ROOT / words[1]).exists() or "/" not in words[1], shlex.join(words)
