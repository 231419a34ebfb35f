"""The chapter on faults: failed processes, time to recovery, and all recorded events."""

from __future__ import annotations

from html import escape

from asyncrl.report.data import RunData
from asyncrl.report.html import card, clock, seconds, table

TROUBLE = frozenset({"exit", "restart", "kill", "given up", "lost", "drop", "dead", "silent"})
SHOWN_EVENTS = 200
SHOWN_RECOVERIES = 60


def faults(data: RunData) -> str:
    """Recoveries, then the log."""
    return _recoveries(data) + _log(data)


def _recoveries(data: RunData) -> str:
    if not data.recoveries:
        return ""
    rows = [
        (
            clock(one.t),
            escape(one.name),
            str(one.code),
            "given up" if one.given_up else seconds(one.start_s),
            seconds(one.work_s),
            seconds(one.progress_s),
            str(one.reached),
        )
        for one in data.recoveries[:SHOWN_RECOVERIES]
    ]
    times = sorted(one.progress_s for one in data.recoveries if one.progress_s is not None)
    worst = f"; the longest way to the next new step: {seconds(times[-1])}" if times else ""
    head = ("time", "process", "code", "started again", "worked again", "next new step", "newest step then")
    note = (
        "time from the end of the process, as its launcher saw it, until it was started, until its own work went "
        f"on, and until the run took a step that it had not taken before{worst}"
    )
    return card(
        "Recoveries", table(head, rows, classes=("short", "short", *["short number"] * 5)), note=note, wide=True
    )


def _log(data: RunData) -> str:
    entries: list[tuple[float, str, str]] = []
    for event in data.events:
        kind = str(event.get("event"))
        if kind == "start" or (kind == "exit" and event.get("code") == 0):
            continue
        text = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("t", "event", "role"))
        entries.append((float(event.get("t", 0)), kind, text))
    for event in data.history:
        text = ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("t", "e"))
        entries.append((float(event.get("t", 0)), str(event["e"]), text))
    entries.sort()
    trouble = [kind for _, kind, _ in entries if kind in TROUBLE]
    said = "" if trouble else '<p class="note">No faults. What the launcher and the buffer noted:</p>'
    shown = [(clock(t), escape(kind), escape(text)) for t, kind, text in entries[:SHOWN_EVENTS]]
    more = f"{len(entries) - SHOWN_EVENTS} more are left out" if len(entries) > SHOWN_EVENTS else ""
    return card(
        "Faults and restarts",
        said + table(("time", "what", "detail"), shown, classes=("short", "short")),
        note=more,
        wide=True,
    )
