"""Commands that write what a run gave: report, export."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, add_folder, command


def add(commands: Commands) -> None:
    """Declare them."""
    _add_export(commands)
    one = command(commands, "report", "write the run's report: one HTML file",
                   example="asyncrl report runs/my --out report.html")  # fmt: skip
    add_folder(one)
    one.add_argument("--out", type=Path, metavar="FILE", help="instead of RUN/report.html")
    one.set_defaults(run=_report)


def _add_export(commands: Commands) -> None:
    one = command(commands, "export", "write a checkpoint's weights as a folder for transformers and vLLM",
                   example="asyncrl export runs/my --step 40 --dtype bfloat16")  # fmt: skip
    add_folder(one)
    one.add_argument("--step", type=int, metavar="N", help="step of a checkpoint that is kept (default: the newest)")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="new or empty (default: RUN/export-step_N)")
    one.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
                     help="of the weights (default: auto, that of model.dtype)")  # fmt: skip
    one.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default: 5GB)")
    one.set_defaults(run=_export)


def _report(args: argparse.Namespace) -> int:
    from asyncrl.report import write_report
    from asyncrl.rundir import RunDir

    print(write_report(RunDir(args.folder).require(), out=args.out))
    return 0


def _export(args: argparse.Namespace) -> int:
    from asyncrl.export import export_command

    return export_command(
        args.folder, step=args.step, out=args.out, dtype=args.dtype, max_shard_size=args.max_shard_size
    )  # fmt: skip
