"""Commands that write results of a run: report, export."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, add_folder, command

REPORT_EXAMPLES = """examples:
  asyncrl report runs/my                          RUN/report.html
  asyncrl report runs/my --out report.html
  asyncrl report runs/a runs/b runs/c             ./comparison.html
"""


def add(commands: Commands) -> None:
    _add_export(commands)
    one = command(
        commands, "report", "write the run's report, or a comparison of several: one HTML file", epilog=REPORT_EXAMPLES
    )
    add_folder(one)
    one.add_argument("others", metavar="RUN", nargs="*", type=Path, help="runs to compare it with")
    one.add_argument("--out", type=Path, metavar="FILE", help="instead of RUN/report.html, or ./comparison.html")
    one.set_defaults(run=_report)


def _add_export(commands: Commands) -> None:
    one = command(
        commands,
        "export",
        "write a checkpoint's weights as a folder for transformers and vLLM",
        example="asyncrl export runs/my --step 40 --dtype bfloat16",
    )
    add_folder(one)
    one.add_argument("--step", type=int, metavar="N", help="step of a checkpoint that is kept (default: the newest)")
    one.add_argument("--out", type=Path, metavar="FOLDER", help="new or empty (default: RUN/export-step_N)")
    one.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights (default: auto, that of model.dtype)",
    )
    one.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default: 5GB)")
    one.set_defaults(run=_export)


def _report(args: argparse.Namespace) -> int:
    from asyncrl.report import write_comparison, write_report
    from asyncrl.runtime.run_dir import RunDir

    runs = [RunDir(folder).require() for folder in (args.folder, *args.others)]
    print(write_comparison(runs, out=args.out) if args.others else write_report(runs[0], out=args.out))
    return 0


def _export(args: argparse.Namespace) -> int:
    from asyncrl.runs.export import export_command

    return export_command(
        args.folder, step=args.step, out=args.out, dtype=args.dtype, max_shard_size=args.max_shard_size
    )
