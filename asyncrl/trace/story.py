"""`asyncrl trace RUN GROUP`: one group's story from the logs of its run.

`asyncrl.trace.render` writes it out. Reads history.jsonl, metrics/groups.jsonl, the dead letters
and the configuration; its words come from the archive, where there is one, else the prompt from the data, by a child
process (roles are not imported here). Guarantees:
1. it only reads: the run may be going on, and a last line that is not whole yet is passed over;
2. what a restart of the learner took back stays in the story, marked as superseded;
3. a log of any length is read once, line by line; only lines that name the group are decoded.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config, load
from asyncrl.errors import UNREADABLE, ConfigError, WireError
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.archive import Words, words_of
from asyncrl.wire import decode_samples, unpack_arrays, validate_samples

Event = dict[str, Any]
PROMPT_TIMEOUT_S = 30.0
_GROUP = re.compile(rb'"g":(\d+)[,}]')
_BATCHED = (b'"e":"claim"', b'"e":"commit"', b'"e":"register"', b'"e":"retire"', b'"e":"tune"')


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
    continued: dict[str, int] = {}  # sample -> tokens of it that were there
    discarded: list[str] = []  # what was there of others, and why they began anew


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
    given_up: str = ""  # why the sample was given up with its group's restart
    judged: list[Judgement] = []  # what each judge said, where there are several


class Judgement(msgspec.Struct):
    """What one judge said about a sample."""

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


class Letter(msgspec.Struct):
    """A dead letter: what of it can be read, and what is wrong with it."""

    path: str
    size: int
    wrong: str
    producer: str = ""
    indexes: tuple[int, ...] = ()
    head: str = ""  # first bytes, where nothing can be decoded


class Story(msgspec.Struct):
    """Everything the logs know of a group."""

    group: int
    state: str = "unknown"
    reason: str = ""
    detail: str = ""
    issued_at: float = 0.0
    unscored_at: float = 0.0
    ready_at: float = 0.0
    ended_at: float = 0.0
    last_at: float = 0.0  # of the log
    uses: int = 1
    prompt: dict[str, Any] | None = None
    prompt_error: str = ""
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
        """The largest lag that it may have: fixed by its first lease."""
        return self.leases[0].bound if self.leases else None


# ---------------------------------------------------------------- reading


def lines_of(run: RunDir) -> Iterator[bytes]:
    """The whole lines of the history. Raises `run.missing` where there is none."""
    if not run.history.exists():
        raise ConfigError("run.missing", "no history.jsonl in it: the buffer has not started", where=str(run.root))
    with run.history.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def decoded(line: bytes) -> Event | None:
    """A line as an event; None where it is damaged."""
    try:
        event = msgspec.json.decode(line)
    except UNREADABLE:
        return None
    return event if isinstance(event, dict) else None


def events_of(run: RunDir, groups: Iterable[int]) -> Iterator[Event]:
    """The events that concern some groups, and those of the learner's life."""
    wanted = {b"%d" % group for group in groups}
    for line in lines_of(run):
        found = _GROUP.search(line)
        if found[1] in wanted if found else any(word in line for word in _BATCHED):
            event = decoded(line)
            if event is not None:
                yield event


def story_of(run: RunDir, group: int, *, prompt: bool = True) -> Story:
    """The story of one group. Raises `trace.unknown` for a group that was never issued."""
    [story] = stories_of(run, [group])
    if prompt:
        config = load(run.config)
        story.words = words_of(run, config, group=group, steps=[training.step for training in story.training])
        story.prompt, story.prompt_error = prompt_of(run, group)
    return story


def stories_of(run: RunDir, groups: Iterable[int]) -> list[Story]:
    """The stories of some groups, by one pass over the logs. Raises `trace.unknown` like `story_of`."""
    config = load(run.config)
    sampling = msgspec.to_builtins(config.sampling)
    stories = {group: Story(group, engine=config.producers.engine, sampling=sampling) for group in groups}
    for event in events_of(run, stories):
        handler = _HANDLERS.get(str(event.get("e")))
        for story in _concerned(event, stories):
            story.last_at = max(story.last_at, float(event.get("t", 0.0)))
            if handler is not None:
                handler(story, event)
    for story in stories.values():
        story.letters = letters_of(run, config, group=story.group)
        if story.state == "unknown":
            raise ConfigError("trace.unknown", f"group {story.group} was never issued", where=str(run.history))
    _add_losses(run, stories)
    return list(stories.values())


def _concerned(event: Event, stories: dict[int, Story]) -> list[Story]:
    if "g" in event:
        return [stories[event["g"]]] if event["g"] in stories else []
    if "groups" in event:
        return [stories[group] for group in event["groups"] if group in stories]
    return list(stories.values())


def _issue(story: Story, event: Event) -> None:
    story.state, story.issued_at, story.uses = "leased", story.issued_at or event["t"], int(event.get("uses", 1))


def _lease(story: Story, event: Event) -> None:
    story.state = "leased"
    story.leases.append(
        Lease(
            event["token"],
            event["attempt"],
            event["producer"],
            event["w"],
            event["deadline"],
            event["bound"],
            event["t"],
        )
    )


def _continue(story: Story, event: Event) -> None:
    for lease in story.leases[-1:]:
        lease.continued = event["tokens"]


def _discard(story: Story, event: Event) -> None:
    for lease in story.leases[-1:]:
        lease.discarded.append(f"#{event['i']} after {event['tokens']} tokens: {event['why']}")


def _lost(story: Story, event: Event) -> None:
    for lease in story.leases:
        if lease.token == event["token"] and not lease.lost:
            lease.lost, lease.lost_at = event["why"], event["t"]
    if event["why"] in ("late", "payload_lost", "store_lost", "abandoned"):  # these give up the samples, too
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


def _judged(story: Story, event: Event) -> None:
    for sample in story.samples:
        if sample.index == event["i"]:
            sample.judged = [
                *sample.judged,
                Judgement(event["judge"], event["reward"], event["worker"], event.get("version", ""), event["t"]),
            ]


def _unscored(story: Story, event: Event) -> None:
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
    """A learner starts from a checkpoint: what was committed after it is done again, or not at all."""
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
    "lease": _lease,
    "lost": _lost,
    "sample": _sample,
    "score": _score,
    "unscored": _unscored,
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
    "judged": _judged,
}


def _add_losses(run: RunDir, stories: dict[int, Story]) -> None:
    """Advantages and weights of the steps that trained them: the last line of a step is the one that counts."""
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
            event = decoded(line) if any(needle in line for needle in needles) else None
            for entry in event.get("groups", ()) if event is not None else ():
                if (event["step"], entry["g"]) in wanted:  # type: ignore[index]
                    wanted[event["step"], entry["g"]].loss = entry  # type: ignore[index]


def prompt_of(run: RunDir, group: int) -> tuple[dict[str, Any] | None, str]:
    """The row of the data, and why it cannot be shown where it cannot."""
    command = [sys.executable, "-m", "producers.data.show_prompt", "--config", str(run.config), "--group", str(group)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROMPT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"the data was not read within {PROMPT_TIMEOUT_S:g} s"
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        return None, words[0] if words else f"exit code {done.returncode}"
    row: dict[str, Any] = msgspec.json.decode(done.stdout)["row"]
    return row, ""


# ---------------------------------------------------------------- dead letters and steps


def letters_of(run: RunDir, config: Config, *, group: int | None = None) -> list[Letter]:
    """The dead letters that are kept (of one group), oldest first."""
    if not run.dead.exists():
        return []
    found = run.dead.glob(f"g{'*' if group is None else group}-t*.frames")
    paths = sorted(found, key=lambda path: (path.stat().st_mtime, path.name))
    return [_letter(path, config) for path in paths]


def _letter(path: Path, config: Config) -> Letter:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, payload = data[8 : 8 + size], data[8 + size :]
    try:
        message = decode_samples(header)
    except WireError as error:
        return Letter(str(path), len(data), error.message, head=header[:32].hex(" "))
    indexes = tuple(item.index for item in message.samples)
    try:
        wrong = validate_samples(message, payload, group_size=config.sampling.asked_samples)
        unpack_arrays(message.fields, payload)
    except WireError as error:
        wrong = error.message
    return Letter(str(path), len(data), wrong or "the message itself is whole", message.producer, indexes)


def dead_groups(run: RunDir) -> list[Event]:
    """Every group that was quarantined, by the history."""
    found = (decoded(line) for line in lines_of(run) if b'"e":"dead"' in line)
    return [event for event in found if event is not None]


def step_of(run: RunDir, step: int) -> Event:
    """The newest claim of a step. Raises `trace.unknown` where there is none."""
    newest: Event | None = None
    for line in lines_of(run):
        if b'"e":"claim"' in line:
            event = decoded(line)
            newest = event if event is not None and event.get("step") == step else newest
    if newest is None:
        raise ConfigError("trace.unknown", f"step {step} was never claimed", where=str(run.history))
    return newest
