"""The contract test of a reward function: `asyncrl test-reward` and `asyncrl.testing`.

Run as `python -m producers.rewards.contract_test NAME --data FILE`, and by authors' tests. The function runs as in a
run, in the worker's child process with its time-out and its memory limit, on rows with responses of several kinds:

    good   the ground truth (or the named column)              bad    good with an error in front of it
    empty  nothing                                             huge   `HUGE` characters
    odd    control characters, other scripts, half a tag       cut    good, ended by the length limit

Guarantees:
1. every check has a verdict (ok, note, fails) and, if it is not ok, a remedy;
2. a function that breaks its process (hang, crash, fork, print) costs that sample and not the test;
3. the second pass runs in a new process, after the first one was killed: a difference between them means that the
   reward is not a function of the sample, or does not survive a restart."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.config import DataConfig
from asyncrl.config.media import find_media
from asyncrl.config.sections.reward import reward_label
from asyncrl.errors import EXIT_FAILED, EXIT_OK, AsyncRLError, ConfigError
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.digests import IMAGES, image_digests
from asyncrl.images.rows import VIDEOS, Normalised, normalise_row
from asyncrl.preflight.files import data_paths, prompt_column
from producers.data.prompts import BadPrompt, Prompts
from producers.rewards.functions import RewardCall
from producers.rewards.pipe import FunctionSpec, Result, SandboxSpec
from producers.rewards.sample import RewardSample
from producers.rewards.scorer import Scorer

KINDS = ("good", "bad", "empty", "huge", "odd", "cut")
HUGE = 100_000
ODD = "\x00\x07\u202e\ufffd \U0001f600 \u0661\u0662 \\boxed{ <think> ``` %s {0}"
Samples = Sequence[tuple[int, str, RewardSample]]  # number of the row, kind of the response
SLOW_SHARE = 0.5  # of the time-out, for a call without a note


class Check(msgspec.Struct, frozen=True):
    """One line of the report. `verdict` is ok | note | fails."""

    verdict: str
    text: str
    remedy: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """The result of one response, and the time of its call."""

    row: int
    kind: str
    result: Result
    wall_s: float

    @property
    def display(self) -> str:
        """`0.5`, or the reason of a failure."""
        return self.result.reason or f"{self.result.reward:g}"


class RewardReport(msgspec.Struct, frozen=True):
    """The whole report. `ok`: no check fails."""

    name: str
    form: str
    outcomes: tuple[Outcome, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.verdict != "fails" for check in self.checks)

    def render(self) -> str:
        """A table of the responses, and the checks."""
        lines = [f"{self.name}: form {self.form}", "", f"  {'response':<9} {'calls':>5} {'rewards':<28} slowest"]
        for kind in KINDS:
            mine = [outcome for outcome in self.outcomes if outcome.kind == kind]
            if mine:
                values = ", ".join(dict.fromkeys(outcome.display for outcome in mine))
                slowest = max(outcome.wall_s for outcome in mine)
                lines.append(f"  {kind:<9} {len(mine):>5} {_cut(values, 28):<28} {1000 * slowest:.1f} ms")
        lines.append("")
        for check in self.checks:
            lines.append(f"  {check.verdict:<5}  {check.text}")
            if check.remedy:
                lines.append(f"         -> {check.remedy}")
        return "\n".join(lines)


def check_reward(
    function: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    args: Mapping[str, Any] | None = None,
    response_key: str = "",
    prompt_key: str = "prompt",
    timeout_s: float = 10.0,
    memory_bytes: int = 2 << 30,
    sandbox: str = "bubblewrap",
    env: Collection[str] | None = None,
    images: Mapping[str, bytes] = MappingProxyType({}),
) -> RewardReport:
    """Test a reward function on rows. Raises `config.reward` if it cannot be used at all. `env`: variables that its
    process inherits, as in `[[reward]]`; None: all, since this is the author's own process.
    `images`: those of rows that hold digests; other rows may hold images themselves.
    """
    rows, images = read_images(rows, images, prompt_key=prompt_key)
    call = RewardCall(function, args=args, prompt_key=prompt_key)
    spec = FunctionSpec(function, reward_label(function), args=dict(args or {}))
    samples = [
        (number, kind, sample)
        for number, row in enumerate(rows)
        for kind, sample in make_responses(dict(row), response_key=response_key, prompt_key=prompt_key)
    ]
    scorer = Scorer(
        [spec],
        prompt_key=prompt_key,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
        sandbox=SandboxSpec(sandbox),
        env=tuple(os.environ) if env is None else env,
    )
    try:
        scorer.start()
        first = _pass(scorer, samples, images)
        peak = scorer.peak_bytes()
        scorer.close()  # SIGKILL, as after a time-out
        scorer.start()
        again = _pass(scorer, samples, images)
        together = _together(scorer, samples, images) if call.is_batch else []
    finally:
        scorer.close()
    checks = [
        Check("ok", f"it loads, and its signature is that of form {call.form}"),
        *_failures(first, timeout_s),
        *_same(first, again),
        *_check_batch(first, together),
        *_tells_apart(first),
        *_time(first, timeout_s),
        _memory(peak, memory_bytes),
    ]
    return RewardReport(function, call.form, tuple(first), tuple(checks))


def make_responses(row: dict[str, Any], *, response_key: str, prompt_key: str) -> list[tuple[str, RewardSample]]:
    """All kinds of responses to a row, as samples. Tokens are characters here."""
    prompt = row.get(prompt_key)
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    bare = RewardSample.from_row(row, prompt="", response="", prompt_ids=[], response_ids=[], finish="stop")
    truth = row.get(response_key) if response_key else bare.ground_truth
    if isinstance(truth, list | tuple) and truth:
        truth = truth[0]
    good = truth if isinstance(truth, str) else "" if truth is None else json.dumps(truth)
    texts = {
        "good": good,
        "bad": f"no: {good[::-1]}7",
        "empty": "",
        "huge": ("word " * HUGE)[:HUGE],
        "odd": ODD,
        "cut": good[: len(good) // 2],
    }
    return [
        (
            kind,
            RewardSample.from_row(
                row,
                prompt=text,
                response=said,
                prompt_ids=[ord(c) % 997 for c in text],
                response_ids=[ord(c) % 997 for c in said],
                finish="length" if kind == "cut" else "stop",
            ),
        )
        for kind, said in texts.items()
    ]


def _pass(scorer: Scorer, samples: Samples, images: Mapping[str, bytes]) -> list[Outcome]:
    """Each sample in a separate job."""
    found = []
    for row, kind, sample in samples:
        results: list[Result] = []
        began = time.monotonic()
        scorer.score([sample], results.append, images)
        found.append(Outcome(row, kind, results[0], time.monotonic() - began))
    return found


def _together(scorer: Scorer, samples: Samples, images: Mapping[str, bytes]) -> list[Result]:
    """All samples in one job, by their places."""
    results: dict[int, Result] = {}
    scorer.score([sample for _, _, sample in samples], lambda result: results.update({result.place: result}), images)
    return [results[place] for place in range(len(samples))]


# ---------------------------------------------------------------- verdicts


def _failures(outcomes: Sequence[Outcome], timeout_s: float) -> list[Check]:
    remedies = {
        "timeout": f"make it faster, or raise reward_workers.timeout_s: the call is killed after {timeout_s:g} s, the "
                   "sample is scored again, reward_workers.retries times, and then its group is set aside",
        "memory": "use less memory, or raise reward_workers.memory_bytes",
        "died": "it exits or crashes its process: return a number, and do not call exit",
        "not_finite": "give a finite number: NaN and infinities are failures, never rewards",
        "raised": "return a number for every response (a bad one: 0); raise only if the row itself is wrong",
    }  # fmt: skip
    failed = [outcome for outcome in outcomes if outcome.result.reason]
    if not failed:
        return [Check("ok", f"{len(outcomes)} responses, each with a finite number")]
    checks = []
    for reason in dict.fromkeys(outcome.result.reason for outcome in failed):
        mine = [outcome for outcome in failed if outcome.result.reason == reason]
        kinds = ", ".join(dict.fromkeys(outcome.kind for outcome in mine))
        text = f"{reason} for {len(mine)} of {len(outcomes)} responses ({kinds}); row {mine[0].row}: "
        checks.append(Check("fails", text + _cut(mine[0].result.detail, 160), remedies.get(reason, "")))
    return checks


def _same(first: Sequence[Outcome], again: Sequence[Outcome]) -> list[Check]:
    for one, other in zip(first, again, strict=True):
        left, right = one.result, other.result
        if (left.reward, left.parts, left.reason, left.answer) != (
            right.reward,
            right.parts,
            right.reason,
            right.answer,
        ):
            text = (
                f"different values: row {one.row}, {one.kind}: {one.display}, then {other.display} (in a new process)"
            )
            return [
                Check(
                    "fails",
                    text,
                    "let it depend on the sample alone: no clock, no random numbers, no order of "
                    "sets, no state between calls; a judge needs temperature 0",
                )
            ]
    return [Check("ok", "the same values again in a new process, after the first was killed")]


def _check_batch(first: Sequence[Outcome], together: Sequence[Result]) -> list[Check]:
    if not together:
        return []
    for outcome, result in zip(first, together, strict=True):
        if (outcome.result.reward, outcome.result.reason) != (result.reward, result.reason):
            batched = result.reason or result.reward
            text = f"row {outcome.row}, {outcome.kind}: {outcome.display} alone, {batched} in a batch"
            return [Check("note", text, "a batch is any samples that one worker holds: do not compare within it")]
    return [Check("ok", f"alone as in a batch of {len(together)}")]


def _tells_apart(outcomes: Sequence[Outcome]) -> list[Check]:
    rewards: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for outcome in outcomes:
        if not outcome.result.reason:
            rewards[outcome.kind].append(outcome.result.reward)
    if not rewards["good"] or not rewards["bad"]:
        return []
    good, bad = (math.fsum(rewards[kind]) / len(rewards[kind]) for kind in ("good", "bad"))
    if good > bad:
        return [Check("ok", f"good responses get {good:g} on average, bad ones {bad:g}")]
    remedy = "if the ground truth alone is no good response, name a column of good ones by --response-key"
    return [Check("note", f"good responses get {good:g} on average, bad ones {bad:g}", remedy)]


def _time(outcomes: Sequence[Outcome], timeout_s: float) -> list[Check]:
    calls = [outcome for outcome in outcomes if outcome.result.reason != "timeout"]
    if not calls:
        return []
    slowest = max(calls, key=lambda outcome: outcome.wall_s)
    mean = math.fsum(outcome.wall_s for outcome in calls) / len(calls)
    text = f"{1000 * mean:.1f} ms a call on average, {1000 * slowest.wall_s:.1f} ms at most ({slowest.kind}), of "
    text += f"{timeout_s:g} s; past that it is killed and the sample is scored again"
    if slowest.wall_s < SLOW_SHARE * timeout_s:
        return [Check("ok", text)]
    return [Check("note", text, "a busy machine is slower: make it faster, or raise reward_workers.timeout_s")]


def _memory(peak: int, limit: int) -> Check:
    text = f"{peak >> 20} MiB at most, of {limit >> 20} MiB; past that a call fails with the reason memory"
    if 2 * peak < limit:
        return Check("ok", text)
    return Check("note", text, "raise reward_workers.memory_bytes, or use less memory")


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 3] + "..."


# ---------------------------------------------------------------- command


def load_rows(path: str, *, count: int, prompt_key: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The first rows of a file, and their images by digest. Raises `config.data`."""
    data = DataConfig(path=path, prompt_key=prompt_key, shuffle=False)
    prompts = Prompts(data, seed=0, sees=True)
    if not find_media(prompts.columns):
        prompts = Prompts(data, seed=0)
    rows: list[dict[str, Any]] = []
    images: dict[str, bytes] = {}
    try:
        for number in range(prompts.count(count)):
            rows.append(prompts.row_for(number))
            images |= zip(image_digests(rows[-1]), prompts.images_of(rows[-1]), strict=True)
    except BadPrompt as problem:
        raise ConfigError("config.data", f"row {len(rows)}: {problem.reason}", where=path) from None
    return rows, images


def read_images(
    rows: Sequence[Mapping[str, Any]], images: Mapping[str, bytes], *, prompt_key: str
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Rows with digests instead of images, and the images. Raises `config.data`."""
    found: list[dict[str, Any]] = []
    held = dict(images)
    for number, row in enumerate(rows):
        made = Normalised(dict(row), {})
        if (row.get(IMAGES) or row.get(VIDEOS)) and not image_digests(row):
            try:
                made = normalise_row(dict(row), prompt_key=prompt_key, image_key=IMAGES, folder=Path.cwd())
            except ImageProblem as problem:
                raise ConfigError("config.data", problem.reason, where=f"row {number}") from None
        found.append(made.row)
        held |= made.images
    return found, held


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="asyncrl test-reward", description="test a reward function as a run would")
    result.add_argument("function", metavar="NAME", help="module:name, path/file.py:name, builtin:name or an address")
    result.add_argument("--data", required=True, metavar="FILE", help=".jsonl, .json or .parquet")
    result.add_argument("--samples", type=int, default=4, metavar="N", help="rows to test it on (default 4)")
    result.add_argument("--response-key", default="", metavar="COLUMN", help="a good response; else the ground truth")
    result.add_argument(
        "--prompt-key", default="", metavar="COLUMN", help="the prompt (default: prompt, question, ...)"
    )
    result.add_argument("--args", type=json.loads, default={}, metavar="JSON", help="args of the [[reward]]")
    result.add_argument("--timeout-s", type=float, default=10.0, help="of one call (default 10)")
    result.add_argument("--memory-bytes", type=int, default=2 << 30, help="of its process (default 2 GiB)")
    result.add_argument("--sandbox", default="bubblewrap", help="kind of [sandbox] (default bubblewrap)")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0: it keeps the contract; 1: it does not; 2: it cannot be used."""
    args = parser().parse_args(argv)
    try:
        prompt_key = args.prompt_key or prompt_column(data_paths(args.data))
        rows, images = load_rows(args.data, count=max(1, args.samples), prompt_key=prompt_key)
        report = check_reward(
            args.function,
            rows,
            args=args.args,
            response_key=args.response_key,
            prompt_key=prompt_key,
            timeout_s=args.timeout_s,
            memory_bytes=args.memory_bytes,
            sandbox=args.sandbox,
            images=images,
        )
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(report.render())
    print(f"\n{'it keeps the contract' if report.ok else 'it does not keep the contract'} ({Path(args.data).name})")
    return EXIT_OK if report.ok else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
