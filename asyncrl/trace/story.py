"""`asyncrl trace RUN GROUP`: one group's story from the logs of its run.

It reads history.jsonl, metrics/groups.jsonl, the dead letters and the configuration. Texts come from the archive if
there is one, else a child process reads the prompt from the data (roles are not imported here). Guarantees:
1. it only reads: the run may be in progress, and an incomplete last line is skipped;
2. training that a restart of the learner took back stays in the story, marked as superseded;
3. a log of any length is read once, line by line; only lines that name the group are decoded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.images.digests import image_digests
from asyncrl.images.folder import ImageFolder
from asyncrl.metrics import decode_line
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.history import Event, Letter, Words, group_events, load_letters, load_words

PROMPT_TIMEOUT_S = 30.0


class Lease(msgspec.Struct):
    """One attempt at a group."""

    token: int
    attempt: int
    producer: str
    engine_version: int
    deadline: int
    bound: int
    at: float
    lost: str = ""  # why it ended before its samples were complete
    lost_at: float = 0.0
    continued: dict[str, int] = {}  # sample -> tokens of its partial sample
    discarded: list[str] = []  # discarded partial samples, with reasons


class Sample(msgspec.Struct):
    """One sample. `runs`: (version, tokens) in order; `weight`: its mean importance weight in the loss."""

    index: int
    producer: str
    token: int
    length: int
    runs: list[tuple[int, int]]
    at: float
    reward: float | None = None
    parts: dict[str, float] = {}
    worker: str = ""
    reward_version: str = ""
    scored_at: float = 0.0
    given_up: str = ""  # why the sample was discarded when its group was restarted
    judged: list[Judgement] = []  # answer of each judge, if there are several


class Judgement(msgspec.Struct):
    """A judge's answer about a sample."""

    judge: str
    reward: float
    worker: str
    version: str
    at: float


class Training(msgspec.Struct):
    """One step that claimed the group."""

    step: int
    version: int
    epoch: int
    claimed_at: float
    lag: int | None = None
    committed_at: float = 0.0
    digest: str = ""
    retired_at: float = 0.0
    replayed: bool = False
    superseded: bool = False  # a learner restarted from an earlier checkpoint
    loss: dict[str, Any] = {}  # advantages, tokens, weights by sample


class Story(msgspec.Struct):
    """All facts in the logs about a group."""

    group: int
    state: str = "unknown"
    reason: str = ""
    detail: str = ""
    issued_at: float = 0.0
    unscored_at: float = 0.0
    ready_at: float = 0.0
    ended_at: float = 0.0
    last_at: float = 0.0  # last time in the log
    uses: int = 1
    row: int = -1  # of the data, if the buffer chose it
    prompt: dict[str, Any] | None = None
    prompt_error: str = ""
    images: tuple[str, ...] = ()  # of the prompt, in words
    words: Words | None = None  # from the archive
    sampling: dict[str, Any] = {}
    engine: str = ""
    leases: list[Lease] = []
    samples: list[Sample] = []
    given_up: list[Sample] = []
    cancelled: list[str] = []
    training: list[Training] = []
    letters: list[Letter] = []

    @property
    def bound(self) -> int | None:
        """Its largest lag, fixed by its first lease."""
        return self.leases[0].bound if self.leases else None


def load_story(run: RunDir, group: int, *, prompt: bool = True) -> Story:
    """The story of one group. Raises `trace.unknown` for a group that was never issued."""
    [story] = load_stories(run, [group])
    if prompt:
        config = load(run.config)
        story.words = load_words(run, config, group=group, steps=[training.step for training in story.training])
        story.prompt, story.prompt_error = load_prompt(run, group, row=story.row)
        story.images = tuple(map(ImageFolder(run.images).describe, image_digests(story.prompt or {})))
    return story


def load_stories(run: RunDir, groups: Iterable[int]) -> list[Story]:
    """The stories of some groups, by one pass over the logs. Raises `trace.unknown` like `load_story`."""
    config = load(run.config)
    sampling = msgspec.to_builtins(config.sampling)
    stories = {group: Story(group, engine=config.producers.engine, sampling=sampling) for group in groups}
    for event in group_events(run, stories):
        handler = _HANDLERS.get(str(event.get("e")))
        for story in _find_concerned(event, stories):
            story.last_at = max(story.last_at, float(event.get("t", 0.0)))
            if handler is not None:
                handler(story, event)
    for story in stories.values():
        story.letters = load_letters(run, config, group=story.group)
        if story.state == "unknown":
            raise ConfigError("trace.unknown", f"group {story.group} was never issued", where=str(run.history))
    _add_losses(run, stories)
    return list(stories.values())


def _find_concerned(event: Event, stories: dict[int, Story]) -> list[Story]:
    if "g" in event:
        return [stories[event["g"]]] if event["g"] in stories else []
    if "groups" in event:
        return [stories[group] for group in event["groups"] if group in stories]
    return list(stories.values())


def _issue(story: Story, event: Event) -> None:
    story.state, story.issued_at, story.uses = "leased", story.issued_at or event["t"], int(event.get("uses", 1))


def _choose(story: Story, event: Event) -> None:
    story.row = event["row"]


def _lease(story: Story, event: Event) -> None:
    story.state = "leased"
    lease = [event[name] for name in ("token", "attempt", "producer", "w", "deadline", "bound", "t")]
    story.leases.append(Lease(*lease))


def _continue(story: Story, event: Event) -> None:
    for lease in story.leases[-1:]:
        lease.continued = event["tokens"]


def _discard(story: Story, event: Event) -> None:
    for lease in story.leases[-1:]:
        lease.discarded.append(f"#{event['i']} after {event['tokens']} tokens: {event['why']}")


def _lose_lease(story: Story, event: Event) -> None:
    for lease in story.leases:
        if lease.token == event["token"] and not lease.lost:
            lease.lost, lease.lost_at = event["why"], event["t"]
    if event["why"] in ("late", "payload_lost", "store_lost", "abandoned"):  # these also discard the samples
        for sample in story.samples:
            sample.given_up = event["why"]
        story.given_up += story.samples
        story.samples = []
    story.state = "leased"


def _sample(story: Story, event: Event) -> None:
    runs = [(int(version), int(count)) for version, count in event["runs"]]
    sample = Sample(event["i"], event["producer"], event["token"], event["length"], runs, event["t"])
    sample.reward, sample.parts = event.get("reward"), event.get("parts", {})
    story.samples = [other for other in story.samples if other.index != sample.index] + [sample]


def _score(story: Story, event: Event) -> None:
    for sample in story.samples:
        if sample.index == event["i"]:
            sample.reward, sample.parts = event["reward"], event.get("parts", {})
            sample.worker, sample.reward_version = event["worker"], event.get("version", "")
            sample.scored_at = event["t"]


def _add_judgement(story: Story, event: Event) -> None:
    for sample in story.samples:
        if sample.index == event["i"]:
            answer = Judgement(event["judge"], event["reward"], event["worker"], event.get("version", ""), event["t"])
            sample.judged = [*sample.judged, answer]


def _await_scores(story: Story, event: Event) -> None:
    story.state, story.unscored_at = "unscored", event["t"]


def _ready(story: Story, event: Event) -> None:
    story.state, story.ready_at = "ready", event["t"]


def _cancel(story: Story, event: Event) -> None:
    story.cancelled.append(f"lease {event['token']}: {event['why']}")


def _claim(story: Story, event: Event) -> None:
    story.state = "claimed"
    oldest = min((version for sample in story.samples for version, _ in sample.runs), default=None)
    lag = None if oldest is None else event["version"] - oldest
    story.training.append(
        Training(event["step"], event["version"], event["epoch"], event["t"], lag, replayed=event["replayed"])
    )


def _commit(story: Story, event: Event) -> None:
    story.state = "trained"
    found = [training for training in story.training if training.step == event["step"] and not training.superseded]
    if found:
        found[-1].committed_at, found[-1].digest = event["t"], event.get("digest", "")


def _register(story: Story, event: Event) -> None:
    """A learner starts from a checkpoint: later commits are repeated, or never."""
    for training in story.training:
        if training.step > event["step"]:
            training.superseded = True
    if story.state in ("claimed", "trained") and all(training.superseded for training in story.training):
        story.state = "ready"


def _retire(story: Story, event: Event) -> None:
    for training in story.training:
        if training.step <= event["step"] and training.committed_at and not training.superseded:
            training.retired_at = training.retired_at or event["t"]
            story.state = "retired"


def _drop(story: Story, event: Event) -> None:
    story.state, story.reason, story.ended_at = "dropped", event["reason"], event["t"]
    story.detail = event.get("detail", "")


def _dead(story: Story, event: Event) -> None:
    story.state, story.reason, story.detail, story.ended_at = "dead", event["reason"], event["detail"], event["t"]


_HANDLERS = {
    "issue": _issue,
    "choose": _choose,
    "lease": _lease,
    "lost": _lose_lease,
    "sample": _sample,
    "score": _score,
    "unscored": _await_scores,
    "ready": _ready,
    "cancel": _cancel,
    "claim": _claim,
    "commit": _commit,
    "register": _register,
    "retire": _retire,
    "drop": _drop,
    "dead": _dead,
    "continue": _continue,
    "discard": _discard,
    "judged": _add_judgement,
}


def _add_losses(run: RunDir, stories: dict[int, Story]) -> None:
    """Advantages and weights of the training steps: the last line of a step counts."""
    path = run.metrics / "groups.jsonl"
    wanted = {
        (training.step, story.group): training
        for story in stories.values()
        for training in story.training
        if not training.superseded
    }
    needles = tuple({b'"step":%d,' % step for step, _ in wanted})
    if not path.exists() or not wanted:
        return
    with path.open("rb") as file:
        for line in file:
            event = decode_line(line) if any(needle in line for needle in needles) else None
            for entry in event.get("groups", ()) if event is not None else ():
                if (event["step"], entry["g"]) in wanted:  # type: ignore[index]
                    wanted[event["step"], entry["g"]].loss = entry  # type: ignore[index]


def load_prompt(run: RunDir, group: int, *, row: int = -1) -> tuple[dict[str, Any] | None, str]:
    """The row of the data, and the reason if it cannot be shown. `row`: its number if the buffer chose it."""
    command = [sys.executable, "-m", "producers.data.show_prompt", "--config", str(run.config), "--group", str(group)]
    command += ["--row", str(row)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROMPT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"the data was not read within {PROMPT_TIMEOUT_S:g} s"
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return None, words[0] if words else f"exit code {done.returncode}"
    found: dict[str, Any] = msgspec.json.decode(done.stdout)["row"]
    return found, ""
