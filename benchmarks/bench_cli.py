"""How soon the front door answers: wall time of commands that start nothing, and modules that they import.

Run: `python benchmarks/bench_cli.py`. Each command runs `--rounds` times (default 15) in a process of its own; the
first run of each is left out. `processor_s` is the median of user and system time, which other work on the machine
changes less. `check` is that of configs/quickstart.toml with a model without weights and two prompts, made in a
temporary folder: it tries the reward, and plays the first row, in processes of their own. Results go to
benchmarks/results/cli.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import reports  # noqa: E402, RUF100
from tokenizers import Tokenizer, models  # noqa: E402, RUF100

LIMITS_S = {"--help": 0.5, "check configs/quickstart.toml": 0.7}
COMMANDS = (
    "--help",
    "check configs/quickstart.toml",
    "explain config.conflict",
    "explain buffer.max_staleness",
    "diff configs/quickstart.toml configs/gsm8k-grpo.toml",
    "schema",
    "launch all configs/quickstart.toml --dry-run",
)


def prepare(folder: Path) -> None:
    """What configs/quickstart.toml names, as far as `check` looks at it."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    model = folder / "runs" / "models" / "running_sum"
    model.mkdir(parents=True)
    sizes = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "eos_token_id": 63,
    }
    (model / "config.json").write_text(json.dumps(sizes))
    (model / "model.safetensors").write_text("")
    letters = {letter: number for number, letter in enumerate("0123456789+=")}
    Tokenizer(models.BPE(letters, [])).save(str(model / "tokenizer.json"))
    (folder / "runs" / "data").mkdir()
    for name in ("running_sum.jsonl", "running_sum-heldout.jsonl"):
        (folder / "runs" / "data" / name).write_text(json.dumps({"prompt": "1+1="}) + "\n")


def seconds(words: list[str], folder: Path) -> tuple[float, float]:
    """Wall and processor time of one command, which must do what it says."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    took = time.perf_counter() - started
    if done.returncode not in (0, 1) or "Traceback" in done.stderr:
        raise SystemExit(f"asyncrl {' '.join(words)}: {done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def modules(words: list[str], folder: Path) -> int:
    """Modules that are imported when the command has run."""
    code = (
        "import sys\nfrom asyncrl.cli import main\ntry:\n main(sys.argv[1:])\nexcept SystemExit:\n pass\n"
        "print(len(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    return int(done.stderr.split()[-1])


def main() -> None:
    """Run, print, write."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=15)
    rounds = arguments.parse_args().rounds
    figures: dict[str, dict[str, float | int | None]] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for command in COMMANDS:
            words = command.split()
            seconds(words, folder)
            runs = [seconds(words, folder) for _ in range(rounds)]
            times, processor = sorted(wall for wall, _ in runs), statistics.median(used for _, used in runs)
            took = {
                "min_s": times[0],
                "median_s": statistics.median(times),
                "max_s": times[-1],
                "processor_s": processor,
            }
            figures[command] = {name: round(value, 3) for name, value in took.items()}
            figures[command] |= {"modules": modules(words, folder), "limit_s": LIMITS_S.get(command)}
            print(f"{command:55} {figures[command]}")
    reports.write(
        ROOT / "benchmarks" / "results" / "cli.json",
        "time until a command of the front door has answered",
        packages=("msgspec", "numpy"),
        rounds=rounds,
        figures=figures,
    )


if __name__ == "__main__":
    main()
