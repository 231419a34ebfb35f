"""The process of a judge that is a model: holds the model, scores the samples of the reward worker.

Started by `producers.rewards.scorer` as `python -m producers.rewards.judges.child READ_FD WRITE_FD`, with the frames of
`producers.rewards.pipe`. Guarantees:
1. it reports when the model is loaded, or the error;
2. every sample of a job gets one result as soon as it is known; each one shows the parent that it is alive;
3. an error of a sample is a failure with its reason, never a reward;
4. a sample's reward is the sum of `weight * score` over the judge's rewards for its data source.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from asyncrl.errors import AsyncRLError
from producers.rewards.child import applies, open_pipe
from producers.rewards.judges.templates import open_references
from producers.rewards.outcome import JudgeSettings, Model, Outcome, Problem
from producers.rewards.pipe import WHOLE_BATCH, Begin, Closed, FunctionSpec, Job, Pipe, Ready, Result, Setup
from producers.rewards.sample import RewardSample


def make_model(settings: JudgeSettings) -> Model:
    """The judge of these settings; imports only its own packages."""
    if settings.teacher is not None:
        from producers.rewards.judges.teacher import make_teacher

        return make_teacher(settings, settings.teacher)
    if settings.table.kind == "url":
        from producers.rewards.judges.remote import Remote

        return Remote(settings)
    if settings.table.kind == "classifier":
        from producers.rewards.judges.classifier import Classifier

        return Classifier(settings)
    from producers.rewards.judges.generative import Written, YesNo

    return YesNo(settings) if settings.table.answer == "yes_no" else Written(settings)


def make_result(place: int, sample: RewardSample, outcome: Outcome, functions: Sequence[FunctionSpec]) -> Result:
    """The reward of a sample, by the rewards for its data source."""
    if isinstance(outcome, Problem):
        return Result(place, reason=outcome.reason, detail=outcome.detail)
    if outcome.arrays:
        return Result(place, arrays=outcome.arrays)
    used = [spec for spec in functions if applies(spec, sample)]
    if not used:
        return Result(place, reason="raised", detail=f"no reward for data_source {sample.data_source!r}")
    parts: dict[str, float] = {}
    for spec in used:
        parts[spec.label] = outcome.value
        parts |= {f"{spec.label}/{name}": value for name, value in outcome.parts.items()}
    return Result(place, sum(spec.weight for spec in used) * outcome.value, parts)


async def serve(setup: Setup, pipe: Pipe) -> int:
    """Load the model, then score jobs until the parent closes the pipe."""
    assert setup.judge is not None
    try:
        model = make_model(setup.judge)
        await model.start()
    except AsyncRLError as error:
        pipe.send(Ready(f"{error.where}: {error.message}" if error.where else error.message, ""))
        return error.exit_code
    pipe.send(Ready("", model.version()))
    try:
        while True:
            job = await asyncio.to_thread(pipe.receive, None)
            assert isinstance(job, Job)
            pipe.send(Begin(WHOLE_BATCH, setup.judge.table.name))
            samples = job.samples
            images = job.images if setup.judge.sees_images else None

            def report(place: int, outcome: Outcome, samples: Sequence[RewardSample] = samples) -> None:
                pipe.send(make_result(place, samples[place], outcome, setup.functions))

            await model.score(samples if images is None else [open_references(one, images) for one in samples], report)
            sys.stdout.flush()
    except Closed:
        return 0
    finally:
        await model.close()


def main(argv: Sequence[str]) -> int:
    """Serve jobs until the parent closes the pipe."""
    try:
        pipe, setup = open_pipe(argv)
    except Closed:
        return 0
    return asyncio.run(serve(setup, pipe))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
