"""The chapter on the data path: the outcome of every issued group, and the audit. All numbers are the audit's."""

from __future__ import annotations

from html import escape

from asyncrl.report.data import RunData
from asyncrl.report.html import card, table
from asyncrl.report.svg import Line, legend, line_chart, thin
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
