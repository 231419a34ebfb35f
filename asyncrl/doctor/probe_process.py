"""Runs one probe in a separate process: `python -m asyncrl.doctor.probe_process NAME` prints its finding as JSON, last.

Guarantee: any exception of a probe becomes its finding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from asyncrl.doctor import machine, software
from asyncrl.doctor.machine import WRONG, Found

MARK = "asyncrl-doctor:"
PROBES: dict[str, Callable[[], Found]] = {
    "python": machine.python, "packages": software.packages, "processor": machine.processor, "memory": machine.memory,
    "devices": machine.devices, "torch": software.torch, "ascend": software.ascend, "gang": software.gang,
    "vllm": software.vllm, "sglang": software.sglang, "extras": software.extras, "redis": software.redis,
    "sqlite": software.sqlite, "sandbox": software.sandbox, "sockets": machine.sockets, "disk": machine.disk,
    "shared memory": machine.shared_memory, "limits": machine.limits, "clock": machine.clock,
}  # fmt: skip


def main(name: str) -> int:
    """Run it and print."""
    try:
        found = PROBES[name]()
    except Exception as error:  # the finding: it cannot be determined
        found = Found(WRONG, f"{type(error).__name__}: {error}", "please report it: `asyncrl doctor --json`")
    print(f"\n{MARK}{json.dumps(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
