"""Output of `asyncrl check`: text for a terminal, JSON for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.errors import AsyncRLError, ConfigErrors
from asyncrl.preflight import check as checks
from asyncrl.preflight.memory import RoleMemory, format_bytes

if TYPE_CHECKING:
    from asyncrl.preflight.check import Checked
    from asyncrl.preflight.derived import Starting


def render(checked: Checked) -> str:
    """Derived numbers, processes, memory and notes; mistakes are printed separately."""
    width = max((len(finding.name) for finding in checked.findings), default=0)
    lines = []
    for finding in checked.findings:
        tail = f" = {finding.arithmetic}" if finding.arithmetic else ""
        lines.append(f"  {finding.name:<{width}}  {finding.value}{tail}")
    lines += _starting(checked.starting)
    lines += _memory(checked.memory)
    lines += [f"missing here: {what}" for what in checked.missing]
    lines += [f"note: {note}" for note in checked.notes]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns below each other."""
    every = [head, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(head))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in every
    ]


def _starting(rows: Sequence[Starting]) -> list[str]:
    if not rows:
        return []
    cells = [
        (row.role, str(row.count), row.device or "-", str(row.threads), str(row.restarts), row.module, row.where)
        for row in rows
    ]
    return ["", *table(("role", "processes", "device", "threads", "restarts", "module", "where"), cells)]


def _memory(roles: Sequence[RoleMemory]) -> list[str]:
    if not roles:
        return []
    lines = ["", "  memory of one process, about:"]
    for one in roles:
        times = f" (x {one.count})" if one.count > 1 else ""
        lines.append(f"  {one.role}, {one.place}: {format_bytes(one.total_bytes)}{times}")
        if len(one.parts) > 1 or one.role == "run folder":
            parts = [(part.name, format_bytes(part.bytes), f"= {part.arithmetic}") for part in one.parts]
            lines += [f"  {line}" for line in table(("", "", ""), parts)[1:]]
    return lines


def as_json(checked: Checked) -> dict[str, Any]:
    """The output of `asyncrl check --json`."""
    return {
        "ok": not checked.errors,
        "errors": [error_json(error) for error in checked.errors],
        "findings": msgspec.to_builtins(checked.findings),
        "starting": msgspec.to_builtins(checked.starting),
        "memory": [msgspec.to_builtins(one) | {"total_bytes": one.total_bytes} for one in checked.memory],
        "missing": checked.missing,
        "notes": checked.notes,
    }


def error_json(error: AsyncRLError) -> dict[str, Any]:
    """One mistake; `line` is null if it has none."""
    at = re.fullmatch(r"(.*):(\d+)", error.where)
    return {
        "code": error.code,
        "file": at[1] if at else error.where,
        "line": int(at[2]) if at else None,
        "message": error.message,
        "suggestion": error.suggestion,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


def check_command(paths: Sequence[Path], overrides: Sequence[str], *, as_json_text: bool = False) -> int:
    """Print the result; return the exit code."""
    _, checked = checks.check_files(paths, overrides)
    if as_json_text:
        print(json.dumps(as_json(checked), indent=2))
        return checked.errors[0].exit_code if checked.errors else 0
    if text := render(checked):
        print(text)
    if checked.errors:
        sys.stdout.flush()
        raise ConfigErrors(checked.errors)
    print(f"{' + '.join(map(str, paths))}: no mistakes found")
    return 0
