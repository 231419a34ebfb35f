"""Scores archived samples again, for `asyncrl rescore`: without a buffer, with the children of reward workers.

Run as `python -m producers.rewards.rescore --config FOLDER/config.toml --name rescore`; FOLDER/plan.json has the task,
FOLDER/groups.jsonl and versions.json the results. Guarantees:
1. functions run as in a run: in a child with the judge's time and memory limits, `count` of them at a time; a failure
   is retried `retries` times, in another child if there is one;
2. the reward of a sample is the sum of its judges and of the recorded parts that stay; a sample without a result of
   every judge has failed;
3. a group in several steps (trained more than once) is scored once; unreadable archived batches are logged and skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.judges import Judge, judges_for, list_judges
from asyncrl.errors import AsyncRLError, WireError
from asyncrl.images.batches import read_images
from asyncrl.images.folder import ImageFolder
from asyncrl.metrics import open_lines
from asyncrl.runs.rescore import LINES, PLAN, VERSIONS, Plan
from asyncrl.runs.score_file import GroupScores, responses_digest
from asyncrl.runtime import batch_file
from asyncrl.runtime.role import RoleArgs, Stop, run
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import RewardItem
from asyncrl.wire.batch_arrays import decode_batch
from buffers.client.reward import RewardTask
from producers.data.tokenizer import Tokenizer
from producers.rewards.build import make_scorer
from producers.rewards.main import make_sample
from producers.rewards.pipe import Result
from producers.rewards.sample import RewardSample
from producers.rewards.scorer import Scorer

Place = tuple[int, int]  # group, sample
SAME_LOGPROB = 1e-4  # log-probs of a teacher that differ by less are equal


class Bench:
    """The children of one judge, each with its own thread."""

    def __init__(self, config: Config, judge: Judge) -> None:
        self.judge = judge
        self._scorers = [make_scorer(config, judge) for _ in range(judge.count)]
        # One thread per child for its whole life: PR_SET_PDEATHSIG kills it when the thread that made it ends.
        self._threads = [ThreadPoolExecutor(1) for _ in self._scorers]
        self._all(lambda scorer: scorer.start())
        self.version = self._scorers[0].version

    def _all(self, call: Callable[[Scorer], Any]) -> None:
        calls = [thread.submit(call, scorer) for thread, scorer in zip(self._threads, self._scorers, strict=True)]
        for done in calls:
            done.result()  # bounded: by the import limit of the scorer

    def score(self, samples: dict[Place, RewardSample], images: dict[str, bytes]) -> dict[Place, Result]:
        """The results of all samples; failures are retried as in a run."""
        found: dict[Place, Result] = {}
        left, size = list(samples), min(self.judge.batch_samples, -(-len(samples) // self.judge.count) or 1)
        for turn in range(self.judge.retries + 1):
            calls: list[tuple[list[Place], Future[list[Result]]]] = []
            for number, at in enumerate(range(0, len(left), size)):
                places = left[at : at + size]
                who = (number + turn) % len(self._scorers)
                mine = [samples[place] for place in places]
                job = self._threads[who].submit(self._job, self._scorers[who], mine, images)
                calls.append((places, job))
            for places, job in calls:
                # bounded: every call of a function has its timeout
                found |= {places[result.place]: result for result in job.result()}
            left = [place for place in left if found[place].reason]
            if not left:
                break
        return found

    @staticmethod
    def _job(scorer: Scorer, samples: Sequence[RewardSample], images: dict[str, bytes]) -> list[Result]:
        results: list[Result] = []
        scorer.score(samples, results.append, images)
        return results

    def close(self) -> None:
        for scorer, thread in zip(self._scorers, self._threads, strict=True):
            scorer.stop()
            thread.shutdown(wait=True, cancel_futures=True)  # bounded: the child of its call is dead
            scorer.close()


class Rescoring:
    """All judges over all archived batches."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config = config
        self._plan = plan
        self._archive = RunDir(Path(plan.run)).archive
        self._images = ImageFolder(RunDir(Path(plan.run)).images)
        self._tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self._rules = [(judge.name, judge.data_sources) for judge in list_judges(config)]
        self.benches = {judge.name: Bench(config, judge) for judge in list_judges(config)}
        self._known: dict[tuple[int, str], GroupScores] = {}

    def step(self, step: int) -> list[GroupScores]:
        """The groups of an archived batch."""
        try:
            file = batch_file.read(batch_file.batch_path(self._archive, step))
        except (WireError, OSError) as error:
            print(f"warning: the archived batch of step {step} is skipped: {error}", flush=True)
            return []
        batch = read_images(decode_batch(file.batch, file.payloads), self._images)
        for number, why in batch.invalid.items():
            print(f"warning: group {number} of step {step} is skipped: {why}", flush=True)
        groups = {group.group: group for group in batch.groups}
        contents = {number: responses_digest(one.response for one in group.samples) for number, group in groups.items()}
        fresh = [group for number, group in groups.items() if (number, contents[number]) not in self._known]
        for scored in self._score_groups(step, fresh, contents, batch.images):
            self._known[scored.group, scored.content] = scored
        return [
            msgspec.structs.replace(self._known[number, content], step=step) for number, content in contents.items()
        ]

    def _score_groups(
        self, step: int, groups: Iterable[Any], contents: dict[int, str], images: dict[str, bytes]
    ) -> list[GroupScores]:
        asked: dict[str, dict[Place, RewardSample]] = {name: {} for name in self.benches}
        groups = list(groups)
        for group in groups:
            for one in group.samples:
                if self._plan.teacher and not _was_taught(one, self._plan.teacher):
                    continue
                sample = self._sample(group, one)
                for judge in judges_for(sample.data_source, self._rules):
                    asked[judge][group.group, one.index] = sample
        results = {name: self.benches[name].score(samples, images) for name, samples in asked.items() if samples}
        return [self._group(step, group, contents[group.group], results) for group in groups]

    def _sample(self, group: Any, one: Any) -> RewardSample:
        images = tuple(digest for _, digest in one.images)
        item = RewardItem(group.group, one.index, 0, 0, "", one.finish, (), rows=one.rows, images=images)
        task = RewardTask(item, group.prompt_ids, one.response, group.row, one.mask)
        return make_sample(task, self._tokenizer, prompt_key=self._config.data.prompt_key)

    def _group(self, step: int, group: Any, content: str, results: dict[str, dict[Place, Result]]) -> GroupScores:
        if self._plan.teacher:
            return compare_teaching(step, group, content, results.get(self._plan.teacher, {}))
        rewards: dict[int, float] = {}
        parts: dict[int, dict[str, float]] = {}
        failed: dict[int, str] = {}
        for one in group.samples:
            place = (group.group, one.index)
            mine = [found[place] for found in results.values() if place in found]
            bad = next((result for result in mine if result.reason), None)
            if bad is not None:
                failed[one.index] = f"{bad.reason}: {bad.detail}"
                continue
            kept = {name: value for name, value in one.parts.items() if name.split("/")[0] in self._plan.kept}
            rewards[one.index] = sum((result.reward for result in mine), 0.0) + sum(
                weight * kept[label] for label, weight in self._plan.kept.items() if label in kept
            )
            parts[one.index] = kept | {name: value for result in mine for name, value in result.parts.items()}
        before = {one.index: one.reward for one in group.samples}
        return GroupScores(step, group.group, content, before, rewards, parts, failed)

    def close(self) -> None:
        for bench in self.benches.values():
            bench.close()


def _was_taught(sample: Any, teacher: str) -> bool:
    return sample.teaching is not None and sample.teaching.teacher == teacher


def compare_teaching(step: int, group: Any, content: str, results: dict[Place, Result]) -> GroupScores:
    """Mean log-probs of a teacher, as recorded and as computed again, and the largest difference of a token."""
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    parts: dict[int, dict[str, float]] = {}
    failed: dict[int, str] = {}
    for one in group.samples:
        result = results.get((group.group, one.index))
        if result is None:  # another teacher's
            continue
        trained = slice(None) if one.mask is None else one.mask.astype(bool)
        recorded = one.teaching.logprobs[trained]
        before[one.index] = float(recorded.mean())
        if result.reason:
            failed[one.index] = f"{result.reason}: {result.detail}"
            continue
        found = np.frombuffer(result.arrays["teacher_logprobs"], np.float32)[trained]
        apart = float(np.abs(found - recorded).max())
        # Up to rounding: the same sample in another batch is padded to another width.
        after[one.index] = before[one.index] if apart <= SAME_LOGPROB else float(found.mean())
        parts[one.index] = {"largest_difference": apart}
    return GroupScores(step, group.group, content, before, after, parts, failed)


def body(_args: RoleArgs, config: Config, stop: Stop) -> None:
    """Score step after step, and write each result at once."""
    folder = Path(config.run.dir)
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    work = Rescoring(config, plan)
    try:
        versions = {name: bench.version for name, bench in work.benches.items()}
        (folder / VERSIONS).write_bytes(msgspec.json.encode(versions))
        with open_lines(folder / LINES) as file:
            for step in plan.steps:
                if stop.is_set():
                    raise AsyncRLError("role.failed", f"asked to end before step {step}", where="rescore")
                file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in work.step(step)))
    finally:
        work.close()


def main(argv: list[str] | None = None) -> int:
    return run("rescore", body, argv)


if __name__ == "__main__":
    sys.exit(main())
