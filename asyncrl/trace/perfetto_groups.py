"""Groups and evaluations of a history as slices of a timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl.trace.history import Event
from asyncrl.trace.perfetto_writer import Drawing, Slice

#: Names of tracks.
STEPS, ROUNDS, EVALUATIONS = "steps", "rounds", "evaluations"
HELD, SCORED, WAITING = "groups held", "groups scored", "groups waiting"


def group_flow(group: int) -> int:
    """The flow of a group."""
    return 2 * group + 2


class Way(msgspec.Struct):
    """The current slices of a group, and the start of its last drawn slice."""

    lease: Slice | None = None
    scores: dict[str, Slice] = {}  # by worker
    waits: Slice | None = None
    arrived: float = 0.0  # its first unscored sample
    last: int = 0
    attempts: int = 0
    trained: bool = False


class GroupDrawing:
    """The history of groups, drawn event by event."""

    def __init__(self, drawing: Drawing) -> None:
        self._draw = drawing
        self._ways: dict[int, Way] = {}
        self._steps: dict[int, list[int]] = {}  # step that is not drawn yet -> its groups
        self._evaluations: dict[object, Slice] = {}  # round -> under way
        self._handlers: dict[str, Callable[[Event], None]] = {
            "lease": self._lease,
            "sample": self._sample,
            "score": self._score,
            "unscored": self._await_scores,
            "ready": self._ready,
            "lost": self._lose_lease,
            "drop": self._end_group,
            "dead": self._end_group,
            "claim": self._claim,
            "register": self._register,
            "service": self._service,
            "retire": self._retire,
            "eval_begin": self._eval_begin,
            "eval_restart": self._eval_restart,
            "eval_end": self._eval_end,
        }

    def take(self, event: Event) -> None:
        """One event of the history, in its order."""
        handler = self._handlers.get(str(event.get("e")))
        if handler is not None:
            handler(event)

    def _lease(self, event: Event) -> None:
        way = self._ways.setdefault(event["g"], Way())
        way.attempts += 1
        again = f", attempt {way.attempts}" if way.attempts > 1 else ""
        way.lease = self._draw.begin(
            event["producer"],
            HELD,
            event["t"],
            f"group {event['g']}{again}",
            flows=(group_flow(event["g"]),),
            group=event["g"],
            engine_version=event["w"],
            deadline=event["deadline"],
            bound=event["bound"],
        )

    def _sample(self, event: Event) -> None:
        way = self._ways.get(event["g"])
        if way is None:
            return
        if way.lease is not None:
            way.lease.args[f"#{event['i']}"] = f"{event['length']} tokens"
        if "reward" not in event:
            way.arrived = way.arrived or event["t"]

    def _score(self, event: Event) -> None:
        """From the arrival of its first sample to its last score, including the wait for a worker."""
        way = self._ways.get(event["g"])
        if way is None:
            return
        one = way.scores.get(event["worker"])
        if one is None:
            since = way.arrived or event["t"]
            one = self._begin(event["worker"], SCORED, since, "score", event["g"])
            way.scores[event["worker"]] = one
        one.args[f"#{event['i']}"] = event["reward"]

    def _await_scores(self, event: Event) -> None:
        way = self._ways.get(event["g"])
        if way is not None:
            self._end_lease(way, event["t"])
            way.waits = self._begin("buffer", WAITING, event["t"], "unscored", event["g"])

    def _ready(self, event: Event) -> None:
        way = self._ways.get(event["g"])
        if way is not None:
            self._close(way, event["t"])
            way.waits = self._begin("buffer", WAITING, event["t"], "ready", event["g"])

    def _begin(self, process: str, track: str, t: float, what: str, group: int) -> Slice:
        return self._draw.begin(process, track, t, f"{what} {group}", flows=(group_flow(group),), group=group)

    def _end_lease(self, way: Way, t: float, **args: Any) -> None:
        if way.lease is not None:
            self._pass(way, way.lease, t, **args)
            way.lease = None

    def _pass(self, way: Way, one: Slice, t: float, **args: Any) -> None:
        self._draw.end(one, t, **args)
        way.last = max(way.last, one.start)

    def _close(self, way: Way, t: float, **args: Any) -> None:
        """End all slices of the group."""
        self._end_lease(way, t, **args)
        for one in [*way.scores.values(), *([way.waits] if way.waits is not None else [])]:
            self._pass(way, one, t, **args)
        way.scores, way.waits, way.arrived = {}, None, 0.0

    def _lose_lease(self, event: Event) -> None:
        self._draw.mark(event["producer"] or "buffer", event["t"], f"group {event['g']} lost: {event['why']}")
        if event["g"] in self._ways:
            self._close(self._ways[event["g"]], event["t"], ended=event["why"])

    def _end_group(self, event: Event) -> None:
        name = f"group {event['g']} {event['e']}: {event['reason']}"
        self._draw.mark("buffer", event["t"], name, detail=event.get("detail", ""))
        way = self._ways.pop(event["g"], None)
        if way is not None:
            self._close(way, event["t"], ended=event["reason"])

    def _claim(self, event: Event) -> None:
        """The flows of the groups end when the slice of their step is known."""
        self._steps[event["step"]] = list(event["groups"])
        for group in event["groups"]:
            way = self._ways.get(group)
            if way is not None:
                self._close(way, event["t"])

    def lead_into_step(self, step: int, train: Slice) -> None:
        """Lead the flows of a step's groups into its training part, before that is drawn."""
        for group in self._steps.pop(step, []):
            way = self._ways.get(group)
            if way is not None:
                way.trained = True
                train.flows += [group_flow(group)] if way.last <= train.start else []

    def _register(self, event: Event) -> None:
        self._draw.mark("learner", event["t"], f"registered at step {event['step']}, epoch {event['epoch']}")
        for step in [step for step in self._steps if step > event["step"]]:
            del self._steps[step]

    def _service(self, event: Event) -> None:
        self._draw.mark("buffer", event["t"], f"service epoch {event['service_epoch']} starts")

    def _retire(self, _event: Event) -> None:
        """Groups in a durable checkpoint are no longer needed."""
        for group in [group for group, way in self._ways.items() if way.trained and way.waits is None]:
            del self._ways[group]

    def _eval_begin(self, event: Event) -> None:
        self._evaluations[event["round"]] = self._draw.begin(
            "buffer",
            EVALUATIONS,
            event["t"],
            f"evaluation of step {event['step']}",
            prompts=event.get("prompts"),
            samples=event.get("samples"),
        )

    def _eval_restart(self, event: Event) -> None:
        """It goes on under another number."""
        one = self._evaluations.pop(event["round"], None)
        if one is not None:
            self._evaluations[event["now"]] = one

    def _eval_end(self, event: Event) -> None:
        one = self._evaluations.pop(event["round"], None)
        if one is not None:
            version = event.get("evaluation_version")
            self._draw.end(
                one, event["t"], version=version, scored=event.get("evaluation_scored"), why=event.get("why")
            )

    def close(self, t: float) -> None:
        """End everything in progress at the end of the log."""
        for way in self._ways.values():
            self._close(way, t, ended="the log ends here")
        for one in self._evaluations.values():
            self._draw.end(one, t, ended="the log ends here")
