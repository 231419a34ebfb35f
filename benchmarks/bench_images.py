"""Throughput of the durable buffer with 1 MB of images per prompt against text alone, in the same run.

Run: `python benchmarks/bench_images.py [--repeats 5]`. The rig of bench_buffer.py (SQLite, fsync every second, groups
of 8 samples and 90 KB), with two PNG files of 0.5 MB per prompt, of other bytes for every prompt. By folder: producer
and learner are on the host of the buffer and see its folder. By socket: they do not, and everything crosses TCP. The
four ways take turns, so that a load on the machine hits all; ratios are of one round. Writes
benchmarks/results/images.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_buffer  # noqa: E402, RUF100

IMAGES, SIDE = 2, 408  # pictures of noise, 408 x 408 x 3 = 0.5 MB


def picture(seed: int) -> bytes:
    """A PNG file that does not compress."""
    data = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(data, "PNG")
    return data.getvalue()


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def summarise(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Median and range of every way, and of images against text."""
    found: dict[str, Any] = {}

    def note(name: str, values: list[float], digits: int) -> None:
        found[name] = [round(value, digits) for value in (statistics.median(values), min(values), max(values))]

    for way in ("folder", "socket"):
        for kind in ("text", "images"):
            name = f"{way}, {kind}"
            note(f"{name}: groups/s", [one[name]["groups_s"] for one in rounds], 1)
            note(f"{name}: CPU s per 1000 groups", [one[name]["cpu_s_per_1000"] for one in rounds], 2)
        ratios = [one[f"{way}, images"]["groups_s"] / one[f"{way}, text"]["groups_s"] for one in rounds]
        note(f"{way}: images against text", ratios, 3)
    return found


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=512, help="of images; text alone takes three times as many")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/images.json")
    args = parser.parse_args()
    images = [picture(seed) for seed in range(IMAGES)]
    load = [round(os.getloadavg()[0], 2)]  # above 0 at the start: others work on the machine
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(args.repeats):
        rounds.append({})
        for way in ("folder", "socket"):
            for kind, files, count in (("text", [], 3 * args.groups), ("images", images, args.groups)):
                port = free_port() if way == "socket" else 0
                rounds[-1][f"{way}, {kind}"] = bench_buffer.run_buffer(
                    "typical", count, "sqlite", "everysec", images=files, port=port
                )
        rates = ", ".join(f"{name} {found['groups_s']:.0f}/s" for name, found in rounds[-1].items())
        print(f"round {number + 1}: {rates}", flush=True)
        load.append(round(os.getloadavg()[0], 2))
    summary = summarise(rounds)
    print(json.dumps(summary, indent=1))
    report = {
        "what": "durable buffer, 1 MB of images per prompt against text alone; median, least, most",
        "image_bytes_per_prompt": sum(map(len, images)), "groups": args.groups, "repeats": args.repeats,
        "command": " ".join(["python", *sys.argv]), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "load_1m": load, "platform": platform.platform()},
        "summary": summary, "runs": rounds,
    }  # fmt: skip
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
