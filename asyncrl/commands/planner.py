"""The command that forecasts: plan."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, add_configs, command

EXAMPLES = """examples:
  asyncrl plan my.toml --from runs/my                          this run's machines, these settings, and better ones
  asyncrl plan my.toml --from runs/my --set buffer.max_staleness=8 --set producers.count=12
  asyncrl plan my.toml --from runs/my --gpus 8,64,1000         how many for the learner, how many for producers
  asyncrl plan my.toml --layouts 64,256                        layouts of a Megatron learner that fit N devices
  asyncrl plan my.toml --assume engine_tokens_s=4000 --assume train_token_s=2e-5 --assume length_mean=3000

what can be assumed (seconds unless said): decode_s, decode_sample_s, or engine_tokens_s of one engine; train_s,
  train_token_s; length_mean and length_cv in tokens; reward_s, publish_s, checkpoint_s, swap_s, group_bytes
"""


def add(commands: Commands) -> None:
    one = command(
        commands, "plan", "forecast throughput and staleness of a configuration, and suggest settings", epilog=EXAMPLES
    )
    add_configs(one)
    one.add_argument(
        "--from", dest="run_folder", type=Path, metavar="RUN", help="take the machines' speed from the logs of this run"
    )
    one.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a number that was not measured, or another one; may be repeated",
    )
    one.add_argument(
        "--gpus", type=_numbers, default=(), metavar="N[,N...]", help="also print the best division of N devices"
    )
    one.add_argument(
        "--fixed-batch",
        action="store_true",
        help="with --gpus: keep buffer.batch_groups (default: it grows with the devices)",
    )
    one.add_argument(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="steps that are played (default: those of the run, at most 40)",
    )
    one.add_argument(
        "--cores",
        type=float,
        metavar="N",
        help="cores that producers and learner share (default: by their devices; 0: none)",
    )
    one.add_argument(
        "--layouts", type=_numbers, default=(), metavar="N[,N...]",
        help="print only the layouts of a Megatron learner that fit N devices, computed from the model's sizes",
    )  # fmt: skip
    one.add_argument(
        "--device-gb", type=int, default=80, metavar="GB", help="with --layouts: memory of a device (default: 80)"
    )
    one.add_argument("--json", action="store_true", help="everything, as JSON")
    one.set_defaults(run=_plan)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(","))
    if not all(1 <= number <= 1_000_000 for number in numbers):
        raise argparse.ArgumentTypeError("numbers of devices are 1 to 1000000")
    return numbers


def _plan(args: argparse.Namespace) -> int:
    from asyncrl.planner.forecast import Options, plan_command

    if args.layouts:
        from asyncrl.config import load
        from asyncrl.planner.layouts import format_layouts
        from asyncrl.runtime.model_folder import model_json

        config = load(tuple(args.configs), tuple(args.overrides))
        print("\n".join(format_layouts(config, model_json(config.model.path), args.layouts, args.device_gb)))
        return 0
    return plan_command(
        Options(
            tuple(args.configs),
            tuple(args.overrides),
            args.run_folder,
            tuple(args.assume),
            args.gpus,
            args.steps,
            args.cores,
            not args.fixed_batch,
            args.json,
        )
    )
