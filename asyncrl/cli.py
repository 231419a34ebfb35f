"""The command `asyncrl`: arguments in, exit code out.

Guarantees:
1. only the standard library is imported before the arguments are parsed, so `--help` answers at once;
2. a mistake of the user, or a refusal of the system (a file, the disk), prints its text and returns an exit code,
   without a traceback; all mistakes of a configuration are printed at once; a bug prints a traceback and returns code
   70;
3. no role package and nothing heavy (torch, redis, transformers, engines) is imported here or below.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.commands import COMMANDS

if TYPE_CHECKING:
    from asyncrl.errors import AsyncRLError

EXAMPLES = """examples:
  asyncrl demo                                    train a tiny model here, in a minute or two
  asyncrl init                                    five questions, then a configuration
  asyncrl check my.toml                           what would start, and what is wrong
  asyncrl launch all my.toml                      the whole run on this machine
  asyncrl status runs/my                          how it goes
  asyncrl tune runs/my max_staleness=8            change it while it runs
  asyncrl audit runs/my                           nothing lost, nothing trained twice

`asyncrl COMMAND --help` explains a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    from asyncrl.errors import EXIT_INTERNAL, AsyncRLError, file_error

    try:
        args = parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except AsyncRLError as error:
        return _print_error(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `asyncrl ... | head`
        _stop_output()
        return 141
    except OSError as error:
        return _print_error(file_error(error))
    except Exception:
        import traceback

        traceback.print_exc()
        print("error[internal] a bug in asyncrl: see the traceback above\n  -> please report it", file=sys.stderr)
        return EXIT_INTERNAL


def _print_error(error: AsyncRLError) -> int:
    """Print the error after everything that was printed before; return the exit code."""
    try:
        sys.stdout.flush()
    except OSError:  # the reader has closed the pipe, or the disk is full
        _stop_output()
    print(error.render(), file=sys.stderr)
    return error.exit_code


def _stop_output() -> None:
    """Discard what is left in the buffer of stdout: the interpreter would try to write it again at exit."""
    import os

    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous, disaggregated RL for language models on message queues.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=_Version, help="print the version and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module, function in COMMANDS:
        getattr(importlib.import_module(f"asyncrl.commands.{module}"), function)(commands)
    return top


class _Version(argparse.Action):
    """Prints the version. An action of its own, so that `--help` needs no import."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from asyncrl import __version__

        print(f"asyncrl {__version__}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
