"""Starts the probes, a few at a time, each in a process group with a limit, and prints the findings."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from asyncrl.doctor.machine import MISSING, OK, WARN, WRONG, Found
from asyncrl.doctor.probe_process import MARK, PROBES
from asyncrl.errors import ConfigError

LIMIT_S = 90.0
AT_ONCE = 3
SIGNS = {OK: "ok", WARN: "warn", MISSING: "-", WRONG: "WRONG"}


class Probed(NamedTuple):
    """One probe and its finding."""

    name: str
    found: Found


def doctor_command(*, only: Sequence[str] = (), as_json: bool = False, limit_s: float = LIMIT_S) -> int:
    """Run all probes, or some; 1 if something is wrong."""
    unknown = [name for name in only if name not in PROBES]
    if unknown:
        raise ConfigError(
            "usage", f"{unknown[0]!r} is no probe", where="doctor", remedy=f"the probes are: {', '.join(PROBES)}"
        )
    probed = examine(only or tuple(PROBES), limit_s=limit_s)
    if as_json:
        probes = [{"name": one.name, **one.found._asdict()} for one in probed]
        print(json.dumps({"ok": not _wrong(probed), "probes": probes}, indent=2))
    else:
        print(format_findings(probed))
    return 1 if _wrong(probed) else 0


def examine(names: Sequence[str], *, limit_s: float = LIMIT_S) -> list[Probed]:
    """All findings, in the order of the names."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda name: probe(name, limit_s=limit_s), names))
    return [Probed(name, one) for name, one in zip(names, found, strict=True)]


def probe(name: str, *, limit_s: float = LIMIT_S) -> Found:
    """The finding of one probe, even if its process fails."""
    child = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.doctor.probe_process", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        errors="replace",
    )
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Found(
            WRONG, f"no answer within {limit_s:g} s", f"see what hangs: python -m asyncrl.doctor.probe_process '{name}'"
        )
    finally:
        end(child)
    answers = [line for line in out.splitlines() if line.startswith(MARK)]
    if answers:
        return Found(*json.loads(answers[-1].removeprefix(MARK)))
    last = ([line for line in err.splitlines() if line.strip()] or [""])[-1][:200]
    how = f"killed by {signal.Signals(-child.returncode).name}" if child.returncode < 0 else f"code {child.returncode}"
    return Found(
        WRONG,
        f"its process ended without an answer ({how}) {last}".strip(),
        f"see what breaks: python -m asyncrl.doctor.probe_process '{name}'",
    )


def end(child: subprocess.Popen[str]) -> None:
    """Kill the process group: an engine may have children."""
    with contextlib.suppress(ProcessLookupError):  # the group has ended
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device or a disk: it ends when that answers
        child.wait(timeout=10)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()


def format_findings(probed: Iterable[Probed]) -> str:
    """A line per finding, its remedy below, and a summary."""
    every = list(probed)
    width = max((len(one.name) for one in every), default=0)
    lines = []
    for name, found in every:
        lines.append(f"{SIGNS[found.state]:<6} {name:<{width}}  {found.says}")
        if found.remedy and found.state != OK:
            lines.append(f"{'':<6} {'':<{width}}  -> {found.remedy}")
    counts = {state: sum(one.found.state == state for one in every) for state in SIGNS}
    lines.append(
        f"{counts[OK]} ok, {counts[WARN]} to look at, {counts[MISSING]} not there (optional), {counts[WRONG]} wrong"
    )
    return "\n".join(lines)


def _wrong(probed: Iterable[Probed]) -> bool:
    return any(one.found.state == WRONG for one in probed)
