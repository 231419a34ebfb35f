"""Text of `asyncrl trace`: a group's story, the groups of a step, the dead letters.

Times are seconds since the group was issued.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import load
from asyncrl.config.judges import display_name
from asyncrl.runtime.run_dir import RunDir, format_json
from asyncrl.trace.history import Letter, find_claim, load_letters, quarantined_groups
from asyncrl.trace.story import Sample, Story, Training, load_stories, load_story

TEXT_LIMIT = 400  # characters of a prompt


def trace_command(folder: Path, *, group: int | None, step: int | None, dead: bool, as_json: bool) -> int:
    """Print the requested text; return the exit code."""
    run = RunDir(folder).require()
    if dead:
        letters, groups = load_letters(run, load(run.config)), quarantined_groups(run)
        print(format_json({"dead": groups, "letters": letters}) if as_json else dead_text(groups, letters))
    elif step is not None:
        claim = find_claim(run, step)
        stories = load_stories(run, claim["groups"])
        print(format_json({"claim": claim, "groups": stories}) if as_json else step_text(claim, stories))
    elif group is not None:
        story = load_story(run, group)
        print(format_json(story) if as_json else story_text(story))
    return 0


def story_text(story: Story) -> str:
    """The whole story of a group."""
    return "\n".join(
        [*_head(story), *_leases(story), *_samples(story), *_times(story), *_training(story), *_letters(story.letters)]
    )


def _head(story: Story) -> Iterator[str]:
    why = f": {story.reason}" if story.reason else ""
    bound = "no lease yet" if story.bound is None else f"bound {story.bound}"
    reuse = f", may be trained {story.uses} times" if story.uses > 1 else ""
    yield f"group {story.group}: {story.state.upper()}{why} ({bound}{reuse})"
    if story.detail:
        yield f"  {story.detail}"
    if story.prompt is not None:
        text = msgspec.json.encode(story.prompt).decode()
        yield f"prompt    {text[:TEXT_LIMIT]}{'...' if len(text) > TEXT_LIMIT else ''}"
        if story.images:
            yield f"images    {', '.join(story.images)}"
    elif story.prompt_error:
        yield f"prompt    not shown: {story.prompt_error}"
    yield from _words(story)
    settings = ", ".join(f"{name} {value}" for name, value in story.sampling.items())
    yield f"sampling  engine {story.engine}; {settings}"


def _words(story: Story) -> Iterator[str]:
    """Texts and notes from the archive."""
    words = story.words
    if words is None:
        return
    if words.prompt:
        yield f"text      {_short(words.prompt)}"
    if words.tuning:
        yield f"tuned     {words.tuning}"
    if words.quarantined:
        yield f"left out  of step {words.step} by the learner: {words.quarantined}"
    if words.problem:
        yield f"archive   {words.problem}"


def _short(text: str) -> str:
    shown = msgspec.json.encode(text).decode()
    return f"{shown[:TEXT_LIMIT]}{'...' if len(shown) > TEXT_LIMIT else ''}"


def _format_time(story: Story, time: float) -> str:
    return f"{time - story.issued_at:+8.3f} s" if time else "         -"


def _leases(story: Story) -> Iterator[str]:
    yield "leases"
    for lease in story.leases:
        lost = f"; lost {_format_time(story, lease.lost_at).strip()}: {lease.lost}" if lease.lost else ""
        yield (
            f"  {_format_time(story, lease.at)}  attempt {lease.attempt} to {lease.producer}, engine at version "
            f"{lease.engine_version}, deadline {lease.deadline} (token {lease.token}){lost}"
        )
        if lease.continued:
            there = ", ".join(f"#{index} after {tokens} tokens" for index, tokens in lease.continued.items())
            yield f"              goes on with {there}"
        yield from (f"              not continued by the next one: {line}" for line in lease.discarded)
    for line in story.cancelled:
        yield f"              cancelled: {line}"


def _samples(story: Story) -> Iterator[str]:
    yield "samples"
    for sample in [*story.given_up, *sorted(story.samples, key=lambda sample: sample.index)]:
        spans = " ".join(f"v{version}x{count}" for version, count in sample.runs)
        made = f"#{sample.index} {sample.length} tokens of {sample.producer}: {spans}"
        yield f"  {_format_time(story, sample.at)}  {made}{_reward(sample)}"
        if story.words is not None and sample.index in story.words.responses and not sample.given_up:
            yield f"              {story.words.finish[sample.index]}: {_short(story.words.responses[sample.index])}"
            if turns := story.words.turns.get(sample.index):
                shown = ", ".join(f"{reward:.4g} at token {place}" for place, reward in turns)
                yield f"              rewards of its turns, where not 0: {shown}"
            if images := story.words.images.get(sample.index):
                yield f"              images of later turns: {', '.join(images)}"
            for number, policy, runs in story.words.others.get(sample.index, ()):
                spans = " ".join(f"v{version}x{count}" for version, count in runs)
                yield f"              a turn of policy {policy} after {number} own turns: {spans}"


def _reward(sample: Sample) -> str:
    text = "; not scored yet" if sample.reward is None else f"; reward {sample.reward:.4g}"
    if sample.parts:
        text += " (" + ", ".join(f"{name} {value:.4g}" for name, value in sample.parts.items()) + ")"
    if sample.judged:
        said = (
            f"{display_name(one.judge)} {one.reward:.4g} by {one.worker}"
            + (f", version {one.version}" if one.version else "")
            for one in sample.judged
        )
        text += f": {'; '.join(said)}"
    elif sample.worker:
        text += f" by {sample.worker}" + (f", version {sample.reward_version}" if sample.reward_version else "")
    return text + (f"; given up: {sample.given_up}" if sample.given_up else "")


def _times(story: Story) -> Iterator[str]:
    first = story.training[0].claimed_at if story.training else story.ended_at
    last = story.training[-1] if story.training else None
    claimed, committed, retired = (last.claimed_at, last.committed_at, last.retired_at) if last else (0.0, 0.0, 0.0)
    marks = [
        ("leased", story.issued_at, story.unscored_at),
        ("unscored", story.unscored_at, story.ready_at),
        ("ready", story.ready_at, first),
        ("claimed", claimed, committed),
        ("trained", committed, retired),
    ]
    parts = [f"{name} {end - start:.3f} s" for name, start, end in marks if start and end >= start]
    yield "times     " + (", ".join(parts) or "still in its first state")


def _training(story: Story) -> Iterator[str]:
    for training in story.training:
        yield f"step {training.step}    {_step(story, training)}"
        loss = training.loss
        for place, index in enumerate(loss.get("indexes", ())):
            weight = loss["weights"][place]
            yield (
                f"            #{index}: advantage {loss['advantages'][place]:+.4f}, {loss['tokens'][place]} tokens, "
                f"mean importance weight {'-' if weight is None else f'{weight:.4f}'}"
            )


def _step(story: Story, training: Training) -> str:
    lag = "no tokens" if training.lag is None else f"lag {training.lag} of {story.bound}"
    words = [f"claimed {_format_time(story, training.claimed_at).strip()} from version {training.version}, {lag}"]
    words.append(f"learner epoch {training.epoch}{', replayed' if training.replayed else ''}")
    words.append(
        f"committed {_format_time(story, training.committed_at).strip()}" if training.committed_at else "not committed"
    )
    if training.retired_at:
        words.append("in a durable checkpoint")
    if training.superseded:
        words.append("superseded: the learner restarted before this step")
    return "; ".join(words)


def step_text(claim: dict[str, Any], stories: list[Story]) -> str:
    """The groups of a step, one line each."""
    replayed = ", replayed" if claim["replayed"] else ""
    lines = [
        f"step {claim['step']} from version {claim['version']}, learner epoch {claim['epoch']}{replayed}: "
        f"{len(stories)} groups"
    ]
    for story in stories:
        training = next((item for item in reversed(story.training) if item.step == claim["step"]), None)
        rewards = [sample.reward for sample in story.samples if sample.reward is not None]
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"
        tokens = sum(sample.length for sample in story.samples)
        makers = ", ".join(sorted({sample.producer for sample in story.samples}))
        lag = "-" if training is None or training.lag is None else str(training.lag)
        lines.append(
            f"  group {story.group:>6}  lag {lag} of {story.bound}  reward {mean}  "
            f"{len(story.samples)} samples, {tokens} tokens  by {makers}  {story.state}"
        )
    return "\n".join(lines)


def dead_text(groups: list[dict[str, Any]], letters: list[Letter]) -> str:
    """Quarantined groups with their reasons, then the recorded dead letters."""
    lines = [f"{len(groups)} dead groups"]
    lines += [f"  group {event['g']:>6}  {event['reason']}  {event['detail']}" for event in groups]
    return "\n".join([*lines, *_letters(letters)]) if letters else "\n".join([*lines, "no dead letters are kept"])


def _letters(letters: list[Letter]) -> Iterator[str]:
    if letters:
        yield "dead letters"
    for letter in letters:
        made = f" by {letter.producer}, samples {', '.join(map(str, letter.indexes))}" if letter.producer else ""
        head = f"; it begins {letter.head}" if letter.head else ""
        yield f"  {letter.path} ({letter.size} bytes){made}: {letter.wrong}{head}"
