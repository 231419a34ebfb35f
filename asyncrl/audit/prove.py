"""Proves from `history.jsonl` that nothing was lost, trained twice, too old or made by unknown weights, and that the
history is the one that was written.

Guarantees:
1. every issued group is counted in exactly one of: trained, dropped and dead (by reason), superseded, in flight, lost;
2. it keeps no state of the service it audits and shares no code with it: only the log is believed (the configuration
   says the size of a group, `result.json` whether the run is done, a `fork.json` where a fork begins; figures of
   evaluations and the chain come from the same formulas);
3. a last line cut by a crash is left out and noted; a damaged line elsewhere is a violation;
4. the log is read line by line: memory grows with groups, samples and steps, to about the size of the log.
5. the chain of the log, the heads of it that the learner kept, its digests of versions and its archived batches must
   agree with the log (`asyncrl.audit.chain`, `asyncrl.audit.witnesses`).
It does not look at weights or at tokens.

What it checks, and the name of each violation:
  lost       the run is done and an issued group has no ending
  doubled    a group in more different steps of the surviving history than it may be used for, twice in a step, with two
             endings, or issued again after it was trained
  unknown    a group is trained, dropped or dead that was never issued or claimed for that step
  lease      a group is leased while it is held or complete, or trained without a lease; a sample under a token that no
             lease has or that is over, or of another producer than the lease's
  issue      groups are not issued in the order of their numbers
  sample     a sample was accepted twice or after its group was complete, its spans do not cover its tokens, or a
             trained group is not complete
  score      a sample of a trained group was never scored, or not before its step took it; a score before its sample,
             after its group was ready, or twice
  ready      a group was handed out for a step, or trained, before it was ready, or was ready before it was complete
  claim      a step that was handed out again is not the recorded batch, less what was quarantined since
  lag        a token of a trained group is older than the bound of its lease (on_late = train, as its service began with
             or by a change before that step, allows it: then a note)
  bound      a group was leased under a bound that max_staleness never was, or again under another one
  digest     a span's digest is not that of the committed version, or is missing; a version that generators used was
             committed without one (a learner that came back may not know it: then a note)
  steps      a step was left out, or did not train as many groups as a batch of its service has (less its quarantined
             groups; not if batch_groups was tuned), or the run is done without a durable checkpoint of its last step
  version    versions do not rise by one from step to step, or tokens are of a version that did not exist yet
  time       the time of a service runs backwards (that of a later service may: then a note)
  chain, anchor, sign, archive   see asyncrl.audit.chain and asyncrl.audit.witnesses
  epoch      a learner or service wrote after a newer one had begun, or was never heard to begin
  tune       changes of settings out of order
  evaluation a held-out prompt was trained, or an evaluation does not come out again (`asyncrl.audit.evaluation`)
  log        a line in the middle cannot be read or is of an unknown kind, lines at the beginning are missing, or at the
             end of a run that is done by its result.json

A restart from the checkpoint of step s takes back the commits after s of older learner epochs: their groups are claimed
again until the same step is committed once more. Example: commits of steps 1 2 3, register(step=1), commits 2 3 4 with
the same groups in 2 and 3: steps 1..4, doubled 0. A store that lost everything issues again what no checkpoint holds:
then the groups it forgot count as superseded until they are issued once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.audit.chain import ChainReader
from asyncrl.audit.findings import Audit, render
from asyncrl.audit.reader import Reader
from asyncrl.audit.verdict import Expected, fork_origin, judge
from asyncrl.audit.witnesses import Witnesses
from asyncrl.config import Config
from asyncrl.errors import UNREADABLE

__all__ = ["Audit", "Expected", "audit", "audit_command", "audit_file", "audit_run", "render"]


class Log:
    """The events of a history one by one; afterwards `damaged`: numbers of unreadable lines, and `torn`: whether the
    last line is incomplete. A missing file has no events.
    """

    def __init__(self, path: Path, *, chain: ChainReader | None = None) -> None:
        self.path = path
        self.chain = chain or ChainReader()
        self.events = 0
        self.damaged: list[int] = []
        self.torn = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                self.chain.take(text)
                if not text.strip():
                    continue
                try:
                    event = msgspec.json.decode(text, type=dict[str, Any])
                except UNREADABLE:
                    if text.endswith(b"\n"):
                        self.damaged.append(number)
                    else:
                        self.torn = True
                    continue
                self.events += 1
                yield event


def audit_file(
    path: Path,
    *,
    allow_over_bound: bool = False,
    expected: Expected | None = None,
    witnesses: Witnesses | None = None,
) -> Audit:
    """The audit of a history file. `witnesses`: what the learner kept outside of it."""
    known = expected or Expected(allow_over_bound=allow_over_bound)
    chain = ChainReader(anchors=witnesses.anchors if witnesses is not None else (), key=known.key)
    log, reader = Log(path, chain=chain), Reader(keeps_batches=witnesses is not None and bool(witnesses.steps))
    for event in log:
        reader.take(event)
    found = judge(reader, known)
    if witnesses is not None:
        witnesses.judge(reader, fork_step=known.fork_step)
    chain.judge(found, elsewhere=known.parent_heads, expects_signatures=known.signed)
    found.torn = log.torn
    if log.torn:
        found.notes.append("the last line was cut and is left out")
    for number in log.damaged:
        found.violation("log", f"line {number} cannot be read")
    if not log.events:
        found.violation("log", "the history has no events")
    return found


def audit(
    events: Iterable[dict[str, Any]], *, allow_over_bound: bool = False, expected: Expected | None = None
) -> Audit:
    """The audit of a sequence of events."""
    reader = Reader()
    for event in events:
        reader.take(event)
    return judge(reader, expected or Expected(allow_over_bound=allow_over_bound))


def audit_run(root: Path) -> Audit:
    """The audit of a run folder. Its config.toml, if present, gives the size of a group and whether lag above a bound
    is allowed; its fork.json the parent run and the step of the fork.
    """
    from asyncrl.config import load
    from asyncrl.errors import AsyncRLError
    from asyncrl.runtime.run_dir import RunDir, read_object

    run = RunDir(root)
    parent, step = fork_origin(run.root)
    witnesses = Witnesses(run)
    known = _known_of_parent(run.root, parent, step, witnesses)
    try:
        config = load(run.config)
        known = msgspec.structs.replace(
            known,
            group_size=config.sampling.group_samples,
            allow_over_bound=config.buffer.on_late == "train",
            correct_above=config.learner.algorithm.shaping.correct_above,
            signed=config.log.sign,
            key=_signing_key(config),
        )
    except AsyncRLError:
        pass  # only the log
    found = audit_file(run.history, expected=known, witnesses=witnesses)
    if read_object(run.result).get("done") is True and not found.done:  # the buffer records the end before the learner
        found.violation("log", "result.json says that the run is done, the log has no such end: lines are missing")
    return found


def _signing_key(config: Config) -> bytes:
    """The key of the signatures; empty if its file cannot be read here."""
    from asyncrl.errors import AsyncRLError
    from asyncrl.runtime.history_chain import signing_key
    from asyncrl.runtime.run_dir import run_keys

    try:
        return signing_key(run_keys(config))
    except AsyncRLError:
        return b""


def _known_of_parent(root: Path, parent: str, step: int, witnesses: Witnesses) -> Expected:
    """What is known of the parent of a fork: its surviving steps up to the fork, and those heads of its chain that the
    copied checkpoint names. A parent that only inherited that checkpoint has them from its own one. A parent whose
    folder is not on this host is believed.
    """
    if not parent:
        return Expected()
    copied = {anchor.head for anchor in witnesses.anchors if anchor.step and anchor.step <= step}
    origin, seen = (root / parent).resolve(), set[Path]()
    while origin not in seen:
        seen.add(origin)
        above, begin = fork_origin(origin)
        if above and begin >= step:
            origin = (origin / above).resolve()
    history = origin / "history.jsonl"
    chain, reader = ChainReader(anchors=witnesses.anchors), Reader()
    for event in Log(history, chain=chain):
        reader.take(event)
    heads = chain.found_heads if history.exists() else copied
    commits = {number: commit for number, commit in reader.commits.items() if number <= step}
    return Expected(fork_of=parent, fork_step=step, parent=commits, parent_heads=frozenset(heads))


def audit_command(root: Path, *, as_json: bool) -> int:
    """`asyncrl audit`: 0 without violations, else 1. The folder of several policies: each of them."""
    from asyncrl.errors import ConfigError
    from asyncrl.runtime.run_dir import format_json, policy_runs

    if runs := policy_runs(root):
        each = {run.name: audit_run(run) for run in runs}
        ok = all(found.ok for found in each.values())
        text = "\n\n".join(f"policy {name}\n{render(found)}" for name, found in each.items())
        print(format_json({"ok": ok, "policies": each}) if as_json else text)
        return 0 if ok else 1
    if not (root / "history.jsonl").exists():
        raise ConfigError("run.missing", "no history.jsonl in it", where=str(root))
    found = audit_run(root)
    print(format_json(found) if as_json else render(found))
    return 0 if found.ok else 1
