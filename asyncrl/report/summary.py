"""The head of the report: one line that says whether the run is complete and sound, and its main numbers."""

from __future__ import annotations

from html import escape

from asyncrl.report.data import ENDS, RunData
from asyncrl.report.html import duration, seconds
from asyncrl.report.svg import short


def grade(data: RunData) -> tuple[str, str, str]:
    """Grade (good, bad or open), verdict, and reason."""
    audit, result = data.audit, data.result
    steps = data.config.learner.steps if data.config else data.last_step
    complete = bool(result.get("done")) or (audit.done and data.last_step >= steps)
    word = "complete" if complete else "failed" if result.get("code") else "stopped before its end"
    if not result and not audit.ended:
        word = "not ended"
    kind = "good" if audit.ok and complete else "bad" if not audit.ok or result.get("code") else "open"
    proof = (
        "nothing lost, nothing trained twice, every lag within its bound" if audit.ok else "the audit found violations"
    )
    proof += _faults(data)
    without = ", ".join(f"{name} (code {code})" for name, code in dict(result.get("given_up") or {}).items())
    if without:
        proof += f"; went on without {without}, which ended more often than it may be restarted"
    reason = f" ({result['reason']})" if result.get("reason") else ""
    return kind, word + reason, proof


def _faults(data: RunData) -> str:
    """`; 3 processes ended with an error, after at most 12 s the run took a new step`."""
    if not data.recoveries:
        return ""
    times = [one.progress_s for one in data.recoveries if one.progress_s is not None]
    count = len(data.recoveries)
    text = f"; {count} process{'es' if count > 1 else ''} ended with an error"
    return text + (f", after at most {seconds(max(times))} the run took a new step" if len(times) == count else "")


def verdict(data: RunData) -> str:
    """The one-line verdict and the tiles."""
    kind, word, proof = grade(data)
    boxes = "".join(
        f'<div class="tile"><b>{escape(name)}</b><strong>{escape(value)}</strong><small>{escape(text)}</small></div>'
        for name, value, text in tiles(data)
    )
    bad = "".join(f"<li>{escape(text)}</li>" for text in data.audit.violations[:12])
    return (
        f'<p class="verdict {kind}"><b>{escape(word)}</b>{escape(proof)}</p>'
        f'{f"<ul class=violations>{bad}</ul>" if bad else ""}<div class="tiles">{boxes}</div>'
    )


def tiles(data: RunData) -> list[tuple[str, str, str]]:
    """Name, number and what it is."""
    audit = data.audit
    steps = data.config.learner.steps if data.config else data.last_step
    early, late = data.reward_ends()
    deliveries = data.deliveries()
    tokens = [value for _, value in data.values("tokens_per_s")]
    bound = audit.bound_max or (data.config.buffer.max_staleness if data.config else 0)
    gaps = [data.values(f"lag/0/logprob_gap_{name}") for name in ("mean", "max")]
    gap, most = (f"{max(value for _, value in found):.1e}" if found else "-" for found in gaps)
    whole = sum(value for _, value in data.values("step_s"))
    waited = sum(value for _, value in data.values("wait_s"))
    return [
        ("reward", f"{early:.3f} → {late:.3f}", f"mean of the first and last {ENDS} steps"),
        ("lag", f"{audit.lag_mean:.2f}", f"steps, mean; largest {audit.lag_max}, bound {bound}"),
        ("steps", f"{data.last_step} / {steps}", f"{audit.trained} groups trained"),
        ("tokens/s", short(sum(tokens) / len(tokens)) if tokens else "-", "response tokens trained, mean"),
        ("learner waited", f"{waited / whole:.1%}" if whole else "-", "of the time of its steps"),
        ("weights", f"{deliveries.matched}", f"deliveries with the right digest, {deliveries.wrong} wrong"),
        ("engine", gap, f"nats, mean gap of its log-probs to the learner's; largest {most}"),
        ("wall time", duration(data.wall_s), f"{len(data.processes)} process starts"),
    ]
