"""Starts processes, keeps them running within a budget, and ends them in order.

Guarantees:
1. a child that ends with a code outside `FINAL_EXIT_CODES`, or by a signal, is started again after 0.5 s, 1 s, 2 s ..
   10 s, at most `ProcessPlan.restarts` times in 10 minutes; then everything is stopped and the run has its exit code.
   A producer or reward worker is given up instead while another one of its role is at work here: the run goes on, as
   it does without an onlooker (a tracker), whatever its code says;
2. the first signal (`asyncrl.launcher.stop_signals`) stops in order: learner, producers, rewards, weight sync, buffer,
   each with a deadline; the run has the code of a learner that fails then. The second one kills everything at once;
3. when `run` returns, no child is left; when the launcher is killed, the kernel kills the children
   (`asyncrl.launcher.parent_guard`);
4. every line of a child lies in `logs/NAME.log`; a child writes there itself, so a busy launcher never blocks it;
5. starts, ends, restarts, kills and given up workers are events in `logs/launch.jsonl`;
6. with a `HangWatch`, a run without steps ends with code 70 and the diagnosis, after the stacks of all local roles went
   to their logs; with a `SilenceWatch` a process that gives no sign of life is named within seconds;
7. with a `ForkServer`, roles with heavy imports wait for it and are forked; if it is lost, they are executed;
8. stopped processes (SIGSTOP) are woken when the end begins.
It does not know what the roles do.

        start            exit 0                       all ended
  WAIT -------> RUNNING --------------> ENDED         of the last stage
                   |  ^                               ------> outcome
      other exit   |  | backoff over
                   v  |
                 BACKOFF ---- final code, or budget spent and no other of the role ----> stop everything
                         ---- budget spent, others of the role are at work ----------> GIVEN UP
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import EXIT_INTERNAL, EXIT_OK, EXIT_STOPPED, EXIT_UNAVAILABLE, FINAL_EXIT_CODES, AsyncRLError
from asyncrl.launcher.forked import ForkServer
from asyncrl.launcher.hang_watch import HangWatch
from asyncrl.launcher.liveness_watch import SilenceWatch
from asyncrl.launcher.process import Child, effective_exit_code, format_exit_code
from asyncrl.launcher.stop_signals import StopSignals
from asyncrl.metrics import open_lines
from asyncrl.process_plan.plan import ONLOOKER, SERVICES, Outcome, ProcessPlan
from asyncrl.runtime.host_facts import kill_group, reachable
from asyncrl.runtime.role import find_end_signal

WINDOW_S = 600.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
SERVICE_RETURN_S = 5.0  # of what ended well while it is needed: the learner may be about to end too
READY_TIMEOUT_S = 10.0
POLL_S = 0.1
KILL_WAIT_S = 10.0  # for a killed process to disappear
REPLACEABLE = frozenset({"producer", "evaluator", "reward"})  # a run needs only one process of these roles
STOP_ORDER = ("learner", "producer", "evaluator", "reward", "weightsync", "buffer")
EXIT_INTERRUPTED = 130
EXIT_KILLED = 137


class Grace(msgspec.Struct, frozen=True):
    """Time limits of the stages of a stop before SIGKILL."""

    learner_s: float = 120.0  # time to write a checkpoint
    failed_s: float = 30.0  # of the learner if another role failed: it may be unable to finish its step
    other_s: float = 10.0


def backoff_s(restarts: int) -> float:
    """Seconds before restart number `restarts` (1 is the first): 0.5, 1, 2, 4, 8, 10, 10, ..."""
    return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (restarts - 1)))


class Supervisor:
    """Runs plans to their common end. `say(name, line)` gets every line; `tick()` is called ten times a second. Use
    once, from the main thread.
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        *,
        logs: Path,
        say: Callable[[str, str], None],
        tick: Callable[[], None] = lambda: None,
        grace: Grace | None = None,
        hang: HangWatch | None = None,
        silence: SilenceWatch | None = None,
        forks: ForkServer | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.children = [Child(plan, logs / f"{plan.name}.log") for plan in plans]
        self._events = logs / "launch.jsonl"
        self._say = say
        self._tick = tick
        self._grace = grace or Grace()
        self._hang = hang
        self._silence = silence
        self._forks = forks
        self._given_up: dict[str, int] = {}
        self._unnoted = False  # events could not be written
        self._signals = StopSignals()
        self._seen_signals = 0
        self._stopped = False
        self._stages: deque[list[Child]] | None = None  # stages left to stop, in order; None while running
        self._stage_deadline = 0.0
        self._stage_asked = False
        self._learner_grace_s = self._grace.learner_s
        self._outcome: tuple[int, str, Child | None] = (EXIT_OK, "done", None)

    # ------------------------------------------------------------ the visible page

    def run(self) -> Outcome:
        """Start, watch and stop all processes; returns when none is left."""
        started = time.monotonic()
        previous = self._signals.install()
        try:
            self._start_all()
            while not self._is_finished():
                self._step()
                time.sleep(POLL_S)
        finally:
            if self._forks is not None:
                self._forks.close()
            self._kill_rest()
            self._drain()
            for number, handler in previous.items():
                signal.signal(number, handler)
        code, reason, failed = self._outcome
        outcome = Outcome(
            code=code,
            reason=reason,
            wall_s=time.monotonic() - started,
            restarts={child.plan.name: child.restarts for child in self.children if child.restarts},
            failed=failed.plan.name if failed else "",
            last_lines=tuple(failed.last_lines) if failed else (),
            given_up=self._given_up,
            stopped=self._stopped,
        )
        self._event("end", code=code, reason=reason)
        return outcome

    def _step(self) -> None:
        self._drain()
        self._heed_signals()
        for child in self.children:
            self._reap(child)
        if self._stages is None:
            self._restart_due()
            self._look_for_the_end()
            self._look_for_silence()
            self._look_for_a_hang()
        else:
            self._go_on_stopping()
        self._tick()

    # ------------------------------------------------------------ starting

    def _start_all(self) -> None:
        services = [child for child in self.children if child.plan.role in SERVICES]
        if self._forks is not None:
            self._forks.start()
        for child in services:
            self._start(child)
        deadline = time.monotonic() + READY_TIMEOUT_S
        others = [child for child in self.children if child not in services]
        while others and self._stages is None and time.monotonic() < deadline:
            if all(reachable(child.plan.ready) for child in services if child.plan.ready):
                break
            self._step()
            time.sleep(POLL_S)
        if self._stages is None:
            for child in others:
                child.restart_at = time.monotonic()
            self._restart_due()

    def _start(self, child: Child) -> None:
        pid = child.start(self._forks)
        if self._hang is not None and child.plan.role == "learner":
            self._hang.learner_started()
        self._event("start", name=child.plan.name, role=child.plan.role, pid=pid)

    def _restart_due(self) -> None:
        now = time.monotonic()
        for child in self.children:
            if child.restart_at is None or now < child.restart_at:
                continue
            if not child.plan.imports or self._forks is None or not self._forks.is_importing():
                self._start(child)

    # ------------------------------------------------------------ ends of children

    def _reap(self, child: Child) -> None:
        if child.process is None or (returncode := child.process.poll()) is None:
            return
        kill_group(child.process.pid)  # processes left in its session
        child.process = None
        self._read(child, ended=True)
        child.code = effective_exit_code(returncode, child.attempt_log(), gang=child.plan.gang)
        self._event("exit", name=child.plan.name, role=child.plan.role, code=child.code)
        if self._stages is None:
            self._decide(child, child.code)
        elif child.plan.role == "learner":
            self._judge_stop(child, child.code)

    def _decide(self, child: Child, code: int) -> None:
        name = child.plan.name
        if code == EXIT_OK:
            self._heed_end(child)
            return
        now = time.monotonic()
        while child.restarted and now - child.restarted[0] > WINDOW_S:
            child.restarted.popleft()
        if child.plan.role == "learner" and code == EXIT_INTERNAL and self._look_for_a_hang(learner_ended=True):
            return
        if code in FINAL_EXIT_CODES or len(child.restarted) >= child.plan.restarts:
            why = "is final" if code in FINAL_EXIT_CODES else f"came after {len(child.restarted)} restarts"
            if child.plan.role == ONLOOKER or (code not in FINAL_EXIT_CODES and self._others(child)):
                self._give_up(child, code, why)
            else:
                self._begin_stop(code, f"{name} ended with code {format_exit_code(code)}, which {why}", failed=child)
            return
        child.restarted.append(now)
        wait_s = backoff_s(len(child.restarted))
        self._say(
            "launch",
            f"warning: {name} ended with code {format_exit_code(code)}; restart {len(child.restarted)} of "
            f"{child.plan.restarts} in {wait_s:g} s",
        )
        self._schedule(child, wait_s)

    def _heed_end(self, child: Child) -> None:
        """Start what ended well again if it is needed: a service, or the last worker of a role, ended by a signal."""
        if child.plan.role in SERVICES and self._workers_are_busy():
            self._schedule(child, SERVICE_RETURN_S)
        elif child.plan.role in REPLACEABLE and (name := find_end_signal(child.attempt_log())):
            learns = any(one.plan.role == "learner" and not one.over for one in self.children)
            if again := learns and not self._others(child):
                self._schedule(child, SERVICE_RETURN_S)
            then = f"restart in {SERVICE_RETURN_S:g} s" if again else "it is not started again"
            self._say("launch", f"warning: {child.plan.name} was ended by {name}: {then}")

    def _others(self, child: Child) -> list[str]:
        """Workers of the same role that run here, or will be restarted."""
        mine = (child.plan.role, child.plan.judge)  # workers of another judge cannot replace it
        alike = [one for one in self.children if one is not child and (one.plan.role, one.plan.judge) == mine]
        return [other.plan.name for other in alike if not other.over] if mine[0] in REPLACEABLE else []

    def _give_up(self, child: Child, code: int, why: str) -> None:
        """Continue the run without this worker."""
        name = child.plan.name
        self._given_up[name] = code
        self._event("given up", name=name, role=child.plan.role, code=code)
        others = ", ".join(self._others(child))
        self._say(
            "launch",
            f"error: {name} ended with code {format_exit_code(code)}, which {why}: it is given up, the run "
            f"goes on {f'with {others}' if others else 'without'}; see {child.log}",
        )

    def _schedule(self, child: Child, wait_s: float) -> None:
        child.restart_at = time.monotonic() + wait_s
        child.restarts += 1
        self._event("restart", name=child.plan.name, role=child.plan.role, wait_s=wait_s, code=child.code)

    def _workers_are_busy(self) -> bool:
        """Whether a process other than services and observers still runs."""
        idle = {*SERVICES, ONLOOKER}
        return any(not child.over for child in self.children if child.plan.role not in idle)

    def _look_for_the_end(self) -> None:
        learners = [child for child in self.children if child.plan.role == "learner"]
        if all(child.over for child in learners or self.children):
            self._begin_stop(EXIT_OK, "done")

    def _look_for_silence(self) -> None:
        if self._silence is None or self._stages is not None:
            return
        running = {child.process.pid: child.plan.name for child in self.children if child.process is not None}
        for kind, text in self._silence.look(running):
            self._say("launch", f"warning: {text}" if kind == "silent" else text)
            self._event(kind, text=text)

    def _look_for_a_hang(self, *, learner_ended: bool = False) -> bool:
        if self._hang is None or self._stages is not None:
            return False
        problem = self._hang.look(learner_ended=learner_ended)
        if problem:
            self._hang.dump_stacks()
            remedy = "the stacks of all roles on this host are in their logs"  # a stopped process was continued for it
            self._say("launch", AsyncRLError("hang", problem, remedy=remedy).render())
            self._begin_stop(EXIT_INTERNAL, problem)
        return bool(problem)

    # ------------------------------------------------------------ stopping

    def _begin_stop(self, code: int, reason: str, *, failed: Child | None = None) -> None:
        if self._stages is not None:
            return
        self._outcome = (code, reason, failed)
        if failed is not None or code == EXIT_INTERNAL:
            self._learner_grace_s = self._grace.failed_s
        by_role = [[child for child in self.children if child.plan.role == role] for role in STOP_ORDER]
        by_role.append([child for child in self.children if child.plan.role not in STOP_ORDER])
        for child in self.children:
            child.restart_at = None
            child.wake()
        self._stages = deque(stage for stage in by_role if stage)
        self._stage_asked = False
        self._event("stop", code=code, reason=reason)

    def _judge_stop(self, learner: Child, code: int) -> None:
        """A stop whose learner fails is a failure. SIGTERM itself ends only one that has not begun."""
        before, reason, _ = self._outcome
        # A signal to all processes ends the buffer first. The learner then writes its checkpoint alone, and says so.
        buffers = [child for child in self.children if child.plan.role == "buffer"]
        alone = code == EXIT_UNAVAILABLE and any(child.over and child.code == EXIT_OK for child in buffers)
        if alone or code in (EXIT_OK, EXIT_STOPPED) or before not in (EXIT_OK, EXIT_INTERRUPTED):
            return
        late = code == EXIT_KILLED and self._stage_asked and time.monotonic() > self._stage_deadline
        how = "was killed, because it did not end in time" if late else f"ended with code {format_exit_code(code)}"
        self._outcome = (code, f"{reason}, but {learner.plan.name} {how}: its last checkpoint may be missing", learner)

    def _go_on_stopping(self) -> None:
        assert self._stages is not None
        while self._stages and not any(child.running for child in self._stages[0]):
            self._stages.popleft()
            self._stage_asked = False
        if not self._stages:
            return
        stage = [child for child in self._stages[0] if child.running]
        if not self._stage_asked:
            grace_s = self._learner_grace_s if stage[0].plan.role == "learner" else self._grace.other_s
            self._stage_deadline = time.monotonic() + grace_s
            self._stage_asked = True
            for child in stage:
                child.terminate()
        elif time.monotonic() > self._stage_deadline:
            for child in stage:
                self._say("launch", f"warning: {child.plan.name} did not end in time: killed")
                self._event("kill", name=child.plan.name, role=child.plan.role)
                child.kill()

    def _is_finished(self) -> bool:
        return self._stages is not None and not any(child.running for child in self.children)

    def _kill_rest(self) -> None:
        left = [child for child in self.children if child.process is not None]
        for child in left:
            child.kill()
        for child in left:  # kill all of them before waiting for the first
            with suppress(subprocess.TimeoutExpired):  # the kernel blocks it (a hanging disk); it ends later
                assert child.process is not None
                child.process.wait(timeout=KILL_WAIT_S)
            child.process = None

    # ------------------------------------------------------------ signals, output, events

    def _heed_signals(self) -> None:
        requests = self._signals.requests
        if len(requests) == self._seen_signals:
            return
        self._seen_signals = len(requests)
        self._stopped |= self._stages is None
        name = requests[0].name
        if len(requests) == 1:
            learner = any(child.plan.role == "learner" for child in self.children)
            first_of_all = ", the learner writes a checkpoint first" if learner else ""
            code = EXIT_INTERRUPTED if requests[0] == signal.SIGINT else EXIT_OK
            self._begin_stop(code, f"stopped by {name}")
            self._say("launch", f"{name}: stopping{first_of_all}; once more kills everything")
        else:
            self._begin_stop(EXIT_KILLED, f"killed by {name}")
            self._outcome = (EXIT_KILLED, f"killed by {name}", None)
            for child in self.children:
                child.kill()
            self._say("launch", "second signal: everything is killed")

    def _drain(self) -> None:
        for child in self.children:
            self._read(child, ended=not child.running)

    def _read(self, child: Child, *, ended: bool = False) -> None:
        for line in child.new_lines(ended=ended):
            self._say(child.plan.name, line)

    def _event(self, event: str, **fields: Any) -> None:
        line = msgspec.json.encode({"t": round(time.time(), 3), "event": event, **fields})
        try:
            with open_lines(self._events) as file:
                file.write(line + b"\n")
        except OSError as error:  # on a full disk the event is lost, not the run
            if not self._unnoted:
                self._say("launch", f"warning: {self._events}: {error.strerror}: events are not noted")
            self._unnoted = True
