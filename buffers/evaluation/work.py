"""Held-out prompts as work: what their leases, samples and scores mean. The rules are those of training groups.

Rules about staleness do not apply: there is no admission, bound or filter, and nothing here counts towards a budget
that ends the run. Guarantees:
1. the first lease fixes the version of an evaluation: that of the engine that gets it, of the evaluated step or later.
   From then on only engines of exactly this version get prompts, and a sample with a token of another version, or of
   other weights with its number, is refused (`other_version`) and counted; its prompt is leased again without blame;
2. a producer holds at most `evaluation.share` of what it holds for training, in addition to that; as much as that once
   no group is left to issue, or newer weights wait for the end of the evaluation (unless a second set of weights
   decodes the prompts: it has that many rows);
3. a prompt whose attempts are used up, or whose reward fails for good, has failed with the reason: never a score of 0.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from asyncrl.config import Config
from asyncrl.evaluation.ids import evaluation_group, row_seed, row_source, split_group
from asyncrl.wire import Lease, LeaseReturn, SampleHead, Samples
from buffers.evaluation.holders import Holders
from buffers.evaluation.records import HeldOut, Prompt, PromptTable, Round
from buffers.groups.leases import SWAPPED, Leases
from buffers.groups.machine import GroupMachine
from buffers.groups.records import Record
from buffers.groups.sample_intake import OTHER_VERSION, version_range
from buffers.groups.scoring import Answer
from buffers.groups.transaction import Edit

ANSWER_CHARS = 200  # a longer answer is identified by a digest


def answer_key(answer: str, text: str) -> str:
    """The key that a majority vote counts: the answer that the reward function named, else the text; a digest if long.

    >>> answer_key("42", "so it is 42"), answer_key("", " no "), answer_key("", "x" * 300)[:5]
    ('42', 'no', 'text:')
    """
    key = answer.strip() or text.strip()
    if len(key) <= ANSWER_CHARS:
        return key
    return f"text:{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"


class PromptOutcome:
    """The end of a lease of a held-out prompt."""

    def __init__(self, table: PromptTable) -> None:
        self.table = table

    def requeue(self, prompt: Prompt) -> None:
        """The prompt waits for another producer as it is."""

    def give_up(self, prompt: Prompt, why: str) -> None:
        self.table.fail(prompt, "max_reissue", f"attempt {prompt.attempt}: {why}")

    def returned_dead(self, prompt: Prompt, why: str) -> None:
        self.table.fail(prompt, "prompt", why)


class PromptLeases:
    """Which prompts a producer gets."""

    def __init__(self, config: Config, table: PromptTable, machine: GroupMachine, leases: Leases) -> None:
        self.config = config
        self.table = table
        self.machine = machine
        self.leases = leases
        self.holders = Holders(leases.workers)

    def lease(self, producer: str, *, engine_version: int, request: int, trains: bool = False) -> tuple[Lease, ...]:
        """The prompts that this producer generates next, maybe none. The same request again gets the same leases.
        `trains`: it asks for training groups as well.
        """
        if trains and self.config.evaluation.separate:
            return ()
        workers, now = self.leases.workers, self.table.tx.now
        worker = workers.find("producer", producer, now)
        again, current = self.leases.find_granted(producer, request), self.table.meta.round
        if request > worker.answered:  # an older request says what the engine had before
            self.holders.note(producer, engine_version)
        if again or request <= worker.answered or current is None:
            return tuple(self._message(prompt) for prompt in again)
        fits = engine_version == current.version if current.version >= 0 else engine_version >= current.step
        if not (fits and self._is_published(engine_version)) or workers.is_barred(producer, engine_version, now):
            return ()
        if self.holders.has_left(producer, current.step, engine_version, now):
            return ()  # it would give them back at once, again and again
        granted: list[Lease] = []
        while len(self.table.indexes.held.get(producer, ())) < self._room():
            prompt = self._next_prompt(current)
            if prompt is None:
                break
            self._fix_version(current, engine_version)
            with self.table.edit(prompt):
                self.leases.assign(prompt, worker, request)
            self.table.event(
                "lease",
                g=prompt.id,
                token=prompt.token,
                attempt=prompt.attempt,
                producer=producer,
                w=engine_version,
            )
            granted.append(self._message(prompt))
        return tuple(granted)

    def give_back(self, message: LeaseReturn, *, guest: bool = False) -> None:
        """A producer returns leases; see `Leases.give_back`."""
        current, held = self.table.meta.round, self.table.indexes.held.get(message.producer, ())
        known = {(number, self.table.prompts[number].token) for number in held}
        if message.reason == SWAPPED and current is not None and not known.isdisjoint(message.groups):
            self.holders.leave(message.producer, current.step, current.version, self.table.tx.now)
        self.leases.give_back(message, guest=guest)

    def hold(self, engine_version: int, *, trains: bool = False) -> int:
        """The version that a producer of `engine_version` is asked to keep; -1: it may take newer weights.

        It keeps the measured version until every prompt is generated: if another producer is lost, it takes over. An
        evaluator keeps what it has until an evaluation needs a newer one.
        """
        current = self.table.meta.round
        if self.config.evaluation.separate:
            needs_newer = current is not None and current.version < 0 and engine_version < current.step
            return engine_version if not (trains or needs_newer) and self._is_published(engine_version) else -1
        if current is None or current.version != engine_version or not self._is_published(engine_version):
            return -1
        return -1 if self.table.is_generated() else engine_version

    def _is_published(self, version: int) -> bool:
        """Not of a future that the learner went back from. A publish is heard of before its commit, hence one more."""
        return 0 <= version <= self.machine.table.meta.newest + 1

    def _fix_version(self, current: Round, version: int) -> None:
        if current.version < 0:
            current.version = version
            self.holders.begin(version)
            self.table.put("vmeta")
            self.table.event("version", step=current.step, round=current.number, version=version)

    def _room(self) -> int:
        """Prompts that one producer may hold."""
        if self.config.evaluation.second_weights:
            return self.config.held_out_prompts
        asked = self.config.sampling.asked_samples
        samples = self.config.producers.groups_in_flight(asked) * asked
        current = self.table.meta.round
        delays = current is not None and 0 <= current.version < self.machine.table.meta.newest
        if delays or self.config.evaluation.separate or self.machine.schedule.unclaimed <= 0:
            return max(1, samples // self.table.samples)
        return self.config.held_out_prompts

    def _next_prompt(self, current: Round) -> Prompt | None:
        if self.table.indexes.pending:
            return self.table.prompts[min(self.table.indexes.pending)]
        if current.cursor >= current.rows:
            return None
        prompt = Prompt(evaluation_group(current.step, current.cursor))
        current.cursor += 1
        self.table.put("vmeta")
        self.table.add(prompt)
        return prompt

    def _message(self, prompt: Prompt) -> Lease:
        missing = tuple(index for index in range(self.table.samples) if index not in prompt.samples)
        _, row = split_group(prompt.id)
        seed = row_seed(self.config.run.seed, row, prompt.attempt)
        current = self.table.meta.round
        version = current.version if current is not None else 0
        return Lease(prompt.id, prompt.token, prompt.attempt, missing, seed, version)


class PromptWork:
    """Samples of held-out prompts and their scores: the target of a `SampleIntake` and of a `Scoring`.

    `lines`: scored samples with their text, for the files of the evaluation.
    """

    one_digest = True

    def __init__(self, table: PromptTable, leases: Leases) -> None:
        self.table = table
        self.leases = leases
        self.lines: list[dict[str, Any]] = []

    @property
    def size(self) -> int:
        """Samples of a complete prompt."""
        return self.table.samples

    def get(self, number: int) -> Prompt | None:
        return self.table.get(number)

    def gone_reason(self, number: int) -> str:
        """Why the prompt takes no samples or scores."""
        prompt = self.table.prompts.get(number)
        return "gone: its evaluation has ended" if prompt is None else f"gone: {prompt.failed}"

    def wrong_version(self, head: Samples) -> str:
        """Samples are wanted of exactly the version that is measured."""
        current = self.table.meta.round
        wanted = current.version if current is not None else -1
        others = sorted({version for item in head.samples for version, _ in item.runs} - {wanted})
        if current is None or not (others or self._other_weights(head, current)):
            return ""
        current.refused += len(head.samples)
        self.table.put("vmeta")
        made = f"{others[0]} made tokens of it" if others else f"other weights of version {wanted} made it"
        return f"{OTHER_VERSION}: {made}, version {wanted} is evaluated"

    def _other_weights(self, head: Samples, current: Round) -> bool:
        """Whether weights that have the measured number, after the learner went back, are others."""
        return current.weights not in ("", head.digests.get(current.version, ""))

    def poison(self, prompt: Prompt, reason: str) -> None:
        self.leases.lose(prompt, reason)

    def count_poison(self, reason: str) -> None: ...

    # ------------------------------------------------------------ samples

    def store(self, prompt: Prompt, head: Samples, accepted: set[int], record: Record) -> None:
        current = self.table.meta.round
        if current is not None and not current.weights:
            current.weights = head.digests.get(current.version, "")
            self.table.put("vmeta")
        with self.table.edit(prompt):
            prompt.records.append(record)
            if head.row and prompt.source != row_source(head.row):
                self.table.withdraw(prompt)  # other judges may be asked about it
                prompt.source = row_source(head.row)
            for item in head.samples:
                if item.index in accepted:
                    self._add_sample(prompt, head, item)
            if self.table.is_complete(prompt):
                prompt.holder = ""
        self._end_if_scored(prompt)

    def _add_sample(self, prompt: Prompt, head: Samples, item: SampleHead) -> None:
        oldest, newest = version_range(item)  # the same: `wrong_version`
        sample = HeldOut(head.token, item.length, oldest, newest, len(prompt.records) - 1, item.finish)
        prompt.samples[item.index] = sample
        self.table.event(
            "sample",
            g=prompt.id,
            i=item.index,
            token=head.token,
            producer=head.producer,
            length=item.length,
            runs=item.runs,
            digests={version: head.digests.get(version, "") for version, _ in item.runs},
        )
        if item.index in head.rewards:  # an environment's reward names no answer, so no two samples agree
            sample.reward, sample.parts = head.rewards[item.index], dict(head.parts.get(item.index, {}))
            self._record_score(prompt, item.index, f"sample {item.index}", "", worker=head.producer)

    # ------------------------------------------------------------ scores

    def judges_for(self, prompt: Prompt) -> tuple[str, ...]:
        return self.table.indexes.judges_for(prompt)

    def edit(self, prompt: Prompt) -> Edit:
        return self.table.edit(prompt)

    def touch(self, prompt: Prompt) -> None:
        self.table.put(self.table.row_key(prompt))

    def list_unscored(self) -> Iterable[Prompt]:
        return [prompt for prompt in self.table.prompts.values() if not (prompt.scored or prompt.failed)]

    def settle_source(self, prompt: Prompt) -> bool:
        return False

    def record(self, prompt: Prompt, answer: Answer) -> None:
        if answer.answers is None:
            return
        order = self.judges_for(prompt)
        named = next((answer.answers[judge].answer for judge in order if answer.answers[judge].answer), "")
        self._record_score(prompt, answer.place, named, answer.score.text, worker=answer.message.worker)

    def record_sum(self, prompt: Prompt, index: int) -> None:
        self._record_score(prompt, index, "", "", worker="")

    def _record_score(self, prompt: Prompt, index: int, answer: str, text: str, *, worker: str) -> None:
        sample = prompt.samples[index]
        sample.answer = answer_key(answer, text)
        self.table.event(
            "score",
            g=prompt.id,
            i=index,
            reward=sample.reward,
            answer=sample.answer,
            parts=sample.parts,
            source=prompt.source,
            worker=worker,
        )
        step, row = split_group(prompt.id)
        current = self.table.meta.round
        self.lines.append(
            {
                "step": step,
                "round": current.number if current is not None else 0,
                "row": row,
                "index": index,
                "data_source": prompt.source,
                "reward": sample.reward,
                "parts": sample.parts,
                "answer": answer,
                "text": text,
                "length": sample.length,
                "finish": sample.finish,
                "version": current.version if current is not None else sample.oldest,
                "versions": [sample.oldest, sample.newest],
            }
        )

    def accept_score(self, prompt: Prompt) -> Prompt:
        return prompt

    def finish(self, prompt: Prompt, verdict: Prompt) -> None:
        self._end_if_scored(prompt)

    def fail(self, prompt: Prompt, detail: str) -> None:
        self.table.fail(prompt, "reward_failed", detail)

    def _end_if_scored(self, prompt: Prompt) -> None:
        """Free the payloads of a prompt with all scores; the scores stay until the evaluation ends."""
        if not self.table.is_complete(prompt) or any(sample.reward is None for sample in prompt.samples.values()):
            return
        with self.table.edit(prompt):
            self.table.free(prompt)
            prompt.scored = True
