"""Checks everything that a configuration names before anything starts, and reports all mistakes at once.

Guarantees:
1. one pass finds every mistake, each with file and line, the problem, the probable meaning and a remedy;
2. the user's code (rewards, prompt sources) is imported in another process with a time limit;
3. nothing is written or left running, and ports are bound only for the check;
4. the derived numbers are shown with their arithmetic, and the memory of each role. It does not load the model and does
   not import torch or redis.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config, load_all
from asyncrl.config.capabilities import Role, find_folder_refusals, find_refusals
from asyncrl.config.locations import Places, parse_dotted
from asyncrl.config.mode import present_roles
from asyncrl.config.paths import name_candidates
from asyncrl.config.policies import KEY, policy_names
from asyncrl.config.reader import independent_errors
from asyncrl.errors import AsyncRLError, ConfigError, ConfigErrors, error_for
from asyncrl.preflight.code import (
    check_algorithm,
    check_filters,
    check_plugins,
    check_rewards,
    check_torch,
    environment,
)
from asyncrl.preflight.derived import Finding, Starting, derive_findings, list_processes, notes_on
from asyncrl.preflight.files import (
    check_data,
    check_folders,
    check_keys,
    check_model,
    check_model_folder,
    data_notes,
    settle_steps,
)
from asyncrl.preflight.hub import Settled, settle_hub
from asyncrl.preflight.machine import Machine, check_ports, check_store, check_trackers, find_missing, look_at_machine
from asyncrl.preflight.memory import RoleMemory, estimate, format_bytes
from asyncrl.preflight.policies import load_others, merge_errors
from asyncrl.preflight.standby import check_address, check_folder
from asyncrl.preflight.start import ask_roles
from asyncrl.preflight.threads import choose_threads
from asyncrl.process_plan import device_assignment as devices
from asyncrl.process_plan import interpreters as engine_env
from asyncrl.process_plan.plan import ENGINES, TARGETS
from asyncrl.runtime.model_folder import model_json

#: Beginnings of messages about files that are not there.
ABSENT = ("no such f", "no file fits")
_KEY = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+|\[\d+\])*")


class Checked(msgspec.Struct, frozen=True):
    """All mistakes, all derived numbers, and the processes that would start."""

    errors: list[AsyncRLError]
    findings: list[Finding]
    notes: list[str]
    starting: list[Starting] = []
    memory: list[RoleMemory] = []
    missing: list[str] = []  # things that this machine lacks


def check(
    config: Config,
    roles: Sequence[str] = TARGETS["all"],
    *,
    joining: bool = False,
    places: Places | None = None,
    machine: Machine | None = None,
    play: bool = False,
    standby: bool = False,
    doubtful: Collection[str] = (),
    pending: Collection[str] = (),
    others: Mapping[str, Config] | None = None,
) -> Checked:
    """All checks that are possible before the start. `joining`: the services and their store are on other hosts;
    `play`: also play the first row; `standby`: the buffer is a stand-by; `doubtful`: settings whose values are unknown,
    because of a mistake: parts of roles, which would get their defaults, are not tried then; `pending`: settings whose
    files are still on the hub; `others`: the configurations of other policies.
    """
    errors: list[AsyncRLError] = []
    config = choose_threads(config)
    findings = derive_findings(config, roles)
    notes: list[str] = []
    python = ""
    if ENGINES & {*roles}:
        wrong, has, python = engine_env.look(config, env=environment())
        errors += engine_env.url_problems(config) + wrong
        findings += [Finding("engine", has, python)] if has else []
    with ThreadPoolExecutor(1) as pool:  # the parts of roles are tried while the other checks run
        tried = None if doubtful else pool.submit(ask_roles, config, roles, python=python, play=play)
        for wanted_by, look in list_checks(roles, standby=standby):
            if wanted_by & set(roles):
                errors += look(config)
        errors += check_keys(config, joining=joining or standby or "buffer" not in roles)
        here = machine or look_at_machine(config.run_dir)
        errors += check_requests(config, roles, here)
        if tried is None:
            notes.append("the parts of roles were not tried: correct the other mistakes first")
        else:
            start = tried.result()
            errors += start.new_errors(errors)
            findings += start.findings
            notes += start.notes
    errors = [error for error in errors if error.where.partition(" ")[0] not in pending]
    wrong_places, assigned, shared = check_devices(config, roles)
    errors += wrong_places
    findings += assigned
    notes += shared
    notes += data_notes(config) if "producer" in roles else ()
    models = {name: (other, model_json(other.model.path)) for name, other in (others or {}).items()}
    accelerator = bool(here.accelerator)
    memory = estimate(config, model_json(config.model.path), roles, accelerator=accelerator, others=models)
    return Checked(
        [locate_error(error, places) for error in errors] if places else errors,
        findings,
        [*notes_on(config, roles, cores=here.cores), *notes],
        list_processes(config, roles),
        memory,
        list(find_missing(config, roles, here, memory)),
    )


def list_checks(
    roles: Sequence[str], *, standby: bool = False
) -> list[tuple[set[str], Callable[[Config], Iterable[AsyncRLError]]]]:
    """The roles that want a check, and the check."""
    return [
        ({*ENGINES, "learner"}, check_model),
        ({*ENGINES}, check_data),
        ({"reward"}, check_rewards),
        ({*ENGINES, "learner"}, check_plugins),
        ({*ENGINES, "learner"}, lambda config: check_torch(config, roles)),
        ({"buffer"}, check_store),
        ({"buffer"}, check_filters),
        ({"buffer"}, check_folder),
        ({"buffer", "learner"}, check_folders),
        ({"buffer", "weightsync"}, check_address if standby else lambda config: check_ports(config, roles)),
        ({"learner"}, check_algorithm),
        ({"learner"}, check_trackers),
    ]


def check_devices(config: Config, roles: Sequence[str]) -> tuple[list[AsyncRLError], list[Finding], list[str]]:
    """Errors of the assignment of accelerators, the assignment, and a note on processes that share one."""
    accelerators = devices.find_devices()
    errors = [
        error_for(code, what, where=".".join(key)) for code, what, key in devices.problems(config, roles, accelerators)
    ]
    taken = devices.assign_devices(config, roles, accelerators)
    text = devices.format_assignment(taken, accelerators)
    notes = [f"processes share devices ({text}): their memory has to do for all of them"] if taken.shared else []
    return errors, [Finding("devices", text)] if text else [], notes


def check_requests(config: Config, roles: Sequence[str], machine: Machine) -> Iterator[AsyncRLError]:
    """What parts refuse about the model, and about the device that `auto` is on this machine. What the settings alone
    show is a rule (`asyncrl.config.rules.capability`).
    """
    known, model = set(find_refusals(config)), model_json(config.model.path)
    owners: tuple[Role, ...] = ("learner", "producer")
    for role in owners:
        if role in roles:
            found = find_refusals(config, model, role=role, device=machine.accelerator or "cpu")
            yield from (one.error() for one in found if one not in known)
    for owner, key, folder, part, scores in _further_models(config):
        if owner in roles and folder:
            found = find_folder_refusals(config, model_json(folder), part, key=key, scores=scores)
            yield from (one.error() for one in found)


def _further_models(config: Config) -> Iterator[tuple[str, str, str, str, bool]]:
    """Role, setting, folder, its back-end or engine, and whether it gives scores."""
    learner = config.learner
    yield "learner", "learner.critic.model", learner.critic.model, learner.backend, True
    for name in ("model", "reference"):
        folder = getattr(learner.process_reward, name)
        yield "learner", f"learner.process_reward.{name}", folder, learner.backend, False
    for number, table in enumerate(config.judge):
        if table.kind == "generative":
            yield "reward", f"judge[{number}].model", table.model, table.engine, False


def check_files(
    paths: Path | Sequence[Path],
    overrides: Sequence[str] = (),
    target: str = "all",
    *,
    joining: bool = False,
    play: bool = False,
    fetch: bool = False,
    standby: bool = False,
) -> tuple[Config | None, Checked]:
    """Read and check the files; returns the mistakes of both. The configuration is None if the mistakes leave nothing
    to check. `fetch`: if there are none, get models and data from the hub, and check those too.
    """
    loaded = load_all(paths, overrides)
    if loaded.config is None:
        return None, Checked(loaded.errors, [], [])
    config, errors = loaded.config, list(loaded.errors)
    if config.service.port:
        service = settle_hub(config, fetch=fetch)
        errors += [locate_error(one, loaded.places) for one in (*service.errors, *check_service(service))]
        return service.config, Checked(errors, [], list(service.notes))
    roles = present_roles(TARGETS[target], config) if target == "all" else TARGETS[target]

    others = load_others(paths, overrides, config)

    def check_settled(settled: Settled) -> Checked:
        found = check(
            settled.config, roles, joining=joining, places=loaded.places, play=play, doubtful=loaded.doubtful,
            pending=settled.pending, standby=standby, others=others,
        )  # fmt: skip
        own = [locate_error(error, loaded.places) for error in settled.errors]
        more = [*own, *independent_errors(found.errors, loaded.doubtful)]
        return msgspec.structs.replace(
            found, errors=[*errors, *more], notes=[*loaded.notes, *found.notes, *settled.notes]
        )

    def settle(*, fetch: bool) -> Settled:
        """With the rows at hand, which the number of steps may follow from."""
        found = settle_hub(config, fetch=fetch)
        try:
            return found._replace(config=settle_steps(found.config))
        except ConfigErrors as error:
            return found._replace(errors=[*found.errors, *error.errors])

    settled = settle(fetch=False)
    checked = check_settled(settled)
    if fetch and settled.pending and not checked.errors:
        settled = settle(fetch=True)
        checked = check_settled(settled)
    return settled.config, checked


def check_service(settled: Settled) -> Iterator[AsyncRLError]:
    """The packages and the model folder of a training service; its port is found out at the start."""
    wanted = {"torch": "torch", "transformers": "transformers", "aiohttp": "aiohttp", "google": "protobuf"}
    if lacking := [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]:
        what = f"a training service needs {', '.join(lacking)}, which this environment lacks"
        yield ConfigError("config.extra", what, where="service.port", remedy="pip install 'asyncrl[service]'")
    if "model.path" not in settled.pending:
        yield from check_model_folder(settled.config)


def locate_error(error: AsyncRLError, places: Places) -> AsyncRLError:
    """The error with file and line of the setting that its `where` begins with."""
    key = _KEY.match(error.where)
    if key is None or key[0].partition(".")[0].partition("[")[0] not in Config.__struct_fields__:
        return error
    where, message = places.where(parse_dotted(key[0])), f"{error.where}: {error.message}"
    if error.message.startswith(ABSENT) and (value := re.search(r" = '([^'/][^']*)'$", error.where)):
        message += f"; {name_candidates(value[1], where)}"
    return error_for(error.code, message, where=where, remedy=error.remedy, suggestion=error.suggestion)


def render(checked: Checked) -> str:
    """Derived numbers, processes, memory and notes; mistakes are printed separately."""
    width = max((len(finding.name) for finding in checked.findings), default=0)
    lines = []
    for finding in checked.findings:
        tail = f" = {finding.arithmetic}" if finding.arithmetic else ""
        lines.append(f"  {finding.name:<{width}}  {finding.value}{tail}")
    lines += _starting_lines(checked.starting)
    lines += _memory_lines(checked.memory)
    lines += [f"missing here: {what}" for what in checked.missing]
    lines += [f"note: {note}" for note in checked.notes]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with columns below each other."""
    every = [head, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(head))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in every
    ]


def _starting_lines(rows: Sequence[Starting]) -> list[str]:
    if not rows:
        return []
    cells = [
        (row.role, str(row.count), row.device or "-", str(row.threads), str(row.restarts), row.module, row.where)
        for row in rows
    ]
    return ["", *table(("role", "processes", "device", "threads", "restarts", "module", "where"), cells)]


def _memory_lines(roles: Sequence[RoleMemory]) -> list[str]:
    if not roles:
        return []
    lines = ["", "  memory of one process, about:"]
    for one in roles:
        times = f" (x {one.count})" if one.count > 1 else ""
        lines.append(f"  {one.role}, {one.place}: {format_bytes(one.total_bytes)}{times}")
        if len(one.parts) > 1 or one.role == "run folder":
            parts = [(part.name, format_bytes(part.bytes), f"= {part.arithmetic}") for part in one.parts]
            lines += [f"  {line}" for line in table(("", "", ""), parts)[1:]]
    return lines


def result_tree(checked: Checked) -> dict[str, Any]:
    """The output of `asyncrl check --json`."""
    return {
        "ok": not checked.errors,
        "errors": [error_json(error) for error in checked.errors],
        "findings": msgspec.to_builtins(checked.findings),
        "starting": msgspec.to_builtins(checked.starting),
        "memory": [msgspec.to_builtins(one) | {"total_bytes": one.total_bytes} for one in checked.memory],
        "missing": checked.missing,
        "notes": checked.notes,
    }


def error_json(error: AsyncRLError) -> dict[str, Any]:
    """One mistake; `line` is null if it has none."""
    at = re.fullmatch(r"(.*):(\d+)", error.where)
    return {
        "code": error.code,
        "file": at[1] if at else error.where,
        "line": int(at[2]) if at else None,
        "message": error.message,
        "suggestion": error.suggestion,
        "remedy": error.remedy,
        "exit_code": error.exit_code,
    }


def check_command(paths: Sequence[Path], overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Print the result, for several policies one after the other; return the exit code."""
    if names := policy_names(paths, overrides):
        return _check_policies(paths, overrides, names, as_json=as_json)
    _, checked = check_files(paths, overrides, play=True)
    if as_json:
        print(json.dumps(result_tree(checked), indent=2))
        return checked.errors[0].exit_code if checked.errors else 0
    if text := render(checked):
        print(text)
    return _conclude(paths, checked.errors)


def _conclude(paths: Sequence[Path], errors: list[AsyncRLError]) -> int:
    if errors:
        sys.stdout.flush()
        raise ConfigErrors(errors)
    print(f"{' + '.join(map(str, paths))}: no mistakes found")
    return 0


def _check_policies(paths: Sequence[Path], overrides: Sequence[str], names: Sequence[str], *, as_json: bool) -> int:
    """The same for each of several policies, and for what they share."""
    found = {name: check_files(paths, [*overrides, f"{KEY}={name}"], play=True) for name in names}
    configs = {name: config for name, (config, _) in found.items() if config is not None}
    errors = merge_errors({name: checked.errors for name, (_, checked) in found.items()}, configs)
    if as_json:
        policies = {name: result_tree(checked) for name, (_, checked) in found.items()}
        tree = {"ok": not errors, "errors": [error_json(error) for error in errors], "policies": policies}
        print(json.dumps(tree, indent=2))
        return errors[0].exit_code if errors else 0
    for name, (_, checked) in found.items():
        print(f"policy {name}\n{render(checked)}\n")
    return _conclude(paths, errors)
