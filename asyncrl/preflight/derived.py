"""Numbers that follow from a configuration, with their arithmetic, and the processes that start.

Pure, except for counting the rows of files.

Example: `pipeline_depth = 4`, `batch_groups = 32`: "max in flight  160 groups = (pipeline_depth 4 + 1) x batch_groups
32".
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.config import Config
from asyncrl.config.judges import list_judges
from asyncrl.config.mode import (
    explain_update,
    is_evaluation_due,
    is_paired,
    longest_row,
    present_roles,
    staleness_bound,
    streams,
)
from asyncrl.config.rules.notes import notes
from asyncrl.evaluation.ids import MAX_ROWS
from asyncrl.preflight.files import count_rows, data_paths
from asyncrl.process_plan.plan import (
    MODULES,
    SERVICES,
    TARGETS,
    is_gang,
    process_names,
    role_restarts,
    role_threads,
)
from asyncrl.runtime.run_dir import endpoint


class Finding(msgspec.Struct, frozen=True):
    """One derived number: name, value and arithmetic."""

    name: str
    value: str
    arithmetic: str = ""


class Starting(msgspec.Struct, frozen=True):
    """Processes of one role: a row of the table of processes."""

    role: str
    count: int
    module: str
    device: str  # empty: none
    threads: int
    restarts: int  # in 10 minutes
    where: str  # the address of a service, the interpreter or server of an engine, the launcher of a gang


def derive_findings(config: Config, roles: Sequence[str] = TARGETS["all"]) -> list[Finding]:
    """The numbers that follow from the settings, with their arithmetic."""
    buffer, sampling, learner = config.buffer, config.sampling, config.learner
    group_size, slots = sampling.group_size, config.producers.slots
    asked = sampling.asked_samples
    held = config.producers.groups_in_flight(asked)
    per_group = f"group_size {group_size}" if asked == group_size else f"(group_size + over_issue) {asked}"
    per_producer = (
        "producers.max_groups_in_flight"
        if config.producers.max_groups_in_flight
        else f"ceil(2 x slots {slots} / {per_group}), fewer where the K/V holds fewer"
    )
    row = longest_row(config)
    findings = [
        Finding("lag at most", f"{staleness_bound(config)} steps", "the whole run: rows have no age" if streams(config)
                else "max_staleness; the bound holds for every token"),
        Finding("max in flight", f"{buffer.max_in_flight_groups} groups",
                f"(pipeline_depth {buffer.depth} + 1) x batch_groups {buffer.batch_groups}"),
        Finding("samples per step", str(buffer.batch_groups * group_size),
                f"batch_groups {buffer.batch_groups} x group_size {group_size}"),
        Finding("total groups", str(config.total_groups),
                f"steps {learner.steps} x batch_groups {buffer.batch_groups}"),
        Finding("groups per producer", str(held), per_producer),
        Finding("longest sample", f"{row} tokens",
                f"max_prompt_tokens {config.data.max_prompt_tokens} + max_new_tokens {sampling.max_new_tokens}"
                f"{', twice for a pair' if is_paired(config) else ''}; "
                f"a packed row holds {learner.micro_batch_tokens}"),
    ]  # fmt: skip
    rows = [count_rows(path) for path in data_paths(config.data.path)]
    if rows and all(rows):
        count = sum(number for number in rows if number)
        findings.append(
            Finding(
                "epochs", f"{config.total_groups / count:.2f}", f"total groups {config.total_groups} / rows {count}"
            )
        )
    findings += _evaluation_findings(config)
    findings.append(Finding("algorithm", explain_update(config)))
    findings.append(Finding("what starts", what_starts(config, roles)))
    return findings


def _evaluation_findings(config: Config) -> list[Finding]:
    """Schedule and prompts of evaluations."""
    evaluation = config.evaluation
    if not evaluation.enabled:
        return []
    times = sum(is_evaluation_due(config, step) for step in range(config.learner.steps + 1))
    rows = [count_rows(path) for path in data_paths(config.evaluation.path)]
    prompts = "all held-out prompts"
    if rows and all(rows):
        count = min(sum(number for number in rows if number), evaluation.max_prompts or MAX_ROWS)
        prompts = f"{count} prompts"
    then = "takes newer weights afterwards" if evaluation.delays_swaps else "keeps their weights next to newer ones"
    who = f"a producer holds up to {config.held_out_prompts} in addition to its training, and {then}"
    who = "on evaluators alone (asyncrl launch evaluators)" if evaluation.separate else who
    how = "greedy" if evaluation.temperature == 0 else f"temperature {evaluation.temperature:g}"
    return [
        Finding(
            "evaluations",
            str(times),
            f"{prompts} x {evaluation.samples} samples, {how}, at most {evaluation.timeout_s:g} s each; " + who,
        )
    ]


def what_starts(config: Config, roles: Sequence[str], judges: tuple[str, ...] | None = None) -> str:
    """`1 buffer (sqlite), 1 weightsync, 2 producers (hf), 1 reward worker, 1 learner x 1 rank = 6 processes`. `judges`:
    whose workers start; None: of all.
    """
    words = {
        "buffer": f"1 buffer ({config.buffer.store})",
        "weightsync": f"1 weightsync ({config.weightsync.transport})",
        "producer": f"{_many(config.producers.count, 'producer')} ({config.producers.engine})",
        "evaluator": _many(config.evaluation.evaluators, "evaluator"),
        "reward": _reward_workers(config, judges),
        "learner": f"1 learner x {_many(config.learner.ranks, 'rank')} ({config.learner.backend})",
    }
    chosen = [role for role in present_roles(TARGETS["all"], config) if role in roles]
    ranks = config.learner.ranks
    total = sum(ranks if role == "learner" else len(process_names(role, config, judges=judges)) for role in chosen)
    return f"{', '.join(words[role] for role in chosen)} = {_many(total, 'process', 'es')}"


def _reward_workers(config: Config, names: tuple[str, ...] | None) -> str:
    """`1 reward worker`; of several judges `3 reward workers (1 default, 2 slow)`; teachers as `1 teacher (big)`."""
    every = [judge for judge in list_judges(config) if names is None or judge.name in names]
    judges = [judge for judge in every if judge.teacher is None]
    teachers = [f"{_many(judge.count, 'teacher')} ({judge.name})" for judge in every if judge.teacher is not None]
    if teachers and not judges:
        return ", ".join(teachers)
    of = f" ({', '.join(f'{judge.count} {judge.display_name}' for judge in judges)})" if len(judges) > 1 else ""
    return ", ".join([_many(sum(judge.count for judge in judges), "reward worker") + of, *teachers])


def _many(count: int, word: str, ending: str = "s") -> str:
    return f"{count} {word}{'' if count == 1 else ending}"


def list_processes(config: Config, roles: Sequence[str]) -> list[Starting]:
    """The table of processes, in the order of their start."""
    producers, rows = config.producers, []
    devices = {"producer": "" if streams(config) else producers.device, "learner": config.learner.device}
    servers = f"generates on {', '.join(producers.url)}" if producers.url else ""
    where = {
        **{role: f"listens on {endpoint(config, role)}" for role in sorted(SERVICES)},
        "producer": servers or (f"in {producers.python}" if producers.python else ""),
        "learner": f"{'torchrun, ' * is_gang('learner', config)}backend {config.learner.backend}",
    }
    for role in (role for role in present_roles(TARGETS["all"], config) if role in roles):
        count = config.learner.ranks if role == "learner" else len(process_names(role, config))
        rows.append(
            Starting(
                role,
                count,
                MODULES[role],
                devices.get(role, ""),
                role_threads(role, config),
                role_restarts(role, config),
                where.get(role, ""),
            )
        )
    return rows


def notes_on(config: Config, roles: Sequence[str], *, cores: int) -> list[str]:
    """Settings that work and may surprise."""
    found = []
    threads = sum(row.count * row.threads for row in list_processes(config, roles) if row.role not in SERVICES)
    if threads > 2 * cores:
        found.append(f"{threads} busy threads on {cores} CPU cores: lower producers.threads or learner.threads")
    found += notes(config)
    minibatches = config.learner.algorithm.minibatches
    if minibatches > 1:
        found.append(f"minibatches = {minibatches}: several optimizer steps per batch multiply the effective staleness")
    return found
