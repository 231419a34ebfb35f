"""Cost of the wire format: encode and decode of one group, in microseconds.

Run: `python benchmarks/bench_wire.py`. Encode = arrays of 8 samples to frames (concatenate, pack, header, checksum);
decode = frames to validated per-sample views. Median of 200 rounds. Results go to benchmarks/results/wire.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bench_buffer import REWARDS, ROW, SIZES, make_groups  # noqa: E402, RUF100

from asyncrl import wire  # noqa: E402, RUF100
from asyncrl.wire.batch_arrays import group_data


def encode(prompt: Any, samples: Any) -> list[Any]:
    """As a producer does it."""
    fields, payload = wire.pack_arrays(
        {
            "prompt": prompt,
            "response": np.concatenate([s.token_ids for s in samples]),
            "logprobs": np.concatenate([s.logprobs for s in samples]),
        }
    )
    heads = tuple(wire.SampleHead(s.index, len(s.token_ids), s.finish, s.runs) for s in samples)
    row = msgspec.json.encode(ROW).decode()
    head = wire.Samples("p", 1, 1, heads, {0: "d" * 32}, fields, row, len(prompt), rewards=REWARDS)
    return wire.encode(head, (payload,), request=1)


def decode(frames: list[Any]) -> Any:
    """As the service and the learner do it."""
    packet = wire.decode(frames)
    head = packet.message
    return group_data(wire.GroupHead(1, 0, head.row, (bytes(frames[1]),), head.rewards, {}), packet.payloads)


def median_us(work: Any, rounds: int = 200) -> float:
    """Median time of a call."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return round(statistics.median(times) * 1e6, 1)


def main() -> None:
    """Run, print, write."""
    figures = {}
    for size in SIZES:
        prompt, samples = make_groups(size, 1)[0]
        frames = encode(prompt, samples)
        assert len(decode(frames).samples) == 8
        figures[size] = {
            "kb": round(sum(memoryview(frame).nbytes for frame in frames) / 1000, 1),
            "encode_us": median_us(lambda p=prompt, s=samples: encode(p, s)),
            "frames_check_us": median_us(lambda f=frames: wire.decode(f)),
            "decode_us": median_us(lambda f=frames: decode(f)),
        }  # fmt: skip
        print(f"{size:8} {figures[size]}")
    report = {
        "what": "encode and decode of one group of 8 samples", "command": " ".join(["python", *sys.argv]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "figures": figures,
        "machine": {"cores": os.cpu_count(), "load_1m": os.getloadavg()[0], "platform": platform.platform()},
        "versions": {"python": platform.python_version(), "msgspec": msgspec.__version__, "numpy": np.__version__,
                     "xxhash": xxhash.VERSION},
    }  # fmt: skip
    (ROOT / "benchmarks/results").mkdir(parents=True, exist_ok=True)
    (ROOT / "benchmarks/results/wire.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
