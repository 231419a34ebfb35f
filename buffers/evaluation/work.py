"""What workers do for an evaluation: leases, samples, scores, and their losses.

Called through `buffers.evaluation.evaluations.Evaluations`. It follows the rules of training (`leasing`, `arriving`,
`scoring`)
where they have to do with workers, and none of those that have to do with staleness: there is no admission, no bound,
no filter and no deadline version, and nothing here counts towards a budget that ends the run. Guarantees:
1. a producer gets a prompt only with weights of the evaluated step or later, and holds at most
   `evaluation.share` of what it holds for training, beside that; once no group is left to issue, as much as that;
2. a lost lease keeps the samples that arrived; the missing ones are leased again, at most `max_reissue` times, then the
   prompt has failed with the reason;
3. an answer under an old token is refused, the same answer twice is acknowledged and changes nothing;
4. a reward that fails is tried again, elsewhere where another worker of its judge lives, then the prompt has failed:
   never a 0; with several judges a sample has its reward when all that are asked about it have answered.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

from asyncrl.config.judges import display_name
from asyncrl.config.sections.judge import DEFAULT
from asyncrl.evaluation.ids import evaluation_group, row_seed, row_source, split_group
from asyncrl.versions import oldest_version
from asyncrl.wire import Lease, LeaseReturn, RewardFailure, SampleHead, Samples, SamplesReply, Score, Scores
from buffers.evaluation.records import EvaluationBook, HeldOut, Prompt, Round
from buffers.groups.changes import Cancelled
from buffers.groups.judgements import Judged, said_by, take_answer, take_failure
from buffers.groups.judging import TOO_MANY_PARTS
from buffers.groups.leasing import GRACEFUL
from buffers.groups.records import Record
from buffers.groups.score_queue import Key
from buffers.groups.scoring import ToScore

ANSWER_CHARS = 200  # longer answers are told apart by a digest


def answer_key(answer: str, text: str) -> str:
    """By what a majority is counted: the answer that the reward function named, else the text; a digest of long ones.

    >>> answer_key("42", "so it is 42"), answer_key("", " no "), answer_key("", "x" * 300)[:5]
    ('42', 'no', 'text:')
    """
    key = answer.strip() or text.strip()
    if len(key) <= ANSWER_CHARS:
        return key
    return f"text:{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


class EvaluationWork(EvaluationBook):
    """The book plus what workers do."""

    # ------------------------------------------------------------ workers

    def hello(self, role: str, name: str, now: float) -> None:
        """A process introduces itself, holding nothing."""
        if role == "producer":
            for number in sorted(self.held.get(name, ())):
                self._lose(self.prompts[number], "restarted", now)
        elif role == "reward":
            self._lose_scoring(name)

    def heartbeat(
        self, role: str, name: str, *, pid: int, holds: tuple[tuple[int, int], ...] | None, now: float
    ) -> None:
        """A process is alive; with `holds` only what it names is its own, after a while."""
        limit = self.groups.settings.lease_timeout_s
        if role == "reward" and holds is not None:
            self.generation += self.scores_due.lose_unnamed(name, holds, now=now, limit_s=limit)
        if role != "producer":
            return
        named = self.named
        for number in sorted(self.held.get(name, ())):
            prompt = self.prompts[number]
            if prompt.pid not in (0, pid):
                self._lose(prompt, "restarted", now)
            elif holds is None or (number, prompt.token) in holds:
                named[number] = now
            elif now - named.setdefault(number, now) > limit:
                self._lose(prompt, "unnamed", now, counts=False)

    def expire(self, now: float) -> None:
        """Take the work from workers that were silent for `lease_timeout_s`."""
        limit = self.groups.settings.lease_timeout_s
        for name in [name for name, ids in self.held.items() if ids]:
            if now - self._seen("producer", name, now).seen > limit:
                for number in sorted(self.held[name]):
                    prompt = self.prompts[number]
                    self._tell_holder(prompt, now)
                    self._lose(prompt, "silent", now)
        for name in self.scores_due.busy():
            if now - self._seen("reward", name, now).seen > limit:
                self._lose_scoring(name)

    def _lose_scoring(self, name: str) -> None:
        self.generation += self.scores_due.lose(name)

    def _tell_holder(self, prompt: Prompt, now: float) -> None:
        """Whoever generates it is to stop."""
        if prompt.holder:
            self.groups.cancelled.setdefault(prompt.holder, {})[prompt.id, prompt.token] = Cancelled(now)

    # ------------------------------------------------------------ leases

    def lease(self, producer: str, *, engine_version: int, request: int, now: float) -> tuple[Lease, ...]:
        """The prompts that this producer generates next, maybe none. The same request again gets the same leases."""
        worker = self._seen("producer", producer, now)
        held = self.held.get(producer, set())
        again = [one for number in sorted(held) if (one := self.prompts[number]).request == request]
        current = self.meta.round
        if again or request <= worker.answered or current is None:
            return tuple(self._granted(one) for one in again)
        barred_version, until = self.groups.barred.get(producer, (-1, 0.0))
        if not current.step <= engine_version <= self.groups.meta.newest + 1:
            return ()
        if barred_version == engine_version and now < until:
            return ()
        granted = []
        while len(self.held.get(producer, ())) < self._room():
            prompt = self._next_prompt(current)
            if prompt is None:
                break
            self._out(prompt)
            prompt.token, prompt.holder, prompt.pid = self.groups._new_token(), worker.name, worker.pid
            prompt.request = request
            self._in(prompt)
            self._event(
                now,
                "lease",
                g=prompt.id,
                token=prompt.token,
                attempt=prompt.attempt,
                producer=producer,
                w=engine_version,
            )
            granted.append(self._granted(prompt))
        return tuple(granted)

    def _room(self) -> int:
        """Prompts that one producer may hold."""
        asked = self.whole.sampling.asked_samples
        samples = self.whole.producers.groups_in_flight(asked) * asked
        if self.groups.unclaimed <= 0:
            return max(1, samples // self.config.samples)
        return self.config.held_groups(training_samples=samples)

    def _next_prompt(self, current: Round) -> Prompt | None:
        if self.pending:
            return self.prompts[min(self.pending)]
        if current.cursor >= current.rows:
            return None
        prompt = Prompt(evaluation_group(current.step, current.cursor))
        current.cursor += 1
        self._touch("vmeta")
        self.prompts[prompt.id] = prompt
        self._index(prompt)
        return prompt

    def _granted(self, prompt: Prompt) -> Lease:
        missing = tuple(index for index in range(self.config.samples) if index not in prompt.samples)
        step, row = split_group(prompt.id)
        return Lease(
            prompt.id, prompt.token, prompt.attempt, missing, row_seed(self.whole.run.seed, row, prompt.attempt), step
        )

    def _lose(self, prompt: Prompt, why: str, now: float, *, counts: bool = True) -> None:
        """The holder will not finish it: what arrived stays, the rest waits for another producer."""
        self._event(now, "lost", g=prompt.id, token=prompt.token, producer=prompt.holder, why=why)
        if counts and prompt.attempt >= self.groups.settings.max_reissue:
            self._fail(prompt, "max_reissue", now, f"attempt {prompt.attempt}: {why}")
            return
        self._out(prompt)
        prompt.attempt += counts
        prompt.token, prompt.holder, prompt.pid, prompt.request = 0, "", 0, 0
        self._in(prompt)

    def _fail(self, prompt: Prompt, reason: str, now: float, detail: str = "") -> None:
        """It will not be scored."""
        self._out(prompt)
        self._forget_samples(prompt)
        prompt.failed, prompt.holder, prompt.token = reason, "", 0
        self._in(prompt)
        self._event(now, "failed", g=prompt.id, reason=reason, detail=detail[:500])

    def give_back(self, message: LeaseReturn, *, now: float) -> None:
        """A producer returns leases; with `dead` the prompt itself is at fault. Old tokens are ignored."""
        for number, token in message.groups:
            prompt = self.prompts.get(number)
            if prompt is None or not prompt.holder or prompt.token != token:
                continue
            if message.dead:
                self._fail(prompt, "prompt", now, message.reason)
            else:
                self._lose(prompt, message.reason, now, counts=message.reason not in GRACEFUL)

    # ------------------------------------------------------------ samples

    def samples(
        self, head: Samples, *, checksum: int, invalid: Callable[[], str], keep: Callable[[], Record], now: float
    ) -> SamplesReply:
        """Take finished samples. `invalid` says why they may not be used, `keep` stores their bytes."""
        self.groups.saw("producer", head.producer, now)
        prompt = self.prompts.get(head.group)
        cancelled = self.groups.take_cancelled(head.producer)
        if prompt is None or prompt.failed:
            why = f"gone: {prompt.failed}" if prompt is not None else "unknown: its evaluation has ended"
            return SamplesReply((), (), {item.index: why for item in head.samples}, cancelled)
        accepted, duplicate, refused = self._sort_samples(prompt, head, checksum)
        if not accepted:
            return SamplesReply((), tuple(duplicate), refused, cancelled)
        reason = invalid() or self._wrong_weights(head, now)
        if reason:
            published = reason.split(":", maxsplit=1)[0] not in ("version", "digest")
            self._lose(prompt, reason, now)
            refused |= dict.fromkeys(accepted, f"{'poison' if published else 'not published'}: {reason}")
            return SamplesReply((), tuple(duplicate), refused, cancelled)
        self._accept(prompt, head, set(accepted), keep(), now)
        return SamplesReply(tuple(accepted), tuple(duplicate), refused, cancelled)

    def _sort_samples(
        self, prompt: Prompt, head: Samples, checksum: int
    ) -> tuple[list[int], list[int], dict[int, str]]:
        """Which samples are new, which are there already, which are refused and why."""
        accepted, duplicate, refused = [], [], {}
        for item in head.samples:
            known = prompt.samples.get(item.index)
            if known is not None and known.token == head.token:
                same = not prompt.records or prompt.records[known.record].checksum == checksum
                if same:
                    duplicate.append(item.index)
                else:
                    refused[item.index] = "already there with other content"
            elif known is not None or not prompt.holder or head.token != prompt.token:
                refused[item.index] = "token: the lease was lost"
            else:
                accepted.append(item.index)
        return accepted, duplicate, refused

    def _wrong_weights(self, head: Samples, now: float) -> str:
        """Why these are no samples of published weights of the step or later; empty where they are."""
        step, _ = split_group(head.group)
        for version in {version for item in head.samples for version, _ in item.runs}:
            if version < step:
                return f"version: {version} is older than the step {step} that is evaluated"
            known, digest = self.groups.digests.get(version), head.digests.get(version, "")
            if known and digest not in known:
                self.groups.barred[head.producer] = (version, now + self.groups.settings.lease_timeout_s)
                return f"digest: {head.producer} holds {digest or 'nothing'} as version {version}, not {known[-1]}"
        bad = [
            index
            for index, reward in head.rewards.items()
            if not all(map(math.isfinite, (reward, *head.parts.get(index, {}).values())))
        ]
        if bad:
            return f"reward: of sample {bad[0]} is not finite"
        return "" if all(map(self.groups.parts_known, head.parts.values())) else f"reward: {TOO_MANY_PARTS}"

    def _accept(self, prompt: Prompt, head: Samples, accepted: set[int], record: Record, now: float) -> None:
        self._out(prompt)
        prompt.records.append(record)
        if head.row and prompt.source != row_source(head.row):
            self._withdraw(prompt)  # others may be asked about it
            prompt.source = row_source(head.row)
        for item in head.samples:
            if item.index in accepted:
                self._take_sample(prompt, head, item, now)
        if self._whole(prompt):
            prompt.holder = ""
        self._in(prompt)
        self._end_if_scored(prompt)

    def _take_sample(self, prompt: Prompt, head: Samples, item: SampleHead, now: float) -> None:
        oldest, newest = oldest_version(item.runs) or 0, max((version for version, _ in item.runs), default=0)
        sample = HeldOut(head.token, item.length, oldest, newest, len(prompt.records) - 1, item.finish)
        prompt.samples[item.index] = sample
        digests = {version: head.digests.get(version, "") for version, _ in item.runs}
        self._event(
            now,
            "sample",
            g=prompt.id,
            i=item.index,
            token=head.token,
            producer=head.producer,
            length=item.length,
            runs=item.runs,
            digests=digests,
        )
        if item.index in head.rewards:  # of an environment: it names no answer, so no two samples agree
            reward, parts = head.rewards[item.index], dict(head.parts.get(item.index, {}))
            score = Score(prompt.id, item.index, 0, reward, parts, answer=f"sample {item.index}")
            self._scored(prompt, sample, score, worker=head.producer, now=now)

    # ------------------------------------------------------------ scores

    def reward_lease(
        self, name: str, *, max_samples: int, request: int, now: float, judge: str = DEFAULT
    ) -> list[ToScore]:
        """Samples for this worker, oldest first. The same request again gets the same samples."""
        worker = self._seen("reward", name, now)
        worker.judge = judge
        again = self.scores_due.again(name, request)
        if again or request <= worker.answered:
            return [self._item(key) for key in again]
        if not self.scores_due.waits(judge):
            return []
        others = self.groups.living_workers(judge, now) - {name}

        def may(key: Key) -> bool:
            failed_by = said_by(self.prompts[key[0]].samples[key[1]], judge).failed_by
            return name not in failed_by or not others - set(failed_by)

        taken = self.scores_due.grant(
            name, judge, request=request, max_samples=max_samples, may=may, new_token=self.groups._new_token
        )
        return [self._item(key) for key in taken]

    def _item(self, key: Key) -> ToScore:
        number, index, judge = key
        tried = said_by(self.prompts[number].samples[index], judge).failures
        return ToScore(number, index, self.scores_due.leases[key].token, tried, judge)

    def scores(self, message: Scores, *, now: float) -> tuple[int, dict[str, str]]:
        """Take scores and failures: how many were taken, and by `group:index` why others were not."""
        refused: dict[str, str] = {}
        accepted = 0
        items: list[Score | RewardFailure] = [*message.scores, *message.failures]
        for item in items:
            why = self._score(item, message, now)
            accepted += not why
            if why:
                refused[f"{item.group}:{item.index}"] = why
        return accepted, refused

    def _score(self, item: Score | RewardFailure, message: Scores, now: float) -> str:
        judge, worker = message.judge, message.worker
        prompt = self.prompts.get(item.group)
        sample = prompt.samples.get(item.index) if prompt is not None else None
        if prompt is None or sample is None or prompt.failed:
            return "gone: its evaluation has ended" if prompt is None else f"gone: {prompt.failed or 'unknown sample'}"
        said = said_by(sample, judge)
        if sample.reward is not None or said.reward is not None:
            return "already scored"
        if judge not in self.judges_of(prompt):
            return f"judge: {display_name(judge)} is not asked about this row"
        lease = self.scores_due.leases.get((item.group, item.index, judge))
        newest = item.token if lease is None else lease.token  # a late score counts, a late failure does not
        known = item.token == newest or (isinstance(item, Score) and item.token < newest)
        oldest = max(sample.token, said.failed_token) if isinstance(item, RewardFailure) else sample.token
        if not known or not oldest < item.token <= self.groups._token:
            return "token: the reward lease was lost"
        if isinstance(item, Score) and not all(map(math.isfinite, (item.reward, *item.parts.values()))):
            item = RewardFailure(item.group, item.index, item.token, "not_finite", f"reward {item.reward}")
        if isinstance(item, Score) and not self.groups.parts_known(item.parts):
            item = RewardFailure(item.group, item.index, item.token, "parts", TOO_MANY_PARTS)
        self.scores_due.release((item.group, item.index, judge))
        if isinstance(item, Score):
            self._answered(prompt, sample, item, message, now=now)
        elif said.failures >= self.groups.retries_of(judge):
            self._fail(prompt, "reward_failed", now, f"{item.reason}: {item.detail}")
        else:
            self._out(prompt)
            take_failure(sample, judge, worker, item.token)
            self._in(prompt)
        return ""

    def _answered(self, prompt: Prompt, sample: HeldOut, score: Score, message: Scores, *, now: float) -> None:
        """A judge's score: the sample has its reward where it was the last one."""
        self._out(prompt)
        judges = self.judges_of(prompt)
        said = Judged(score.reward, dict(score.parts), version=message.reward_version, answer=score.answer)
        answers = {**sample.judged, message.judge: said}
        if take_answer(sample, judges, message.judge, said):
            answer = next((answers[name].answer for name in judges if answers[name].answer), "")
            whole = Score(prompt.id, score.index, 0, sample.reward or 0.0, sample.parts, answer, score.text)
            self._scored(prompt, sample, whole, worker=message.worker, now=now)
        self._in(prompt)
        self._end_if_scored(prompt)

    def _scored(self, prompt: Prompt, sample: HeldOut, score: Score, *, worker: str, now: float) -> None:
        sample.reward, sample.parts = score.reward, dict(score.parts)
        sample.answer = answer_key(score.answer, score.text)
        self._event(
            now,
            "score",
            g=prompt.id,
            i=score.index,
            reward=score.reward,
            answer=sample.answer,
            parts=sample.parts,
            source=prompt.source,
            worker=worker,
        )
        step, row = split_group(prompt.id)
        number = self.meta.round.number if self.meta.round is not None else 0
        self._samples.append(
            {
                "step": step,
                "round": number,
                "row": row,
                "index": score.index,
                "data_source": prompt.source,
                "reward": score.reward,
                "parts": sample.parts,
                "answer": score.answer,
                "text": score.text,
                "length": sample.length,
                "finish": sample.finish,
                "versions": [sample.oldest, sample.newest],
            }
        )

    def _end_if_scored(self, prompt: Prompt) -> None:
        """With all samples scored the payloads are free; the scores stay until the evaluation ends."""
        if not self._whole(prompt) or any(sample.reward is None for sample in prompt.samples.values()):
            return
        self._out(prompt)
        self._forget_samples(prompt)
        prompt.scored = True
        self._in(prompt)
