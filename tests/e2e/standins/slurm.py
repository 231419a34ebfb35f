#!/usr/bin/env python3
"""Stand-ins for sbatch, srun, squeue, scancel and scontrol: jobs of rendered scripts as processes of this host.

Linked under these names into a folder on the PATH. `SLURM_STANDIN` is the folder of its state. What it does of Slurm:
options from #SBATCH lines, dependencies `after:`, arrays, `--signal=B:TERM` by scancel (SIGTERM to the batch script
alone), srun with one process per node and `--kill-on-bad-exit`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["SLURM_STANDIN"])


def options_of(script: Path) -> dict[str, str]:
    found = {}
    for line in script.read_text().splitlines():
        if match := re.match(r"#SBATCH --([\w-]+)(?:=(.*))?$", line):
            found[match[1]] = " ".join(shlex.split(match[2] or ""))
    return found


def sbatch(words: list[str]) -> int:
    script = Path(words[-1])
    given = dict(re.fullmatch(r"--([\w-]+)=?(.*)", word).groups() for word in words[:-1])  # type: ignore[union-attr]
    for dependency in given.get("dependency", "after:").removeprefix("after:").split(","):
        if dependency and not (STATE / f"{dependency}.json").exists():
            print(f"sbatch: error: no job {dependency}", file=sys.stderr)
            return 1
    number = 100 + len(list(STATE.glob("*.json")))
    options = options_of(script)
    first, _, last = options.get("array", "0-0").partition("-")
    pids = []
    for task in range(int(first), int(last) + 1):
        output = options["output"]
        for mark, value in (("%j", number), ("%A", number), ("%a", task)):
            output = output.replace(mark, str(value))
        nodes = int(options.get("nodes", 1))
        env = {
            **os.environ,
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_ARRAY_TASK_ID": str(task),
        }
        with open(output, "ab") as log:
            child = subprocess.Popen(
                ["bash", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        pids.append(child.pid)
    (STATE / f"{number}.json").write_text(json.dumps({"name": options["job-name"], "pids": pids}))
    print(number)
    return 0


def srun(words: list[str]) -> int:
    command = [word for word in words if not word.startswith("--")]
    count = int(os.environ["SLURM_JOB_NUM_NODES"])
    children = [subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(node)}) for node in range(count)]

    def forward(number: int, _frame: object) -> None:
        for child in children:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    while any(child.poll() is None for child in children):
        codes = [child.poll() for child in children]
        if any(codes):
            forward(signal.SIGTERM, None)
        time.sleep(0.2)
    return next((child.returncode for child in children if child.returncode), 0)


def jobs() -> dict[str, dict[str, object]]:
    return {path.stem: json.loads(path.read_text()) for path in STATE.glob("*.json")}


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def squeue(_words: list[str]) -> int:
    for number, job in jobs().items():
        for pid in job["pids"]:  # type: ignore[attr-defined]
            if running(pid):
                print(number, job["name"], "R")
    return 0


def scancel(words: list[str]) -> int:
    for number in (word for word in words if word not in ("--batch", "--signal=TERM")):
        for pid in jobs()[number]["pids"]:  # type: ignore[attr-defined]
            if running(pid):
                os.kill(pid, signal.SIGTERM)
    return 0


def scontrol(words: list[str]) -> int:
    assert words[:2] == ["show", "hostnames"], words
    _, first, last = re.split(r"[\[\]-]", words[2])[:3]
    print("\n".join(["127.0.0.1"] * (int(last) - int(first) + 1)))
    return 0


if __name__ == "__main__":
    sys.exit(globals()[Path(sys.argv[0]).name](sys.argv[1:]))
