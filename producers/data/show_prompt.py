"""The row of the data behind a group: `python -m producers.data.show_prompt --config RUN/config.toml --group 317`.

Run by `asyncrl trace`, which may not import roles. Prints one JSON object: `group`, `row`; if the data of the run is
gone, the error and an exit code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from asyncrl.config import load
from asyncrl.errors import EXIT_DATA, AsyncRLError
from asyncrl.images.rows import takes_images
from producers.data.prompts import BadPrompt, Prompts


def main(argv: list[str] | None = None) -> int:
    """Print the row; the exit code."""
    parser = argparse.ArgumentParser(prog="show_prompt")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--row", type=int, default=-1, help="its number in the data, if the buffer chose it")
    args = parser.parse_args(argv)
    try:
        config = load(args.config)
        prompts = Prompts(config.data, seed=config.run.seed, sees=takes_images(config.model.path))
        row = prompts.row_for(args.group, args.row)
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except BadPrompt as problem:
        print(problem.reason, file=sys.stderr)
        return EXIT_DATA
    print(msgspec.json.encode({"group": args.group, "row": row}).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
