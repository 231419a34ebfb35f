"""`asyncrl status` and `asyncrl stop`: show the state of a run, and end it.

Guarantees:
1. every question has a deadline; a service without an answer is reported as silent, and the files give the rest;
2. `stop` asks the launchers on this host (SIGTERM: the learner writes a checkpoint), the learner's first, and waits for
   their end; without a launcher it asks the buffer and the weight-sync service.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from asyncrl.config import Config, load
from asyncrl.config.mode import streams
from asyncrl.errors import AsyncRLError, ConfigError, Unavailable
from asyncrl.metrics import JsonTail, line_time
from asyncrl.monitor.control import ASK_TIMEOUT_S, ServiceClient, service_status
from asyncrl.monitor.status_schema import SCHEMA
from asyncrl.monitor.text import QUEUE_STATES, clean, number
from asyncrl.net.keys import Keys, read_keys
from asyncrl.runtime.host_facts import process_state, reachable, send
from asyncrl.runtime.liveness import STOPPED, read_signs
from asyncrl.runtime.run_dir import (
    RunDir,
    buffer_address,
    endpoint,
    format_json,
    launchers,
    policy_runs,
    read_object,
    run_keys,
)

SILENT_S = 10.0  # without a configuration
STOP_POLL_S = 0.2
LAST_BYTES = 1 << 20  # of a metrics file: its newest lines


def status_command(folder: Path | None, *, connect: str, key: str, as_json: bool) -> int:
    """Print the state; 0 if the buffer answered, else 69."""
    if (folder is None) == (not connect):
        raise ConfigError("usage", "give a run folder or --connect URL")
    if folder is None:
        state = connect_status(connect, read_keys(Path(key)) if key else None)
    else:
        state = run_status(RunDir(folder).require(), key=key)
    print(format_json(state) if as_json else render(state))
    return 0 if "error" not in state["buffer"] else 69


def run_status(run: RunDir, *, key: str = "") -> dict[str, Any]:
    """The answers of both services and the state of the files."""
    config = load(run.config)
    keys = read_keys(Path(key)) if key else run_keys(config)
    steps, queue, beats = (_last_lines(run.metrics / f"{name}.jsonl") for name in ("learner", "buffer", "roles"))
    return {
        "schema": SCHEMA,
        "at": time.time(),
        "run": str(run.root),
        "name": config.run.name,
        "steps": config.learner.steps,
        "silent_timeout_s": config.run.silent_timeout_s,
        "launchers": [{"target": target, "pid": pid} for target, pid in launchers(run)],
        "last_step": next((line for line in reversed(steps) if "step" in line), {}),
        "result": read_object(run.result),
        "queue": queue[-1] if queue else {},
        "workers": _newest_beats(beats),
        "alive": _alive(run),
        "buffer": service_status(buffer_address(config), keys),
        **({} if streams(config) else {"weightsync": service_status(endpoint(config, "weightsync"), keys)}),
    }


def connect_status(address: str, keys: Keys | None) -> dict[str, Any]:
    """The answer of the buffer at an address, and of the weight-sync service that it names."""
    buffer = service_status(address, keys)
    learner = buffer.get("learner") or {}
    state = {
        "schema": SCHEMA,
        "at": time.time(),
        "name": str(buffer.get("run_id", "")).partition("@")[0],
        "last_step": dict(learner.get("stats") or {}),
        "buffer": buffer,
    }
    place = str((buffer.get("endpoints") or {}).get("weightsync", ""))
    return state | ({"weightsync": service_status(place, keys)} if place else {})


def _last_lines(path: Path) -> list[dict[str, Any]]:
    """The lines in the last part of a file."""
    with closing(JsonTail(path, last_bytes=LAST_BYTES)) as tail:
        return tail.poll()


def _newest_beats(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The newest line of each name, by name."""
    newest = {str(line["name"]): line for line in sorted(lines, key=line_time) if "name" in line}
    return dict(sorted(newest.items()))


def _alive(run: RunDir) -> dict[str, dict[str, Any]]:
    """The newest sign of every role: age, state of a process on this host, reason and start of a wait."""
    now = time.time()
    found = {}
    for name, seen in sorted(read_signs(run.alive).items()):
        here = seen.host == socket.gethostname()
        found[name] = {
            "role": seen.role,
            "pid": seen.pid,
            "host": seen.host,
            "age_s": round(now - seen.t, 1),
            "state": (process_state(seen.pid) or "ended") if here else "",
            "waiting_for": seen.waiting_for,
            "waiting_s": round(now - seen.since, 1) if seen.since else 0.0,
        }
    return found


def render(state: dict[str, Any]) -> str:
    """The text that `asyncrl status` prints."""
    lines: list[str] = []
    over = False
    if "run" in state:
        living = ", ".join(f"{launcher['target']} pid {launcher['pid']}" for launcher in state["launchers"])
        how = f"launched here: {living}" if living else "no launcher here"
        lines += [
            f"{'run':<12}{state['run']} ({how})",
            f"{'step':<12}{_step_words(state['last_step'], state['steps'])}",
        ]
        if state["result"]:
            lines.append(f"{'result':<12}{state['result'].get('reason')} (code {state['result'].get('code')})")
        queue = state["queue"]
        counts = [f"{name} {int(queue[name])}" for name in QUEUE_STATES if queue.get(name)]
        lines.append(f"{'queue':<12}{' · '.join(counts) or 'nothing yet'}")
        over = bool(state["result"]) and not living
        if not over:
            lines += [f"{name:<11} {words}" for name, words in _workers(state).items()]
    for service, words in (("buffer", _buffer_words), ("weightsync", _weightsync_words)):
        if service in state:
            answer = state[service]
            silent = answer.get("error")
            if silent and over:
                silent = "not running: the run has ended"
            elif silent:
                silent = f"silent: {silent}"
            lines.append(f"{service:<12}{silent or words(answer)}")
    return "\n".join(clean(line) for text in lines for line in text.split("\n"))


def _workers(state: dict[str, Any]) -> dict[str, str]:
    """Activity of every role: from its own sign, else (on another host) from its heartbeats."""
    activities = {}
    answer = state["buffer"]
    learner = answer.get("learner") or {}
    beats = [*answer.get("producers", []), *answer.get("rewards", [])]
    beats += [learner] if learner.get("age_s") is not None else []
    for one in beats:
        activities[str(one["name"])] = _words_of(one | {"state": ""}, silent_s=state.get("silent_timeout_s", SILENT_S))
    for name, worker in state["workers"].items():  # from the log, if the buffer does not answer
        activities.setdefault(name, f"waits: {worker['waiting_for']}" if worker.get("waiting_for") else "works")
    for name, one in state.get("alive", {}).items():
        activities[name] = _words_of(one, silent_s=state.get("silent_timeout_s", SILENT_S))
    return dict(sorted(activities.items()))


def _words_of(one: dict[str, Any], *, silent_s: float) -> str:
    who = f"(pid {one['pid']} on {one['host']})"
    if one["state"] == "ended":
        return f"has ended {who}"
    waited = f" for {one['waiting_s']:.0f} s" if one.get("waiting_s") else ""
    doing = f"waits{waited}: {one['waiting_for']}" if one["waiting_for"] else "works"
    if one["state"] and one["state"] in STOPPED:
        return f"is stopped (state {one['state']}), silent for {one['age_s']:.0f} s {who}"
    if one["age_s"] >= silent_s:
        return f"silent for {one['age_s']:.0f} s; last heard of: {doing} {who}"
    return f"{doing} {who}"


def _step_words(step: dict[str, Any], steps: int) -> str:
    if not step:
        return f"none of {steps} yet"
    return (
        f"{step['step']} of {steps}  reward {number(step, 'reward_mean')}  lag {number(step, 'lag_mean', '.2f')} "
        f"(max {number(step, 'lag_max', '.0f')} of {number(step, 'bound_max', '.0f')})  "
        f"{number(step, 'tokens_per_s', '.0f')} tok/s"
    )


def _buffer_words(answer: dict[str, Any]) -> str:
    ledger = answer.get("ledger", {})
    counts = " · ".join(f"{name} {ledger[name]}" for name in QUEUE_STATES if ledger.get(name)) or "nothing issued yet"
    lines = [
        f"{answer.get('store')}, version {answer.get('version')}, {answer.get('total_groups')} groups in all: {counts}"
    ]
    fault = answer.get("fault")
    if fault:
        lines.append(f"ends the run: {fault.get('code')}: {fault.get('message')}")
    if answer.get("waiting_for"):
        lines.append(str(answer["waiting_for"]))
    if (answer.get("evaluation") or {}).get("running"):
        lines.append(_evaluation_words(answer["evaluation"]))
    return f"\n{'':<12}".join(lines)


def _evaluation_words(found: dict[str, Any]) -> str:
    """`evaluation of step 20: 12 of 64 prompts are over, 31 s of 600 s (failed 1; left: is being generated 4)`."""
    left = ", ".join(f"{what} {count}" for what, count in sorted((found.get("left") or {}).items()))
    more = [f"failed {found['failed']}"] if found.get("failed") else []
    more += [f"left: {left}"] if left else []
    return f"evaluation {found['running']}" + (f" ({'; '.join(more)})" if more else "")


def _weightsync_words(answer: dict[str, Any]) -> str:
    if answer.get("version", -1) < 0:
        return "no version was published yet"
    members = dict(answer.get("members") or {})
    texts = [
        f"{name} {member.get('state')} version {member.get('version')}" + _why(member) + _way(member)
        for name, member in sorted(members.items())
    ]
    head = f"version {answer.get('version')}, held by generators {answer.get('committed')}; "
    return f"\n{'':<12}".join([head + (texts or ["no generator"])[0], *texts[1:]])


def _why(member: dict[str, Any]) -> str:
    words = dict.fromkeys(str(member[key]) for key in ("why", "said") if member.get(key))
    return f" ({'; '.join(words)})" if words else ""


def _way(member: dict[str, Any]) -> str:
    """How its weights arrive: `, local full from learner: same host as the publisher (gpu1)`."""
    if not member.get("transport"):
        return ""
    source = f" from {member['source']}" if member.get("source") else ""
    return f", {member['transport']} {member.get('encoding', '')}{source}: {member.get('transport_why', '')}"


def stop_command(folder: Path, *, timeout_s: float) -> int:
    """End the run; after its end, the exit code of the learner's launcher. Raises Unavailable if it does not end within
    the timeout.
    """
    several = policy_runs(folder)
    run = RunDir(folder) if several else RunDir(folder).require()
    deadline, asked_at = time.monotonic() + timeout_s, time.time()
    here = launchers(run)
    for learner in (True, False):  # the others serve the learner while it writes its checkpoint
        asked = [(target, pid) for target, pid in here if (target in ("all", "learner")) is learner]
        for target, pid in asked:
            send(pid, signal.SIGTERM)
            print(f"asked the launcher of {target} (pid {pid}) to stop", flush=True)
        _await_end(run, asked, deadline, timeout_s)
    if here:
        led = any(target in ("all", "learner") for target, _ in here)
        return _print_ends([RunDir(one) for one in several or [run.root]] if led else [], since=asked_at)
    return max(map(_stop_services, map(RunDir, several))) if several else _stop_services(run)


def _print_ends(runs: Sequence[RunDir], *, since: float) -> int:
    """Say how runs ended, from what their launchers wrote since then; the highest exit code."""
    ends = [end for run in runs if line_time(end := read_object(run.result)) >= since]
    failed = [(int(end["code"]), end) for end in ends if end.get("code")]
    for code, end in failed:
        print(f"stopped, with exit code {code}: {clean(str(end.get('reason', '')))}")
    if not failed:
        print("stopped")
    return max((code for code, _ in failed), default=0)


def _await_end(run: RunDir, asked: list[tuple[str, int]], deadline: float, timeout_s: float) -> None:
    while set(asked) & set(launchers(run)):
        if time.monotonic() > deadline:
            raise Unavailable("hang", f"it has not ended within {timeout_s:g} s", where=str(run.root))
        time.sleep(STOP_POLL_S)


def _stop_services(run: RunDir) -> int:
    """Ask both services; returns 0."""
    config = load(run.config)
    asked = [name for name in ("buffer", "weightsync") if _stop_service(name, config)]
    if not asked:
        print("nothing of this run answers here")
        return 0
    print(f"asked {' and '.join(asked)} to stop")
    return 0


def _stop_service(name: str, config: Config) -> bool:
    address = buffer_address(config) if name == "buffer" else endpoint(config, name)
    if not reachable(address, timeout_s=ASK_TIMEOUT_S):
        return False
    try:
        with closing(ServiceClient(address, keys=run_keys(config), timeout_s=ASK_TIMEOUT_S)) as client:
            client.stop("asyncrl stop")
    except AsyncRLError:
        return False
    return True
