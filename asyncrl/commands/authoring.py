"""Commands for authors of parts of their own: new, test-reward, test-loss, sandbox-server, test-env."""

from __future__ import annotations

import argparse
from pathlib import Path

from asyncrl.commands.options import Commands, command


def add(commands: Commands) -> None:
    one = command(
        commands,
        "new",
        "write a file with a reward, loss, environment or tool that works, to change",
        example="asyncrl new reward my_reward",
    )
    one.add_argument("kind", choices=("reward", "loss", "environment", "tool"), help="what to write")
    one.add_argument("name", metavar="NAME", help="of the function, and of the file NAME.py")
    one.set_defaults(run=_new)
    one = command(
        commands,
        "test-reward",
        "try a reward function as a run would: signature, values, time, memory",
        example="asyncrl test-reward my_rewards:exact --data data/train.jsonl --samples 8",
    )
    one.add_argument("function", metavar="NAME", help="module:name, path/file.py:name, builtin:name or an http address")
    one.add_argument("--data", required=True, metavar="FILE", help="rows, as in data.path")
    one.add_argument("--samples", default="4", metavar="N", help="rows to try it on (default 4)")
    one.add_argument("--response-key", default="", metavar="COLUMN", help="a good response; else the ground truth")
    one.add_argument("--prompt-key", default="", metavar="COLUMN", help="the prompt (default: prompt, question, ...)")
    one.add_argument("--args", default="{}", metavar="JSON", help="args of the [[reward]]")
    one.add_argument("--timeout-s", default="10", metavar="SECONDS", help="of one call (default 10)")
    one.add_argument("--memory-bytes", default=str(2 << 30), metavar="BYTES", help="of its process (default 2 GiB)")
    one.add_argument("--sandbox", default="bubblewrap", metavar="KIND", help="as sandbox.kind (default bubblewrap)")
    one.set_defaults(run=_test_reward)
    one = command(
        commands,
        "test-loss",
        "try a loss, advantage, correction, aggregation or KL: shapes, gradient, packed rows, masks, extreme values",
        example="asyncrl test-loss my_loss.py:mine --options '{\"clip\": 0.1}'",
    )
    one.add_argument("function", metavar="NAME", help="module:name, path/file.py:name or a known name")
    kinds = ("loss", "advantage", "correction", "aggregation", "kl")
    one.add_argument("--kind", choices=kinds, default="loss", help="(default loss)")
    one.add_argument("--options", default="{}", metavar="JSON", help="its options, an object")
    one.set_defaults(run=_test_loss)
    one = command(
        commands,
        "sandbox-server",
        "run programs in the sandbox for clients of SandboxFusion, on loopback",
        example="asyncrl sandbox-server --port 8080",
    )
    one.add_argument("--port", default="8080", help="on 127.0.0.1; 0: any free one (default 8080)")
    one.add_argument("--kind", default="bubblewrap", help="bubblewrap; none: without isolation (default bubblewrap)")
    one.add_argument("--workers", default="2", metavar="N", help="programs at once (default 2)")
    one.add_argument("--timeout-s", default="60", metavar="SECONDS", help="longest time of a program (default 60)")
    one.add_argument("--memory-bytes", default=str(1 << 29), metavar="BYTES", help="of a program (default 512 MiB)")
    one.add_argument("--output-bytes", default=str(1 << 20), metavar="BYTES", help="of each stream (default 1 MiB)")
    one.set_defaults(run=_sandbox_server)


def _new(args: argparse.Namespace) -> int:
    from asyncrl.configure.new_part import new_command

    return new_command(args.kind, args.name)


def _test_loss(args: argparse.Namespace) -> int:
    return _process("learners.contract_test", args, ("kind", "options"), args.function)


def _test_reward(args: argparse.Namespace) -> int:
    names = ("data", "samples", "response_key", "prompt_key", "args", "timeout_s", "memory_bytes", "sandbox")
    return _process("producers.rewards.contract_test", args, names, args.function)


def _sandbox_server(args: argparse.Namespace) -> int:
    names = ("port", "kind", "workers", "timeout_s", "memory_bytes", "output_bytes")
    return _process("producers.sandbox.server", args, names)


def _process(module: str, args: argparse.Namespace, names: tuple[str, ...], *words: str) -> int:
    """Replace this process by the module, with the Python path of a launch, so that Ctrl-C and the exit code are the
    module's.
    """
    import os
    import sys

    from asyncrl.process_plan.interpreters import python_path

    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(python_path())}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module, *options, *(("--", *words) if words else ())], environment)


ENVIRONMENT_LIMIT_S = 900.0


def add_environments(commands: Commands) -> None:
    one = command(
        commands,
        "test-env",
        "play an environment with given answers and check its contract",
        example='asyncrl test-env my_envs:Guess --row \'{"prompt": "guess"}\'',
    )
    one.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="MODULE:NAME",
        help="or a known name, or the agent_name of a [[row_environment]] (default: environment.name of --config)",
    )
    one.add_argument("--config", type=Path, metavar="CONFIG.toml", help="take [environment], model and rows from it")
    one.add_argument("--model", default="", metavar="FOLDER", help="whose tokenizer and chat template to use")
    one.add_argument("--args", default="{}", metavar="JSON", help="arguments of the environment, an object")
    one.add_argument("--row", default="", metavar="JSON", help="the row to play (default: the first of the data)")
    one.add_argument("--say", action="append", default=[], metavar="TEXT", help="what the policy says, turn by turn")
    one.add_argument("--json", action="store_true", help="findings as JSON")
    one.set_defaults(run=_test_env)


def _test_env(args: argparse.Namespace) -> int:
    from asyncrl.testing import run_contract

    words = [args.name] if args.name else []
    for flag, value in (("--config", args.config), ("--model", args.model), ("--args", args.args), ("--row", args.row)):
        words += [flag, str(value)] if value else []
    words += [word for text in args.say for word in ("--say", text)]
    return run_contract(
        "producers.environments.contract_test",
        [*words, *(["--json"] if args.json else [])],
        limit_s=ENVIRONMENT_LIMIT_S,
    )
