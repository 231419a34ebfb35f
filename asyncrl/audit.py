"""Proves from `history.jsonl` alone that nothing was lost, trained twice, too old or made by unknown weights.

Called by `asyncrl audit`, the demo, the summary and the report. Guarantees:
1. every issued group is counted in exactly one of: trained, dropped and dead (by reason), superseded, in flight, lost;
2. it keeps no state of the service it audits and shares no code with it: only the log is believed (the configuration
   says the size of a group, a `fork.json` where a fork begins; figures of evaluations come from the same formulas);
3. a last line cut by a crash is left out and noted; a damaged line elsewhere is a violation.
It does not look at weights or samples themselves.

What it checks, and the name of each violation:
  lost       the run is done and an issued group has no ending
  doubled    a group in more different steps of the surviving history than it may be used for, twice in a step, with two
             endings, or issued again after it was trained
  unknown    a group is trained, dropped or dead that was never issued or claimed for that step
  lease      a group is leased while it is held, or trained without a lease; a sample under a token that no lease has
  sample     a sample was accepted twice, or a trained group is not complete
  score      a sample of a trained group was never scored
  ready      a group was trained before it was ready
  claim      a step that was handed out again is not the recorded batch, less what was quarantined since
  lag        a token of a trained group is older than the bound of its lease (on_late = train allows it: then a note)
  bound      a group that holds samples was leased again under another bound
  digest     a span's digest is not that of the committed version, or is missing
  steps      a step was left out, or did not train as many groups as a batch has (less its quarantined groups), or the
             run is done without a durable checkpoint of its last step
  version    versions do not rise by one from step to step
  epoch      a learner or service wrote after a newer one had begun, or was never heard to begin
  tune       changes of settings out of order
  evaluation a held-out prompt was trained, or an evaluation does not come out again (`asyncrl.audit_evaluation`)
  log        a line in the middle cannot be read, or lines at the beginning are missing

A restart from the checkpoint of step s takes back the commits after s of older learner epochs: their groups are claimed
again until the same step is committed once more. Example: commits of steps 1 2 3, register(step=1), commits 2 3 4 with
the same groups in 2 and 3: steps 1..4, doubled 0. A store that lost everything issues again what no checkpoint holds:
then the groups it forgot count as superseded until they are issued once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.audit_found import Audit, render
from asyncrl.audit_reader import Commit, Reader
from asyncrl.audit_verdict import Expected, fork_of, judge
from asyncrl.errors import UNREADABLE

__all__ = ["Audit", "Expected", "audit", "audit_command", "audit_file", "audit_run", "render"]


def audit_file(path: Path, *, allow_over_bound: bool = False, expected: Expected | None = None) -> Audit:
    """The audit of a history file."""
    events, damaged, torn = read_events(path)
    found = audit(events, allow_over_bound=allow_over_bound, expected=expected)
    found.torn = torn
    if torn:
        found.notes.append("the last line was cut and is left out")
    for number in damaged:
        found.violation("log", f"line {number} cannot be read")
    if not events:
        found.violation("log", "the history has no events")
    return found


def read_events(path: Path) -> tuple[list[dict[str, Any]], list[int], bool]:
    """The events of a history, the numbers of damaged lines, and whether the last line was cut."""
    events: list[dict[str, Any]] = []
    damaged: list[int] = []
    texts = path.read_bytes().split(b"\n") if path.exists() else []
    torn = bool(texts and texts[-1].strip())
    for number, text in enumerate(texts[:-1] if torn else texts, start=1):
        if not text.strip():
            continue
        try:
            events.append(msgspec.json.decode(text, type=dict[str, Any]))
        except UNREADABLE:
            damaged.append(number)
    if torn:
        try:  # whole, only its newline is missing
            events.append(msgspec.json.decode(texts[-1], type=dict[str, Any]))
            torn = False
        except UNREADABLE:
            pass
    return events, damaged, torn


def audit(
    events: Iterable[dict[str, Any]], *, allow_over_bound: bool = False, expected: Expected | None = None
) -> Audit:
    """The audit of a sequence of events."""
    reader = Reader()
    for event in events:
        reader.take(event)
    return judge(reader, expected or Expected(allow_over_bound=allow_over_bound))


def audit_run(root: Path) -> Audit:
    """The audit of a run folder. Its config.toml, where there is one, says the size of a group and whether lag above
    a bound is allowed; its fork.json which run it continues, and from where."""
    from asyncrl.config import load
    from asyncrl.errors import AsyncRLError
    from asyncrl.rundir import RunDir

    run = RunDir(root)
    parent, step = fork_of(run.root)
    known = Expected(fork_of=parent, fork_step=step, parent=_parent_commits(run.root, parent, step))
    try:
        config = load(run.config)
        known = msgspec.structs.replace(
            known, group_size=config.sampling.group_samples,
            allow_over_bound=config.buffer.on_late == "train",
            correct_above=config.learner.algorithm.shaping.correct_above,
        )  # fmt: skip
    except AsyncRLError:
        pass  # the log alone
    return audit_file(run.history, expected=known)


def _parent_commits(root: Path, parent: str, step: int) -> dict[int, Commit]:
    """The surviving steps of the parent up to the fork; none where its folder is not here."""
    if not parent:
        return {}
    reader = Reader()
    for event in read_events((root / parent).resolve() / "history.jsonl")[0]:
        reader.take(event)
    return {number: commit for number, commit in reader.commits.items() if number <= step}


def audit_command(root: Path, *, as_json: bool) -> int:
    """`asyncrl audit`: 0 where nothing was found, else 1."""
    from asyncrl.errors import ConfigError

    if not (root / "history.jsonl").exists():
        raise ConfigError("run.missing", "no history.jsonl in it", where=str(root))
    found = audit_run(root)
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if as_json else render(found))
    return 0 if found.ok else 1
