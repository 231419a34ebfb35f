"""Shared by several commands: the command with its examples, and the options of a configuration and of output."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command(
    commands: Commands,
    name: str,
    text: str,
    *,
    example: str = "",
    epilog: str = "",
) -> argparse.ArgumentParser:
    """A command with an example below its options."""
    return commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog or f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_configs(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "configs",
        metavar="CONFIG.toml",
        nargs="+",
        type=Path,
        help="the run's configuration; of several files each wins over those before it",
    )
    add_set(one)
    one.add_argument(
        "--policy",
        dest="overrides",
        action="append",
        metavar="NAME",
        type=policy_override,
        help="with several policies in the file: only this one",
    )


def add_set(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one setting, e.g. --set learner.steps=20; may be repeated",
    )
    one.add_argument(
        "--preset",
        dest="overrides",
        action="append",
        metavar="NAME",
        type=preset_override,
        help="settings of an algorithm, on top of the file: grpo, dapo, gspo, ... or a .toml",
    )


def preset_override(name: str) -> str:
    """`--preset dapo` is `--set learner.algorithm.preset=dapo`."""
    return f"learner.algorithm.preset={name}"


def policy_override(name: str) -> str:
    """`--policy first` is `--set run.policy=first`."""
    return f"run.policy={name}"


def add_output(one: argparse.ArgumentParser) -> None:
    one.add_argument("--verbose", action="store_true", help="show every line of every process")
    one.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def add_folder(one: argparse.ArgumentParser, text: str = "folder of the run") -> None:
    """The run folder of a command."""
    one.add_argument("folder", metavar="RUN", type=Path, help=text)


def add_place(one: argparse.ArgumentParser, text: str = "folder of the run") -> None:
    """The run of a command that also works by address alone: its folder, or the buffer's URL with a key file."""
    one.add_argument("folder", metavar="RUN", nargs="?", type=Path, help=text)
    one.add_argument("--connect", default="", metavar="URL", help="address of the buffer, instead of a folder")
    one.add_argument("--key", default="", metavar="FILE", help="key file")


def seconds(low: float, high: float) -> Callable[[str], float]:
    """An argparse type: seconds between two limits, so that no wait is endless (`nan` and `inf` are refused)."""

    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: seconds between {low:g} and {high:g}")
        return value

    parse.__name__ = "seconds"  # argparse shows this name if the text is not a number
    return parse
