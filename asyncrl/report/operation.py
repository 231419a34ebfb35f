"""Chapters on operation: the outcome of every issued group and the audit, weight sync, and faults."""

from __future__ import annotations

from collections import Counter
from html import escape

from asyncrl.report.data import RunData
from asyncrl.report.html import card, clock, seconds, table
from asyncrl.report.svg import Line, legend, line_chart, short, thin
from asyncrl.report.svg_time import Share, flow


def ledger(data: RunData) -> str:
    """The flow, its counts over time, and the audit."""
    audit = data.audit
    shares = [Share("trained", audit.trained, "s3")]
    shares += [Share(f"dropped: {reason}", count, "s2") for reason, count in sorted(audit.dropped.items())]
    shares += [Share(f"dead: {reason}", count, "s6") for reason, count in sorted(audit.dead.items())]
    shares += [
        Share("superseded", audit.superseded, "s5"),
        Share("in flight at the end", audit.in_flight, "s1"),
        Share("lost", audit.lost, "s6"),
    ]
    note = "every issued prompt (group) has one ending; the log says which"
    return card("Ledger", flow("issued", shares), note=note, wide=True) + _counts(data) + _audit(data)


def _counts(data: RunData) -> str:
    """Issued, trained, dropped and dead over time."""
    start, _ = data.span_of_time()
    kinds = (
        ("issued", ("issued",), "s1"),
        ("trained", ("trained", "retired"), "s3"),
        ("dropped", ("dropped",), "s2"),
        ("dead", ("dead",), "s6"),
    )
    lines = [line for line in data.buffer if "t" in line and "issued" in line]
    curves = [
        Line(
            name,
            thin([(float(line["t"]) - start, float(sum(line.get(key, 0) for key in keys))) for line in lines]),
            colour,
        )
        for name, keys, colour in kinds
        if any(line.get(key) for line in lines for key in keys)
    ]
    chart = line_chart(curves, floor=0.0, x_label="seconds since the start")
    return card("Flow of groups", legend(curves) + chart, note="groups so far; the gap is what was under way")


def _audit(data: RunData) -> str:
    audit = data.audit
    rows = [
        ("issued", audit.issued),
        ("trained", audit.trained),
        ("lost", audit.lost),
        ("doubled", audit.doubled),
        ("groups over their bound", audit.over_bound),
        ("lost leases", audit.lost_leases),
        ("steps trained again after a restart", audit.replayed_steps),
        ("learner starts", audit.learner_starts),
        ("buffer starts", audit.service_starts),
    ]
    text = [(escape(name), str(count)) for name, count in rows]
    text.append(("spans of tokens with the committed digest", f"{audit.spans_matched} of {audit.spans}"))
    text += [("violation", escape(line)) for line in audit.violations[:20]]
    text += [("note", escape(line)) for line in audit.notes[:20]]
    return card(
        "Audit",
        table(("what", "count"), text, classes=("", "number")),
        note="what `asyncrl audit` proves from the log alone: " + ("OK" if audit.ok else "FAILED"),
    )


def weights(data: RunData) -> str:
    """Rounds of the weight sync, and deliveries by generator."""
    points = [
        (float(line["version"]), float(line["round_s"]))
        for line in data.rounds
        if "round_s" in line and "version" in line
    ]
    deliveries = data.deliveries()
    note = (
        f"seconds from publish to the last acknowledgement, by version. {deliveries.matched} deliveries with the "
        f"right digest, {deliveries.wrong} with another, {deliveries.left_out} not in time"
    )
    rounds = [Line("round, s", points, "s5")]
    chart = line_chart(rounds, floor=0.0, x_label="version of the weights", bars=True)
    return card("Weight sync", chart, note=note) + _members(data)


def _members(data: RunData) -> str:
    """A row per generator: how its weights came, how many bytes, how many versions it acknowledged."""
    ways: dict[str, Counter[str]] = {}
    carried: Counter[str] = Counter()
    for line in data.rounds:
        for name, way in dict(line.get("ways") or {}).items():
            ways.setdefault(name, Counter())[f"{way.get('encoding', '')} by {way.get('transport', '')}"] += 1
            carried[name] += int(way.get("bytes", 0))
    names = sorted({name for line in data.rounds for name in dict(line.get("members") or {})})
    rows = [
        (
            escape(name),
            str(data.count_acknowledged(name)),
            f"{short(float(carried[name]))}B" if carried[name] else "-",
            escape(", ".join(f"{way} {count}" for way, count in ways.get(name, Counter()).most_common())),
        )
        for name in names
    ]
    head = ("generator", "versions acknowledged", "received", "how")
    return card("Generators", table(head, rows, classes=("short", "short number", "short number", "")))


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
