"""Draws the pictures of the pages that explain a mechanism: `docs/images/<name>.svg`, by `docs/generate.py`.

`draw_sequence` draws who sends what to whom, from top to bottom; `draw_lanes` draws spans of time of several rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

COLUMN, ROW, TOP, BOX = 190, 34, 58, 150
LANE, UNIT, NAMES = 44, 96, 130  # height of a lane, width of a unit of time, width of the names
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #37474f } .name { font-weight: 600; fill: #10302c }
  .box { fill: #e7f3f1; stroke: #00796b; stroke-width: 1.4 } .life { stroke: #b0bec5; stroke-dasharray: 4 4 }
  .arrow { stroke: #37625c; stroke-width: 1.5; fill: none } .head { fill: #37625c } .mid { text-anchor: middle }
  .late { fill: #fbe9e7; stroke: #bf360c; stroke-width: 1.4 } .idle { fill: #eceff1; stroke: #b0bec5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #b0c4c0 } .name { fill: #e4f5f2 } .box { fill: #17332f; stroke: #4db6ac } .head { fill: #80cbc4 }
    .arrow { stroke: #80cbc4 } .late { fill: #4e2018; stroke: #ff8a65 } .idle { fill: #263238; stroke: #546e7a }
  }
"""
HEAD = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>'
)


class Message(NamedTuple):
    """An arrow between two participants; `what` at itself is a box on one."""

    sender: str
    receiver: str
    what: str


class Span(NamedTuple):
    """A piece of a lane: begin and end in units of time, its text, the class of its box."""

    begin: float
    end: float
    text: str
    kind: str = "box"


def frame(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """The picture around its parts."""
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    return f"{start}\n<title>{escape(title)}</title><style>{STYLE}</style>{HEAD}\n" + "\n".join(parts) + "\n</svg>\n"


def box(place: tuple[float, float, float, float], text: str, kind: str = "box", style: str = "mid") -> str:
    x, y, width, height = place
    label = f'<text class="{style}" x="{x + width / 2:g}" y="{y + height / 2 + 4:g}">{escape(text)}</text>'
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>{label}'


def draw_sequence(title: str, names: Sequence[str], messages: Sequence[Message]) -> str:
    """Participants in columns, messages in rows."""
    x = {name: COLUMN * (place + 0.5) for place, name in enumerate(names)}
    height = TOP + ROW * len(messages) + 16
    parts = [f'<path class="life" d="M{x[name]:g} 40 V{height - 8:g}"/>' for name in names]
    parts += [box((x[name] - BOX / 2, 10, BOX, 30), name, style="mid name") for name in names]
    for row, (sender, receiver, what) in enumerate(messages):
        y = TOP + ROW * (row + 0.6)
        if sender == receiver:
            parts.append(box((x[sender] - 90, y - 15, 180, 24), what))
            continue
        begin, end = x[sender], x[receiver]
        parts.append(f'<path class="arrow" marker-end="url(#tip)" d="M{begin:g} {y:g} H{end:g}"/>')
        parts.append(f'<text class="mid" x="{(begin + end) / 2:g}" y="{y - 5:g}">{escape(what)}</text>')
    return frame(COLUMN * len(names), height, title, parts)


def draw_lanes(title: str, lanes: Sequence[tuple[str, Sequence[Span]]], *, units: int, axis: str = "") -> str:
    """Named lanes with spans over a common time."""
    parts: list[str] = []
    for row, (name, spans) in enumerate(lanes):
        y = 14 + LANE * row
        parts.append(f'<text class="name" x="8" y="{y + 20:g}">{escape(name)}</text>')
        for span in spans:
            begin, width = NAMES + UNIT * span.begin + 2, UNIT * (span.end - span.begin) - 4
            parts.append(box((begin, y, width, 30), span.text, span.kind))
    height = 22 + LANE * len(lanes)
    if axis:
        parts.append(
            f'<path class="arrow" marker-end="url(#tip)" d="M{NAMES:g} {height:g} H{NAMES + UNIT * units:g}"/>'
        )
        parts.append(f'<text class="mid" x="{NAMES + UNIT * units / 2:g}" y="{height + 18:g}">{escape(axis)}</text>')
        height += 26
    return frame(NAMES + UNIT * units + 10, height, title, parts)


def lag() -> str:
    lanes = (
        ("learner", [Span(step, step + 1, f"step {step + 1}") for step in range(6)]),
        ("newest weights", [Span(version, version + 1, f"version {version}") for version in range(6)]),
        ("group A", [Span(1, 2.6, "sampled by version 1"), Span(3, 4, "trained, lag 2")]),
        ("group B", [Span(1, 4.6, "sampled by version 1", "late"), Span(5, 6, "too old: 4", "late")]),
    )
    return draw_lanes("With max_staleness = 2, a group of version 1 may be trained up to step 4", lanes, units=6)


def weights() -> str:
    names = ("learner", "weight sync", "generator A", "generator B")
    return draw_sequence(
        "A version of the weights: manifest, transfer, digest, swap",
        names,
        (
            Message("learner", "learner", "copies and digests v7"),
            Message("learner", "weight sync", "manifest of v7"),
            Message("weight sync", "generator A", "receive v7, from where"),
            Message("generator A", "weight sync", "prepared, digest"),
            Message("weight sync", "generator A", "commit"),
            Message("generator A", "generator A", "swaps between tokens"),
            Message("generator A", "weight sync", "serving v7, digest"),
            Message("generator B", "weight sync", "which version?"),
            Message("weight sync", "generator B", "receive v7, from A"),
        ),
    )


def evaluation() -> str:
    lanes = (
        ("learner", [Span(step, step + 1, f"step {20 + step}") for step in range(6)]),
        ("producer A", [Span(0, 1, "version 19"), Span(1, 4, "version 20: evaluation"), Span(4, 6, "version 23")]),
        ("producer B", [Span(step, step + 1, f"version {19 + step}") for step in range(6)]),
    )
    return draw_lanes("A producer keeps version 20 until its held-out prompts are generated", lanes, units=6)


def agents() -> str:
    return draw_sequence(
        "An agent talks to the policy by OpenAI's interface; the producer records tokens",
        ("agent process", "endpoint", "engine", "buffer"),
        (
            Message("endpoint", "agent process", "row, address, session key"),
            Message("agent process", "endpoint", "chat.completions"),
            Message("endpoint", "engine", "token ids"),
            Message("engine", "endpoint", "ids, log-probs, version"),
            Message("endpoint", "agent process", "message, tool calls"),
            Message("agent process", "agent process", "runs its tools"),
            Message("agent process", "endpoint", "reward, or its last line"),
            Message("endpoint", "buffer", "one sample of all turns"),
        ),
    )


def rewards() -> str:
    return draw_sequence(
        "A sample is leased to a reward worker and to every judge",
        ("producer", "buffer", "reward worker", "judge"),
        (
            Message("producer", "buffer", "samples of a group"),
            Message("reward worker", "buffer", "lease"),
            Message("judge", "buffer", "lease"),
            Message("reward worker", "reward worker", "your function, in a child"),
            Message("reward worker", "buffer", "scores"),
            Message("judge", "buffer", "scores"),
            Message("buffer", "buffer", "weighted sum: READY"),
        ),
    )


def turns() -> str:
    return draw_sequence(
        "An environment between the turns of one sample",
        ("environment", "producer", "engine"),
        (
            Message("environment", "producer", "reset: what it sees"),
            Message("producer", "engine", "all tokens so far"),
            Message("engine", "producer", "a turn: trained, mask 1"),
            Message("producer", "environment", "step(turn)"),
            Message("environment", "producer", "observation: mask 0"),
            Message("producer", "engine", "all tokens so far"),
            Message("engine", "producer", "the last turn"),
        ),
    )


def recovery() -> str:
    lanes = (
        (
            "before",
            [
                Span(0, 2, "steps 1, 2: in checkpoint"),
                Span(2, 4, "steps 3, 4: recorded"),
                Span(4, 5, "kill -9", "late"),
            ],
        ),
        (
            "after",
            [Span(0, 2, "loaded", "idle"), Span(2, 4, "3, 4: same batches again"), Span(4, 6, "steps 5, 6, ...")],
        ),
    )
    return draw_lanes("A learner that was killed trains the recorded batches again", lanes, units=6, axis="steps")


def trajectory() -> str:
    return draw_sequence(
        "A prompt from its lease to the gradient",
        ("producer", "buffer", "reward worker", "learner"),
        (
            Message("producer", "buffer", "lease: groups to sample"),
            Message("producer", "producer", "row, prompt, samples"),
            Message("producer", "buffer", "samples, log-probs"),
            Message("buffer", "buffer", "segment, then the row"),
            Message("reward worker", "buffer", "lease, then scores"),
            Message("learner", "buffer", "claim step N"),
            Message("buffer", "learner", "the recorded batch"),
            Message("learner", "learner", "forward, loss, update"),
            Message("learner", "buffer", "commit step N"),
        ),
    )


def replay() -> str:
    lanes = (
        ("run", [Span(step, step + 1, f"step {step + 1}") for step in range(6)]),
        ("archive", [Span(step, step + 1, f"batch {step + 1}", "idle") for step in range(6)]),
        ("replay", [Span(step, step + 1, f"step {step + 1}") for step in range(6)]),
        ("fork at 3", [Span(0, 3, "checkpoint of step 3", "idle"), Span(3, 6, "new prompts, new settings")]),
    )
    return draw_lanes("A replay trains the recorded batches again; a fork goes on from a checkpoint", lanes, units=6)


def ranks() -> str:
    lanes = (
        (
            "rank 0",
            [
                Span(0, 1, "claim"),
                Span(1, 2, "cut, pack"),
                Span(2, 4.4, "micro-batches"),
                Span(4.4, 5, "step"),
                Span(5, 6, "publish"),
            ],
        ),
        ("rank 1", [Span(0, 2, "waits", "idle"), Span(2, 4.4, "micro-batches"), Span(4.4, 5, "step")]),
        ("rank 2", [Span(0, 2, "waits", "idle"), Span(2, 4.4, "micro-batches"), Span(4.4, 5, "step")]),
    )
    return draw_lanes("A step of a learner with three ranks: rank 0 alone speaks to the services", lanes, units=6)


def sandbox() -> str:
    return draw_sequence(
        "A program of the model runs in a sandbox, never in the process of a role",
        ("reward worker", "child", "sandbox", "program"),
        (
            Message("reward worker", "child", "sample, time limit"),
            Message("child", "sandbox", "program, limits"),
            Message("sandbox", "program", "no network, no files"),
            Message("program", "sandbox", "output, exit code"),
            Message("sandbox", "child", "result, or the limit"),
            Message("child", "reward worker", "score, or the reason"),
        ),
    )


def joining() -> str:
    return draw_sequence(
        "A process of any host joins a run with an address and a key",
        ("host d: learner", "host a: services", "host b: producers", "host c: rewards"),
        (
            Message("host b: producers", "host a: services", "hello, key, fingerprint"),
            Message("host a: services", "host b: producers", "leases"),
            Message("host c: rewards", "host a: services", "samples to score"),
            Message("host d: learner", "host a: services", "claims and commits"),
            Message("host d: learner", "host b: producers", "weights: stream or collective"),
        ),
    )


PICTURES: dict[str, Callable[[], str]] = {
    "lag": lag,
    "weights-round": weights,
    "evaluation-version": evaluation,
    "agent-session": agents,
    "rewards-lease": rewards,
    "environment-turns": turns,
    "recovery": recovery,
    "trajectory": trajectory,
    "replay": replay,
    "ranks": ranks,
    "sandbox": sandbox,
    "joining": joining,
}
