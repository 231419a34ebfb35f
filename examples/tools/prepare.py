"""The start of an example: prompts, what its tool reads, and a tiny model that has seen a teacher with mistakes.

    python examples/tools/prepare.py search
    asyncrl launch all examples/tools/rl.toml examples/tools/search.toml

It writes `runs/tools/search`: rows, corpus or pages, a model with random weights, and `sft/export`, which
`asyncrl launch` trains in mode `sft`. `--steps 0` leaves that out.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

import tasks  # noqa: E402, RUF100

from asyncrl.demo.calculator import CHARACTERS, TEMPLATE  # noqa: E402, RUF100
from asyncrl.demo.tasks import write_jsonl  # noqa: E402, RUF100

TRAIN, HELD_OUT = 2000, 200
NOISE = 0.4  # of the teacher in the last rows; those before have no mistakes, so that calls are learned in few steps
CLEAN = 0.7  # share of the rows without mistakes
STEP_ROWS = 64  # as in sft.toml


def write_files(tool: str, folder: Path, *, steps: int) -> None:
    """Rows, what the tool reads, and a model with random weights."""
    from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

    start = folder / "start"
    make_tokenizer(start, characters=CHARACTERS, words=tasks.WORDS, chat_template=TEMPLATE)
    save_model(start, make_tiny_qwen3(len(SPECIAL_TOKENS) + len(CHARACTERS) + len(tasks.WORDS)))
    size = max(1, steps) * STEP_ROWS
    clean = tasks.demonstration_rows(tool, int(CLEAN * size), 0, noise=0.0)
    shown = tasks.demonstration_rows(tool, size - len(clean), 1, noise=NOISE)
    write_jsonl(folder / "demonstrations.jsonl", [*clean, *shown])
    write_jsonl(folder / "train.jsonl", tasks.rows(tool, TRAIN, 0, split="train"))
    write_jsonl(folder / "heldout.jsonl", tasks.rows(tool, HELD_OUT, 0, split="heldout"))
    if tool == "search":
        tasks.write_corpus(folder / "corpus.jsonl")
    if tool == "browser":
        tasks.write_site(folder / "site")


def train(folder: Path) -> None:
    """Supervised training on the demonstrations, as a run of its own. Raises SystemExit if it fails."""
    settings = {
        "run.dir": folder / "sft",
        "model.path": folder / "start",
        "data.path": folder / "demonstrations.jsonl",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "asyncrl", "launch", "all", str(HERE / "sft.toml"), "--plain", *words]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=tasks.TOOLS)
    parser.add_argument("--steps", type=int, default=140, help="of supervised training")
    parser.add_argument("--out", type=Path, help="another folder than runs/tools/TOOL")
    args = parser.parse_args()
    folder = (args.out or Path("runs/tools") / args.tool).absolute()
    shutil.rmtree(folder / "sft", ignore_errors=True)
    write_files(args.tool, folder, steps=args.steps)
    if args.steps:
        train(folder)


if __name__ == "__main__":
    main()
