"""The reward worker process: leases unscored samples, scores them in a child process, sends scores and failures.

Run as `python -m producers.rewards.main --config RESOLVED.toml --name NAME [--judge NAME] [--connect URL --key FILE]`;
it scores with the functions of one judge (`asyncrl.config.sections.reward`). Guarantees:
1. functions that cannot be used end the process with `config.reward` (exit code 2) before it asks for work;
2. a score leaves as soon as it exists, also while the rest of the batch is being scored;
3. every error of a function is a failure with its reason (raised | timeout | memory | not_finite | died), which the
   buffer retries on other workers; it is never a reward;
4. heartbeats continue while a function runs; SIGTERM lets the current batch finish for a few seconds, and waits no
   longer than two for a buffer that does not answer.
It imports no torch and runs no user function in its own process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np

from asyncrl.config import Config
from asyncrl.config.judges import Judge, display_name, find_judge, list_judges
from asyncrl.errors import ConfigError, Unavailable
from asyncrl.evaluation.ids import is_evaluation
from asyncrl.images.digests import image_digests
from asyncrl.runtime import role
from asyncrl.runtime import run_dir as rundir
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.liveness import Sign
from asyncrl.wire import RewardFailure, RewardItem, Score
from buffers.client.reward import RewardClient, RewardTask
from producers.data.tokenizer import Tokenizer
from producers.rewards.build import make_scorer
from producers.rewards.pipe import Result
from producers.rewards.sample import RewardSample
from producers.rewards.scorer import Scorer
from producers.support.progress_line import ProgressLine
from producers.support.retry import Bell, Patience

T = TypeVar("T")
POLL_S = 1.0
GRACE_S = 5.0  # for the batch under way after SIGTERM
LOOK_S = 5.0  # every call has its timeout and wakes the wait at its end: only a safety net


def make_sample(task: RewardTask, tokenizer: Tokenizer, *, prompt_key: str) -> RewardSample:
    """The functions' view of a leased sample."""
    prompt, ids = task.row.get(prompt_key), task.response_ids
    shown, turns = ids, []
    if task.mask is not None:
        shown = np.delete(ids, np.concatenate([np.arange(0), *(np.arange(at, at + n) for at, n in task.item.rows)]))
        edges = np.flatnonzero(np.diff(task.mask, prepend=0, append=0) % 2)  # u1: from 0 to 1, and back
        turns = [tokenizer.decode(ids[start:stop].tolist()) for start, stop in edges.reshape(-1, 2)]
    return RewardSample.from_row(
        task.row,
        prompt=prompt if isinstance(prompt, str) else tokenizer.decode(task.prompt_ids.tolist()),
        response=tokenizer.decode(shown.tolist()),
        prompt_ids=task.prompt_ids.tolist(),
        response_ids=ids.tolist(),
        finish=task.item.finish,
        turns=turns,
        images=task.item.images,
        rows=task.item.rows,
    )


class Worker:
    """One client, one child process."""

    def __init__(
        self,
        config: Config,
        *,
        client: RewardClient,
        scorer: Scorer,
        stop: role.Stop,
        patience: Patience,
        batch_samples: int,
    ) -> None:
        self.config = config
        self.batch_samples = batch_samples
        self.client = client
        self.patience = patience
        self.scorer = scorer
        self.stop = stop
        self.waiting_for = "samples"
        self.tokenizer = Tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        # One thread for the child's whole life: PR_SET_PDEATHSIG kills it when the *thread* that made it ends.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self.holding: tuple[RewardItem, ...] = ()
        self.scored = 0
        self.progress = ProgressLine("scores")
        self.failed = 0
        self._busy_s = 0.0
        self._calls = 0
        self._batches = 0  # since the start
        self._warned: set[str] = set()  # reasons of failures that were logged as warnings
        self._beat = time.monotonic()

    async def run(self) -> None:
        """Score until the run is done or the process is asked to end."""
        await asyncio.get_running_loop().run_in_executor(self.thread, self.scorer.start)
        while not self.stop.is_set():
            self.waiting_for = "samples"
            tasks, done = await self._patiently(
                lambda: self.client.work(max_samples=self.batch_samples, wait_s=self.client.interval(POLL_S))
            )
            if tasks:
                self.waiting_for = ""
                self._batches += 1
                self.holding = tuple(task.item for task in tasks)
                await self._score(tasks)
                self.holding = ()
            elif done:
                return

    async def _score(self, tasks: Sequence[RewardTask]) -> None:
        """Score a batch on the scorer's thread, and send finished results meanwhile."""
        failpoint("reward.before_score")
        tasks, images = await self._fetch_images(tasks)
        samples = [make_sample(task, self.tokenizer, prompt_key=self.config.data.prompt_key) for task in tasks]
        loop = asyncio.get_running_loop()
        ready: list[Result] = []
        bell = Bell()

        def arrive(result: Result) -> None:
            ready.append(result)
            bell.ring()

        started = time.monotonic()

        def hand_over(result: Result) -> None:  # on the scorer's thread
            loop.call_soon_threadsafe(arrive, result)

        scoring = loop.run_in_executor(self.thread, self.scorer.score, samples, hand_over, images)
        scoring.add_done_callback(lambda _: bell.ring())
        while ready or not scoring.done():
            await bell.wait(timeout_s=LOOK_S)
            batch, ready = ready, []
            if batch:
                failpoint("reward.after_score")
                await self._send(tasks, batch, samples)
                failpoint("reward.after_ack")
        self._busy_s += time.monotonic() - started
        scoring.result()

    async def _fetch_images(self, tasks: Sequence[RewardTask]) -> tuple[Sequence[RewardTask], dict[str, bytes]]:
        """The tasks that can be scored, and their images; those without theirs fail."""
        named = [(*image_digests(task.row), *task.item.images) if self.scorer.sees_images else () for task in tasks]
        if not any(named):
            return tasks, {}
        images, problems = await self._patiently(lambda: self.client.images(chain.from_iterable(named)))
        lost = {
            place: Result(place, reason="raised", detail=problems[digest])
            for place, digests in enumerate(named)
            for digest in digests
            if digest in problems
        }
        if lost:
            await self._send(tasks, list(lost.values()), ())
        return [task for place, task in enumerate(tasks) if place not in lost], images

    async def _send(
        self, tasks: Sequence[RewardTask], batch: Sequence[Result], samples: Sequence[RewardSample]
    ) -> None:
        scores, failures, taught = [], [], []
        for result in batch:
            item = tasks[result.place].item
            if result.reason:
                failures.append(RewardFailure(item.group, item.index, item.token, result.reason, result.detail))
                mark = "" if result.reason in self._warned else "warning: "  # the launcher displays the first of a kind
                self._warned.add(result.reason)
                print(f"{mark}group {item.group} sample {item.index}: {result.reason}: {result.detail}", flush=True)
            elif result.arrays:
                taught.append((item, result.arrays))
            else:
                # Only evaluations use answers; that of `builtin:exact` is a whole turn.
                shown = (result.answer, samples[result.place].response) if is_evaluation(item.group) else ("", "")
                scores.append(Score(item.group, item.index, item.token, result.reward, result.parts, *shown))
        self.scored += len(scores) + len(taught)
        self.failed += len(failures)
        self._calls += len(batch)
        version = self.scorer.version
        if scores or failures:
            await self._patiently(lambda: self.client.submit(scores, failures, reward_version=version))
        for item, arrays in taught:
            await self._patiently(partial(self.client.submit_teaching, item, arrays, version=version))

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self.patience.ask(call)

    async def heartbeats(self) -> None:
        """Send heartbeats to the buffer; they renew the leases."""
        while True:
            beat = partial(self.client.heartbeat, self.stats(), waiting_for=self.waiting_for, holds=self.holding)
            await self._patiently(beat)
            await asyncio.sleep(self.client.interval(self.config.log.heartbeat_s))

    async def signs(self, sign: Sign) -> None:
        """Write signs of life for the launcher."""
        seen = 0
        try:
            while True:
                self.progress.tick(self.scored, f"{self.failed} failed; waits for {self.waiting_for or 'nothing'}")
                batches, seen = self._batches - seen, self._batches
                sign.beat(self.waiting_for and (self.patience.waits_for or self.waiting_for), worked=batches > 0)
                await asyncio.sleep(self.config.log.heartbeat_s)
        finally:
            sign.close()

    def stats(self) -> dict[str, float]:
        """Numbers of the heartbeat, by catalogue name."""
        now = time.monotonic()
        share = min(1.0, self._busy_s / max(1e-9, now - self._beat))
        stats = {"busy_share": share, "scored_samples": self.scored, "failed_rewards": self.failed}
        if self._calls and self._busy_s:  # busy time is known at the end of a batch
            stats["reward_call_s"] = self._busy_s / self._calls
            self._calls = 0
        self._beat, self._busy_s = now, 0.0
        return stats


def require_judge(config: Config, name: str) -> Judge:
    """The judge of that name. Raises `reward.judge` for an unknown name."""
    found = find_judge(config, name)
    if found is None:
        known = ", ".join(judge.display_name for judge in list_judges(config)) or "none"
        raise ConfigError("reward.judge", f"{display_name(name)!r}: this run has {known}", where="--judge")
    return found


async def wait_for_stop(stop: role.Stop) -> None:
    """Return some seconds after SIGTERM: `run` usually ends earlier, after its batch."""
    while not stop.is_set():
        await asyncio.sleep(0.1)
    await asyncio.sleep(GRACE_S)


async def work(args: role.RoleArgs, config: Config, stop: role.Stop) -> None:
    """Connect, load the functions, score, and kill the child at the end."""
    address, limit_s = rundir.buffer_address(config, args.connect), config.network.request_timeout_s
    patience = Patience(f"buffer {address}", limit_s=limit_s, stop=stop)
    judge = require_judge(config, args.judge)
    client = RewardClient(
        address,
        name=args.name,
        judge=judge.name,
        keys=role.worker_key(args, config, "reward"),
        max_bytes=config.network.max_message_bytes,
        timeout_s=limit_s,
    )
    client.may_rename = role.MAY_RENAME in os.environ
    worker = Worker(
        config,
        client=client,
        scorer=make_scorer(config, judge),
        stop=stop,
        patience=patience,
        batch_samples=judge.batch_samples,
    )
    tasks: list[asyncio.Task[None]] = []
    try:
        await patience.ask(client.hello)
        sign = Sign(rundir.RunDir(config.run_dir).alive, role="reward", name=args.name)
        parts = (worker.run(), worker.heartbeats(), wait_for_stop(stop), worker.signs(sign))
        tasks = [asyncio.create_task(part) for part in parts]
        # bounded: the life of the role; each of its parts has its own deadlines
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    except Unavailable as error:
        if not patience.gave_up:
            raise
        print(f"left without a word: {error.message}; its leases expire", flush=True)
    finally:
        for task in tasks:
            task.cancel()
        worker.scorer.stop()  # ends a call under way, so that the scorer's thread returns
        worker.thread.shutdown(wait=True, cancel_futures=True)  # bounded: the child of its call is dead
        worker.scorer.close()
        client.close()


def body(args: role.RoleArgs, config: Config, stop: role.Stop) -> None:
    asyncio.run(work(args, config, stop))


def main() -> int:
    return role.run("reward", body)


if __name__ == "__main__":
    sys.exit(main())
