"""Follows the evaluations of a history for the audit: nothing of them was trained, and their figures are those told.

Violations are of the
kind `evaluation`:
1. a claimed or committed group is a prompt of an evaluation, or a sample that was trained came under the token of a
   lease of an evaluation;
2. a sample of an evaluation came under a token that no lease has, is older than its step, was scored and never came,
   or was made by weights with another digest than the committed one;
3. `prompts = scored + failed + missing` does not hold, the prompts with all samples scored are not as many as told, or
   mean, best, majority and pass@n do not come out again from the scores in the log;
4. the run is done and an evaluation has no ending (where the service was restarted since its begin: a note).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from asyncrl.audit.findings import Audit
from asyncrl.evaluation.ids import MARK, is_evaluation, split_group
from asyncrl.evaluation.statistics import Outcome, figures, metric_names

Scores = dict[int, dict[int, tuple[float, str, str]]]  # group -> sample -> reward, answer, data source


COUNTS = ("prompts", "scored", "failed", "missing")  # what the end of an evaluation tells of its prompts


class Begun(msgspec.Struct):
    """An evaluation that has no ending yet."""

    number: int
    step: int
    samples: int
    life: int  # of the service
    scores: Scores = {}
    failed: set[int] = set()
    came: set[tuple[int, int]] = set()  # group and sample


class EvaluationReader:
    """Follows the events whose name begins with `MARK`; `found` collects what is wrong."""

    def __init__(self, found: Audit) -> None:
        self.found = found
        self.tokens: dict[int, int] = {}  # token of a lease -> prompt
        self.spans: list[tuple[int, int, int, str]] = []  # prompt, sample, version, digest
        self.begun: Begun | None = None
        self.ended: list[tuple[Begun, dict[str, Any]]] = []

    def take(self, name: str, event: Mapping[str, Any]) -> None:
        what = name.removeprefix(MARK)
        if what == "begin":
            self._no_ending()
            self.begun = Begun(
                int(event["round"]), int(event["step"]), int(event["samples"]), self.found.service_starts
            )
        elif what == "lease":
            self.tokens[int(event["token"])] = int(event["g"])
        elif what == "sample":
            self._sample(event)
        elif what == "score" and self.begun is not None:
            if (int(event["g"]), int(event["i"])) not in self.begun.came:
                self._bad(f"sample {event['i']} of prompt {split_group(int(event['g']))[1]} was scored and never came")
            mine = self.begun.scores.setdefault(int(event["g"]), {})
            mine[int(event["i"])] = (float(event["reward"]), str(event["answer"]), str(event["source"]))
            self.found.evaluation_samples += 1
        elif what == "failed" and self.begun is not None:
            self.begun.failed.add(int(event["g"]))
        elif what == "end":
            for field in ("step", *(f"evaluation_{count}" for count in COUNTS)):
                int(event[field])  # raises where one is missing: the line is garbled
            if self.begun is None or self.begun.number != int(event["round"]):
                self._bad(f"that of step {event['step']} ended and had never begun")
            else:
                self.ended.append((self.begun, dict(event)))
            self.begun = None

    def _sample(self, event: Mapping[str, Any]) -> None:
        number, index = int(event["g"]), int(event["i"])
        step, row = split_group(number)
        name = f"sample {index} of prompt {row}, step {step},"
        if self.tokens.get(int(event["token"])) != number:
            self._bad(f"{name} came under token {event['token']}, which none of its leases has")
        for version, _ in event["runs"]:
            if int(version) < step:
                self._bad(f"{name} was made by version {version}")
            self.spans.append((number, index, int(version), str(event["digests"].get(str(version), ""))))
        if self.begun is not None:
            self.begun.came.add((number, index))

    def trains(self, groups: Iterable[int], what: str) -> None:
        """A batch: none of its groups may be a prompt of an evaluation."""
        for number in groups:
            if is_evaluation(number):
                step, row = split_group(number)
                self._bad(f"{what} holds prompt {row} of the evaluation of step {step}")

    def _no_ending(self) -> None:
        if self.begun is None:
            return
        text = f"that of step {self.begun.step} has no ending"
        if self.begun.life == self.found.service_starts:
            self._bad(text)
        else:
            self.found.notes.append(f"evaluation: {text}; the service was restarted since")
        self.begun = None

    def _bad(self, text: str) -> None:
        self.found.violation("evaluation", text)

    # ------------------------------------------------------------ the end of the log

    def judge(
        self, *, trained: Iterable[set[int]], digests: Mapping[int, set[str]], correct_above: float | None
    ) -> None:
        """`trained`: tokens of leases of the groups that were trained; `digests`: committed ones by version."""
        for tokens in trained:
            for token in tokens & self.tokens.keys():
                self._bad(f"token {token} of prompt {split_group(self.tokens[token])[1]} is one of a trained group")
        for number, index, version, digest in self.spans:
            right = digests.get(version)
            if right and digest not in right:
                step, row = split_group(number)
                self._bad(
                    f"sample {index} of prompt {row}, step {step}: the digest of version {version} is "
                    f"{digest or 'missing'}, committed was {', '.join(sorted(right))}"
                )
        for begun, line in self.ended:
            self._same(begun, line, correct_above)
        if self.found.done:
            self._no_ending()
        self.found.evaluations = [int(line["step"]) for _, line in self.ended]
        self.found.evaluation_prompts = {
            name: sum(int(line[f"evaluation_{name}"]) for _, line in self.ended) for name in COUNTS
        }

    def _same(self, begun: Begun, line: Mapping[str, Any], correct_above: float | None) -> None:
        """The account and the figures of one evaluation come out again."""
        who = f"that of step {begun.step}"
        prompts, scored, failed, missing = (int(line[f"evaluation_{name}"]) for name in COUNTS)
        if prompts != scored + failed + missing:
            self._bad(f"{who}: {prompts} prompts are not {scored} scored + {failed} failed + {missing} missing")
        whole = {
            number: mine
            for number, mine in begun.scores.items()
            if len(mine) == begun.samples and number not in begun.failed
        }
        if len(whole) != scored:
            self._bad(f"{who} told {scored} scored prompts, the log has {len(whole)}")
            return
        outcomes = [_outcome(mine) for _, mine in sorted(whole.items())]
        found = figures(outcomes, correct_above=0.5 if correct_above is None else correct_above) if outcomes else {}
        for name, value in metric_names(found, k=begun.samples).items():
            if "/acc/" in name and correct_above is None:
                continue
            told = line.get(name)
            if not isinstance(told, int | float) or not math.isclose(told, value, rel_tol=1e-9, abs_tol=1e-9):
                self._bad(f"{who} told {name} = {line.get(name)}, the scores in the log say {value}")


def _outcome(scores: Mapping[int, tuple[float, str, str]]) -> Outcome:
    mine = [scores[index] for index in sorted(scores)]
    return Outcome(mine[-1][2], tuple(one[0] for one in mine), tuple(one[1] for one in mine))
