"""Kuhn poker: two policies of one run learn against each other. How far are they from an equilibrium?

    python benchmarks/kuhn.py --out benchmarks/results/kuhn.json [--folder FOLDER] [--set learner.steps=800]

It makes the models of examples/kuhn, launches the run, and reads each policy's moves at its information sets from every
checkpoint. Values are exact: all deals, moves and best responses are enumerated. Last iterates of self-play go
around the equilibrium, and the average comes close to it: `average` is over the second half of the versions so far,
by how often a strategy comes to an information set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "kuhn"
sys.path[:0] = [str(ROOT), str(EXAMPLE)]

import kuhn

from asyncrl.audit.prove import audit_run
from asyncrl.config import load

LIMIT_S = 3600


def launch(folder: Path, settings: list[str]) -> float:
    """Run both policies; the seconds that it took."""
    words = ["launch", "all", str(EXAMPLE / "kuhn.toml"), "--set", f"run.dir={folder / 'run'}"]
    for name in kuhn.SEATS:
        words += ["--set", f"policies.{name}.model.path={folder / 'parts' / 'models' / name}"]
        words += ["--set", f"policies.{name}.data.path={folder / 'parts' / name}.jsonl"]
    for setting in settings:
        words += ["--set", setting]
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "asyncrl", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=LIMIT_S,
    )
    return time.monotonic() - started


def strategies(run: Path, seat: int) -> dict[int, dict[str, Any]]:
    """Bets and illegal moves at the information sets, by step of each checkpoint; step 0 is the start model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from learners.checkpoints.export import export_files

    config = load(run / "config.toml")
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    bet, passes = tokenizer.convert_tokens_to_ids(["b", "p"])
    found = {}
    with tempfile.TemporaryDirectory() as made:
        folders = {0: Path(config.model.path)}
        for source in sorted((run / "checkpoints").glob("step_*")):
            step = int(source.name.removeprefix("step_"))
            folders[step] = Path(made) / str(step)
            export_files(config, source, folders[step], dtype=torch.float32)
        for step, folder in sorted(folders.items()):
            model = AutoModelForCausalLM.from_pretrained(folder)
            with torch.no_grad():
                probs = kuhn.move_logprobs(model, tokenizer, seat).exp().double()
            bets = dict(zip(kuhn.information_sets(seat), probs[:, bet].tolist(), strict=True))
            illegal = float(1 - probs[:, bet].sum() / 6 - probs[:, passes].sum() / 6)
            found[step] = {"bets": bets, "illegal": illegal}
    return found


def measure(run: Path) -> dict[str, Any]:
    """The curve over the checkpoints that both policies have, and the ledgers."""
    each = [strategies(run / name, seat) for seat, name in enumerate(kuhn.SEATS)]
    steps = sorted(set(each[0]) & set(each[1]))
    curve = []
    for count, step in enumerate(steps, start=1):
        recent = steps[count // 2 : count]
        now = [each[seat][step]["bets"] for seat in (0, 1)]
        mean = [kuhn.average(seat, [each[seat][one]["bets"] for one in recent]) for seat in (0, 1)]
        curve.append(
            {
                "step": step,
                "value": round(float(kuhn.value(*now)), 5),
                "exploitability": round(float(kuhn.exploitability(*now)), 5),
                "average_from_step": recent[0],
                "average_value": round(float(kuhn.value(*mean)), 5),
                "average_exploitability": round(float(kuhn.exploitability(*mean)), 5),
                "illegal": round(max(each[seat][step]["illegal"] for seat in (0, 1)), 6),
            }
        )
    ledgers = {}
    for name in kuhn.SEATS:
        found = audit_run(run / name)
        ledgers[name] = {"ok": found.ok, "issued": found.issued, "trained": found.trained, "lag_max": found.lag_max}
    bets = {
        name: {f"{card}:{history}": round(float(value), 4) for (card, history), value in mean[seat].items()}
        for seat, name in enumerate(kuhn.SEATS)
    }
    return {"curve": curve, "average_bets": bets, "audit": ledgers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs/kuhn-benchmark"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--measure-only", action="store_true", help="of a run that is there")
    args = parser.parse_args()
    folder, wall_s = args.folder.resolve(), 0.0
    if not args.measure_only:
        kuhn.main(folder / "parts", seed=args.seed)
        wall_s = launch(folder, [f"run.seed={args.seed}", *args.settings])
    found = measure(folder / "run")
    first, last = found["curve"][0], found["curve"][-1]
    result = {
        "command": "python benchmarks/kuhn.py " + " ".join(sys.argv[1:]),
        "seed": args.seed,
        "wall_s": round(wall_s, 1),
        "known_value": round(float(kuhn.VALUE), 5),
        "start_exploitability": first["exploitability"],
        "end_average_exploitability": last["average_exploitability"],
        "end_average_value": last["average_value"],
        **found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
