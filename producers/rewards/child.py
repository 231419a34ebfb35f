"""The process that runs the user's reward functions, and nothing else: it may be killed at any moment.

Started by `producers.rewards.scorer` as `python -m producers.rewards.child READ_FD WRITE_FD`. Guarantees:
1. it sends `Begin` before every call, so that the parent can attribute a timeout or a death to a sample;
2. an exception of a function is a failure of that sample, never a reward;
3. async functions of a job run together, each within the timeout; a batch function that raises is retried sample by
   sample, so that one bad sample does not fail the others;
4. output of functions goes to the worker's log; the pipes are not stdin or stdout;
5. it and every process that it starts has at most `memory_bytes` of data each: more is a MemoryError, a failure of the
   sample with the reason `memory`.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import resource
import sys
from collections.abc import Sequence
from typing import Any

from asyncrl.errors import AsyncRLError
from asyncrl.images.decoding import ImageProblem
from asyncrl.runtime.role import die_with_parent
from asyncrl.runtime.user_errors import format_user_error
from producers.rewards.functions import RewardCall
from producers.rewards.images import sees_images, show_images
from producers.rewards.outcome import Problem
from producers.rewards.pipe import WHOLE_BATCH, Begin, Closed, FunctionSpec, Job, Pipe, Ready, Result, Setup
from producers.rewards.sample import NotFinite, RewardSample, Value, encodable, read_value
from producers.sandbox import ready_sandbox

MOST_LETTERS = 500  # of a failure message


Outcome = Value | Problem


def make_failure(label: str, error: BaseException) -> Problem:
    """The failure for an exception of the function."""
    if isinstance(error, MemoryError):
        return Problem("memory", f"{label}: MemoryError")
    reason, text = "raised", format_user_error(error)
    if isinstance(error, NotFinite):
        reason, text = "not_finite", str(error)
    if isinstance(error, TimeoutError):
        reason, text = "timeout", str(error) or "TimeoutError"
    return Problem(reason, encodable(f"{label}: {text}"[:MOST_LETTERS]))


class Scoring:
    """All functions of the configuration."""

    def __init__(self, setup: Setup, pipe: Pipe) -> None:
        self._pipe = pipe
        self._timeout_s = setup.timeout_s
        sandbox = functools.cache(lambda: ready_sandbox(setup.sandbox.kind, setup.sandbox.limits))
        self._calls = [
            (spec, RewardCall(spec.function, prompt_key=setup.prompt_key, args=spec.args, make_sandbox=sandbox))
            for spec in setup.functions
        ]
        self._sees = sees_images(spec.function for spec in setup.functions)

    def version(self) -> str:
        """Digest of the functions' files."""
        digest = hashlib.blake2b(digest_size=8)
        for spec, call in self._calls:
            digest.update(f"{spec.function} {spec.weight} {spec.data_sources} {spec.args}".encode())
            digest.update(call.source())
        return digest.hexdigest()

    def score(self, job: Job) -> None:
        """Score a job: functions over many samples first, then sample by sample, each reported when done."""
        shown = show_images(job.samples, job.images) if self._sees else job.samples
        samples: dict[int, RewardSample] = {}  # by place
        for place, found in enumerate(shown):
            if isinstance(found, ImageProblem):
                self._pipe.send(Result(place, reason="raised", detail=found.reason))
            else:
                samples[place] = found
        together: dict[tuple[int, str], Outcome] = {}
        for spec, call in self._calls:
            places = [place for place, sample in samples.items() if applies(spec, sample)]
            if places and (call.is_batch or call.is_async):
                values = self._together(spec, call, [samples[place] for place in places], places)
                together |= {(place, spec.label): value for place, value in zip(places, values, strict=True)}
        for place, sample in samples.items():
            outcomes: dict[str, Outcome] = {}
            for spec, call in self._calls:
                if (place, spec.label) in together:
                    outcomes[spec.label] = together[place, spec.label]
                elif applies(spec, sample):
                    outcomes[spec.label] = self._one(spec, call, sample, place)
            self._pipe.send(self._result(place, sample, outcomes))

    def _one(self, spec: FunctionSpec, call: RewardCall, sample: RewardSample, place: int) -> Outcome:
        self._pipe.send(Begin(place, spec.label))
        try:
            if call.is_batch:
                return call.values(_settle(call.batch([sample])), 1)[0]
            return read_value(_settle(call.one(sample)))
        except Exception as error:  # any error of the user's code is a failure of this sample
            return make_failure(spec.label, error)

    def _together(
        self, spec: FunctionSpec, call: RewardCall, samples: list[RewardSample], places: list[int]
    ) -> list[Outcome]:
        self._pipe.send(Begin(WHOLE_BATCH if len(samples) > 1 else places[0], spec.label))
        if not call.is_batch:
            return asyncio.run(self._gather(spec, call, samples))
        try:
            return list(call.values(_settle(call.batch(samples)), len(samples)))
        except Exception as error:  # as in `_one`
            if len(samples) == 1:
                return [make_failure(spec.label, error)]
        return [self._one(spec, call, sample, place) for sample, place in zip(samples, places, strict=True)]

    async def _gather(self, spec: FunctionSpec, call: RewardCall, samples: list[RewardSample]) -> list[Outcome]:
        async def guard(sample: RewardSample) -> Outcome:
            try:
                return read_value(await asyncio.wait_for(call.one(sample), self._timeout_s))
            except Exception as error:  # as in `_one`
                return make_failure(spec.label, error)

        return list(await asyncio.gather(*(guard(sample) for sample in samples)))  # bounded: each by wait_for

    def _result(self, place: int, sample: RewardSample, outcomes: dict[str, Outcome]) -> Result:
        reward, parts, answer = 0.0, {}, ""
        used = False
        for spec, _ in self._calls:
            outcome = outcomes.get(spec.label)
            if isinstance(outcome, Problem):
                return Result(place, reason=outcome.reason, detail=outcome.detail)
            if outcome is None or outcome.value is None:
                continue
            used = True
            reward += spec.weight * outcome.value
            answer = answer or outcome.answer
            parts[spec.label] = outcome.value
            parts |= {f"{spec.label}/{name}": value for name, value in outcome.parts.items()}
        if not used:
            return Result(place, reason="raised", detail=f"no reward function for data_source {sample.data_source!r}")
        return Result(place, reward, parts, answer=answer)


def applies(spec: FunctionSpec, sample: RewardSample) -> bool:
    """Whether the function scores rows of this source."""
    return not spec.data_sources or sample.data_source in spec.data_sources


def _settle(raw: Any) -> Any:
    """The result; awaits it if a plain function returned an awaitable."""
    return asyncio.run(_await(raw)) if inspect.isawaitable(raw) else raw


async def _await(raw: Any) -> Any:
    return await raw  # bounded: the scorer kills this process at the timeout of the call


def limit(memory_bytes: int) -> None:
    """Limit the memory of this process and its children (data segments and private mappings, not mapped files)."""
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def open_pipe(argv: Sequence[str]) -> tuple[Pipe, Setup]:
    """The pipe to the parent and its first frame; sets the limits. Raises Closed."""
    die_with_parent()
    pipe = Pipe(int(argv[0]), int(argv[1]))
    setup = pipe.receive(None)
    assert isinstance(setup, Setup)
    limit(setup.memory_bytes)
    return pipe, setup


def main(argv: Sequence[str]) -> int:
    """Serve jobs until the parent closes the pipe."""
    try:
        pipe, setup = open_pipe(argv)
        try:
            scoring = Scoring(setup, pipe)
        except AsyncRLError as error:
            remedy = "" if error.code == "config.reward" else f" -> {error.remedy}"
            pipe.send(Ready((f"{error.where}: " if error.where else "") + error.message + remedy, ""))
            return error.exit_code
        pipe.send(Ready("", scoring.version()))
        while True:
            job = pipe.receive(None)
            assert isinstance(job, Job)
            scoring.score(job)
            sys.stdout.flush()
    except Closed:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
