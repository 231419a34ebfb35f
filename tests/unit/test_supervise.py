"""The supervisor with real processes: budgets, backoff, order of the stop, signals, no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config import Config, parse
from asyncrl.launcher.hang_watch import HangWatch
from asyncrl.launcher.process import Child, effective_exit_code
from asyncrl.launcher.supervisor import Grace, Supervisor, backoff_s
from asyncrl.metrics import read_lines
from asyncrl.process_plan.plan import TARGETS, Joining, Outcome, ProcessPlan, plan
from asyncrl.runtime.host_facts import descendants, is_alive
from asyncrl.runtime.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
[model]
path = "m"
[data]
path = "d.jsonl"
[[reward]]
function = "x:y"
[producers]
count = 2
threads = 3
restarts = 7
[learner]
ranks = 2
"""


def script(role: str, code: str, *, name: str = "", restarts: int = 0, gang: bool = False) -> ProcessPlan:
    """A process that runs some Python."""
    argv = (sys.executable, "-c", textwrap.dedent(code))
    return ProcessPlan(
        role=role,
        name=name or role,
        argv=argv,
        restarts=restarts,
        gang=gang,
        env={"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )


FOREVER = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit(0)))
    print("up", flush=True)
    time.sleep(60)
"""
#: Ends once the launcher has given a process up.
GIVEN_UP = """
    import pathlib, time
    log, until = pathlib.Path('{log}'), time.monotonic() + 120
    while time.monotonic() < until and not (log.exists() and '"given up"' in log.read_text()):
        time.sleep(0.05)
"""
STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    time.sleep(60)
"""
#: A role of ours, which needs a moment for its checkpoint.
SAVES = """
    import time
    from asyncrl.runtime.role import Stop, install_signals
    stop = Stop()
    install_signals(stop)
    print("up", flush=True)
    stop.wait(60)
    time.sleep(1)
    print("saved", flush=True)
"""


def supervise(
    tmp_path: Path, plans: list[ProcessPlan], *, grace: Grace | None = None
) -> tuple[Outcome, list[str], list[dict[str, object]]]:
    said: list[str] = []
    supervisor = Supervisor(
        plans,
        logs=tmp_path / "logs",
        say=lambda name, line: said.append(f"{name}: {line}"),
        grace=grace or Grace(learner_s=5, failed_s=5, other_s=5),
    )
    outcome = supervisor.run()
    return outcome, said, read_lines(tmp_path / "logs" / "launch.jsonl")


def names(events: list[dict[str, object]], kind: str) -> list[object]:
    return [event["name"] for event in events if event["event"] == kind]


# ---------------------------------------------------------------- pure parts


def config() -> Config:
    return parse(SMALL)


def test_plan_is_in_order_and_complete() -> None:
    plans = plan(config(), TARGETS["all"], config_path=Path("/r/config.toml"), python="py", python_path=["/here"])
    assert [p.name for p in plans] == ["buffer", "weightsync", "producer-0", "producer-1", "reward-0", "learner"]
    producer, learner = plans[2], plans[-1]
    assert producer.argv == ("py", "-m", "producers.main", "--config", "/r/config.toml", "--name", "producer-0")
    assert producer.env["OMP_NUM_THREADS"] == "3" and producer.restarts == 7 and not producer.gang
    assert producer.env["OMP_WAIT_POLICY"] == "PASSIVE" and producer.env["PYTHONPATH"] == "/here"
    assert learner.argv[:3] == ("py", "-m", "learners.gang.local_gang") and learner.gang
    assert learner.argv[learner.argv.index("--nproc-per-node") + 1] == "2"
    assert learner.argv[-6:] == ("-m", "learners.main", "--config", "/r/config.toml", "--name", "learner")
    assert learner.env["OMP_NUM_THREADS"] == "1"


def test_one_rank_starts_without_torchrun() -> None:
    """Which would import torch first, and then start a rank that imports it again."""
    one = SMALL.replace("ranks = 2", "ranks = 1")
    [learner] = plan(parse(one), ("learner",), config_path=Path("c"), joining=Joining(takeover=True), python="py")
    assert learner.argv == ("py", "-m", "learners.main", "--config", "c", "--name", "learner", "--takeover")
    assert not learner.gang and learner.env["WORLD_SIZE"] == "1"  # whatever a scheduler has set
    several = parse(f"{one}[cluster]\nlearner_hosts = 2\n")
    [learner] = plan(several, ("learner",), config_path=Path("c"), joining=Joining(head="h:1"))
    assert learner.gang and "torch.distributed.run" in learner.argv


def test_plan_of_a_joining_launch() -> None:
    joining = Joining(connect="tcp://host:1", key="/k", takeover=True, tag="a1")
    plans = plan(config(), ("producer", "learner", "buffer"), config_path=Path("c"), joining=joining)
    assert [p.name for p in plans] == ["buffer", "producer-a1-0", "producer-a1-1", "learner"]
    assert "--connect" not in plans[0].argv and plans[0].argv[-2:] == ("--key", "/k")
    assert plans[1].argv[-4:] == ("--connect", "tcp://host:1", "--key", "/k")
    assert plans[-1].argv[-1] == "--takeover" and "--takeover" not in plans[1].argv


def test_workers_are_started_with_their_own_key_file() -> None:
    for key, leading in (("", None), ("/server.key", "/server.key")):
        joining = Joining(key=key, worker_keys={"producer": "/producer.key", "reward": "/reward.key"})
        plans = plan(config(), TARGETS["all"], config_path=Path("c"), joining=joining)
        given = {one.role: one.argv[one.argv.index("--key") + 1] if "--key" in one.argv else None for one in plans}
        assert (given.pop("producer"), given.pop("reward")) == ("/producer.key", "/reward.key")
        assert given == dict.fromkeys(("buffer", "weightsync", "learner"), leading)


def test_backoff_doubles_up_to_ten_seconds() -> None:
    assert [backoff_s(n) for n in range(1, 8)] == [0.5, 1, 2, 4, 8, 10, 10]


def test_exit_codes_of_signals_and_gangs() -> None:
    report = b"failed (exitcode: 75) local_rank: 0\n  exitcode  : 1 (pid: 1)\nRoot Cause\n  exitcode  : 75 (pid: 2)\n"
    assert effective_exit_code(-9, b"", gang=False) == 137
    assert effective_exit_code(1, report, gang=True) == 75
    assert effective_exit_code(1, report, gang=False) == 1
    assert effective_exit_code(1, b"nothing", gang=True) == 1
    assert effective_exit_code(1, b"  exitcode  : -9 (pid: 7)\n", gang=True) == 137
    assert effective_exit_code(1, b"W1 Received 15 death signal, shutting down workers\n", gang=True) == 143


def test_report_of_torchrun_is_kept_from_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    child = Child(ProcessPlan("learner", "learner", ("x",), gang=True), log)
    log.write_text("own words\nE1 failed (exitcode: 2) local_rank: 0\nTraceback\n=====\nFAILED\n=====\nafter\nhal")
    assert child.new_lines() == ["own words", "after"]
    with log.open("a") as file:
        file.write("f\nW1 Received 15 death signal\nTraceback\n  File x\na.SignalException: Process 7\nmore\nhal")
    assert child.new_lines() == ["half", "more"]
    with log.open("a") as file:
        file.write("f\n")
    assert child.new_lines() == ["half"]


def test_a_line_in_pieces_stays_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launcher.process.READ_BYTES", 3)  # every line comes in pieces, letters too
    log = tmp_path / "x.log"
    child = Child(ProcessPlan("producer", "producer", ("x",)), log)
    log.write_bytes("äöü and more\n\nlast words".encode())
    got = [line for _ in range(9) for line in child.new_lines()]
    assert got == ["äöü and more", ""]
    assert child.new_lines(ended=True) == ["last words"]  # its process has ended: no more will come
    log.open("a").write("first of the next\n")
    assert child.new_lines(ended=True) == ["first of the next"]


# ---------------------------------------------------------------- with processes


@pytest.mark.timeout(300)
def test_run_ends_with_the_learner_and_stops_the_others_in_order(tmp_path: Path) -> None:
    plans = [
        script("buffer", FOREVER),
        script("weightsync", FOREVER),
        script("producer", FOREVER, name="producer-0"),
        script("reward", FOREVER, name="reward-0"),
        script("learner", "import time; time.sleep(1)"),
    ]
    outcome, said, events = supervise(tmp_path, plans)
    assert outcome.code == 0 and outcome.reason == "done" and outcome.restarts == {}
    assert names(events, "start") == ["buffer", "weightsync", "producer-0", "reward-0", "learner"]
    assert names(events, "exit") == ["learner", "producer-0", "reward-0", "weightsync", "buffer"]
    assert names(events, "kill") == []
    assert said.count("buffer: asked") == 1
    assert (tmp_path / "logs" / "producer-0.log").read_text() == "up\nasked\n"


@pytest.mark.timeout(300)
def test_crash_is_restarted_with_backoff_until_the_budget_is_spent(tmp_path: Path) -> None:
    crash = 'import sys; print("my last words", file=sys.stderr); sys.exit(1)'
    plans = [script("producer", crash, name="producer-0", restarts=2), script("learner", FOREVER)]
    outcome, said, events = supervise(tmp_path, plans)
    assert outcome.code == 1 and outcome.failed == "producer-0" and outcome.restarts == {"producer-0": 2}
    assert "my last words" in outcome.last_lines
    starts = [float(event["t"]) for event in events if event["event"] == "start" and event["name"] == "producer-0"]
    assert len(starts) == 3 and starts[1] - starts[0] >= 0.5 and starts[2] - starts[1] >= 1.0
    assert sum("restart" in line for line in said if line.startswith("launch:")) == 2
    assert "learner: asked" in said  # it was asked, not killed


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["producer", "reward"])
def test_the_run_goes_on_while_another_worker_of_the_role_lives(tmp_path: Path, role: str) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    plans = [
        script(role, killed, name=f"{role}-0", restarts=1),
        script(role, FOREVER, name=f"{role}-1"),
        script("learner", GIVEN_UP.format(log=tmp_path / "logs" / "launch.jsonl")),
    ]
    outcome, said, events = supervise(tmp_path, plans)
    assert outcome.code == 0 and outcome.given_up == {f"{role}-0": 137} and outcome.restarts == {f"{role}-0": 1}
    errors = [line for line in said if line.startswith("launch: error")]
    assert len(errors) == 1 and f"{role}-0 ended with code 137" in errors[0] and f"with {role}-1;" in errors[0]
    assert names(events, "given up") == [f"{role}-0"]


@pytest.mark.timeout(300)
def test_the_last_worker_of_a_role_ends_the_run_with_its_code(tmp_path: Path) -> None:
    plans = [
        script("producer", "raise SystemExit(69)", name="producer-0"),
        script("producer", "import time; time.sleep(1.5); raise SystemExit(70)", name="producer-1"),
        script("reward", FOREVER),
        script("learner", FOREVER),
    ]
    outcome, _, _ = supervise(tmp_path, plans)
    assert outcome.code == 70 and outcome.failed == "producer-1" and outcome.given_up == {"producer-0": 69}


@pytest.mark.timeout(300)
def test_the_workers_of_another_judge_are_no_substitute(tmp_path: Path) -> None:
    plans = [
        replace(script("reward", "raise SystemExit(70)", name="reward-slow-0"), judge="slow"),
        script("reward", FOREVER, name="reward-0"),
        script("learner", FOREVER),
    ]
    outcome, _, _ = supervise(tmp_path, plans)
    assert outcome.code == 70 and outcome.failed == "reward-slow-0" and not outcome.given_up


def test_every_judge_has_workers_of_its_own(tmp_path: Path) -> None:
    more = '[[reward]]\nfunction = "a:deep"\njudge = "slow"\n[[judge]]\nname = "slow"\ncount = 2\nrestarts = 9\n'
    made = parse(SMALL + more)
    plans = plan(made, TARGETS["rewards"], config_path=tmp_path / "c.toml")
    assert [(p.name, p.judge) for p in plans] == [
        ("reward-0", ""),
        ("reward-slow-0", "slow"),
        ("reward-slow-1", "slow"),
    ]
    assert "--judge" not in plans[0].argv and plans[1].argv[-2:] == ("--judge", "slow") and plans[1].restarts == 9
    joining = Joining(tag="x", judges=("slow",))
    mine = plan(made, TARGETS["rewards"], config_path=tmp_path / "c.toml", joining=joining)
    assert [p.name for p in mine] == ["reward-x-slow-0", "reward-x-slow-1"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("code", [2, 75, 78])
def test_final_codes_are_not_restarted(tmp_path: Path, code: int) -> None:
    outcome, _, events = supervise(
        tmp_path, [script("producer", f"raise SystemExit({code})", restarts=5), script("learner", FOREVER)]
    )
    assert outcome.code == code and outcome.failed == "producer"
    assert names(events, "start").count("producer") == 1 and names(events, "restart") == []


@pytest.mark.timeout(300)
def test_killed_process_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    once = """
        import os, pathlib, signal, time
        flag = pathlib.Path("FLAG")
        if not flag.exists():
            flag.write_text("x")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)
    """.replace("FLAG", str(tmp_path / "flag"))
    outcome, _, events = supervise(
        tmp_path, [script("producer", once, restarts=1), script("learner", "import time; time.sleep(2)")]
    )
    assert outcome.code == 0 and outcome.restarts == {"producer": 1}
    assert [event["code"] for event in events if event["event"] == "restart"] == [137]


@pytest.mark.timeout(300)
def test_service_that_ends_while_needed_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launcher.supervisor.SERVICE_RETURN_S", 0.3)
    outcome, _, events = supervise(
        tmp_path, [script("buffer", "import time; time.sleep(0.3)"), script("learner", "import time; time.sleep(2)")]
    )
    assert outcome.code == 0 and names(events, "start").count("buffer") >= 2


@pytest.mark.parametrize(
    ("role", "others", "log", "told"),
    [
        ("producer", [], b"producer p: ended after 3.2 s SIGTERM\n", "was ended by SIGTERM: restart in 5 s"),
        ("reward", [], b"reward p: ended after 3.2 s SIGINT\nbye\n", "was ended by SIGINT: restart in 5 s"),
        (
            "producer",
            ["producer"],
            b"p p: ended after 3.2 s SIGTERM\n",
            "was ended by SIGTERM: it is not started again",
        ),
        ("producer", ["reward"], b"producer p: ended after 3.2 s \n", ""),  # the run is done
        ("tracker", [], b"tracker t: ended after 3.2 s SIGTERM\n", ""),
    ],
)
def test_a_worker_that_a_signal_ended_is_named_and_the_last_of_its_role_comes_back(
    tmp_path: Path, role: str, others: list[str], log: bytes, told: str
) -> None:
    said: list[str] = []
    plans = [ProcessPlan(one, f"{one}-{number}", ("x",)) for number, one in enumerate([role, *others, "learner"])]
    supervisor = Supervisor(plans, logs=tmp_path, say=lambda _, line: said.append(line))
    worker, *_, learner = supervisor.children
    worker.started = True
    worker.log.write_bytes(log)
    supervisor._decide(worker, 0)
    assert said == ([f"warning: {role}-0 {told}"] if told else [])
    assert (worker.restart_at is not None) is ("restart in" in told)
    worker.restart_at, learner.started = None, True  # which is over then
    supervisor._decide(worker, 0)
    assert worker.restart_at is None


@pytest.mark.timeout(300)
def test_process_that_does_not_heed_is_killed_after_its_grace(tmp_path: Path) -> None:
    plans = [script("producer", STUBBORN), script("learner", "import time; time.sleep(0.7)")]
    outcome, _, events = supervise(tmp_path, plans, grace=Grace(learner_s=1, failed_s=1, other_s=0.5))
    assert outcome.code == 0 and names(events, "kill") == ["producer"]


@pytest.mark.timeout(300)
def test_children_of_a_role_end_with_it(tmp_path: Path) -> None:
    parent = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        time.sleep(0.3)
    """
    outcome, _, _ = supervise(tmp_path, [script("learner", parent)])
    assert outcome.code == 0
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())))  # SIGKILL takes a moment on a busy machine


ROLE_OF_A_RUN = """
    import faulthandler, signal, sys, time
    from pathlib import Path
    from asyncrl.runtime.run_dir import RunDir
    faulthandler.register(signal.SIGUSR1)
    RunDir(Path(RUN)).record_process(NAME, NAME)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    def waits_here():
        time.sleep(60)
    waits_here()
"""


def hang_watch(tmp_path: Path, limit_s: float, status: dict[str, object]) -> tuple[RunDir, HangWatch]:
    run = RunDir(tmp_path).create()
    set_up = parse(SMALL, overrides=[f"run.hang_timeout_s={limit_s}", f"run.start_timeout_s={limit_s}"])
    return run, HangWatch(run, set_up, ask=lambda _: status)


@pytest.mark.timeout(300)
def test_no_step_within_the_limit_ends_the_run_with_stacks_and_a_diagnosis(tmp_path: Path) -> None:
    run, hang = hang_watch(tmp_path, 3.0, {"waiting_for": "step 4 waits 3.0 s for 2 groups: 2 leased to producer-1"})
    code = ROLE_OF_A_RUN.replace("RUN", repr(str(tmp_path)))
    plans = [script(role, code.replace("NAME", repr(role))) for role in ("producer", "learner")]
    said: list[str] = []
    supervisor = Supervisor(
        plans,
        logs=run.logs,
        say=lambda name, line: said.append(f"{name}: {line}"),
        hang=hang,
        grace=Grace(learner_s=5, failed_s=5, other_s=5),
    )
    outcome = supervisor.run()
    assert outcome.code == 70 and "2 leased to producer-1" in outcome.reason and outcome.wall_s < 20
    assert any(line.startswith("launch: error[hang] no step for 3 s") for line in said)
    for role in ("producer", "learner"):
        assert "in waits_here" in (run.logs / f"{role}.log").read_text()


def test_steps_and_starts_put_the_hang_off_and_code_70_brings_it_forward(tmp_path: Path) -> None:
    now = [0.0]
    run = RunDir(tmp_path).create()
    hang = HangWatch(
        run,
        parse(SMALL, overrides=["run.hang_timeout_s=10", "run.start_timeout_s=9"]),
        clock=lambda: now[0],
        ask=lambda _: {"error": "nothing listens at ipc://b"},
    )

    def at(seconds: float, **how: bool) -> str:
        now[0] = seconds
        return hang.look(**how)

    assert at(9) == ""
    (run.metrics / "learner.jsonl").write_text('{"step":1}\n')
    assert at(9.6) == "" and at(15) == ""
    assert at(17.5, learner_ended=True) == ""  # 7.9 s: that was something else
    hang.learner_started()
    assert at(26, learner_ended=True) == "" and at(27, learner_ended=True).startswith("no step for 10 s")
    assert at(28) == (
        "no step for 10 s (run.hang_timeout_s = 10). the buffer does not answer: nothing listens at ipc://b"
    )


def test_a_learner_that_starts_has_longer_for_its_first_step(tmp_path: Path) -> None:
    """Its imports, its model, the gang; the steps of an earlier start do not count as its own."""
    now = [0.0]
    run = RunDir(tmp_path).create()
    (run.metrics / "learner.jsonl").write_text('{"step":1}\n')
    hang = HangWatch(
        run,
        parse(SMALL, overrides=["run.hang_timeout_s=10", "run.start_timeout_s=60"]),
        clock=lambda: now[0],
        ask=lambda _: {"error": "nothing listens"},
    )

    def at(seconds: float) -> str:
        now[0] = seconds
        return hang.look()

    assert at(59) == "" and at(61).startswith("no step for 61 s (run.start_timeout_s = 60)")
    hang.learner_started()
    assert at(100) == ""
    with (run.metrics / "learner.jsonl").open("a") as log:
        log.write('{"step":2}\n')
    assert at(101) == "" and at(110) == ""
    assert at(112).startswith("no step for 11 s (run.hang_timeout_s = 10)")


LAUNCHER = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_supervise import FOREVER, SAVES, STUBBORN, script
from asyncrl.launcher.supervisor import Grace, Supervisor
plans = [script("buffer", FOREVER), script("producer", {producer}, name="producer-0"), script("learner", {learner})]
outcome = Supervisor(plans, logs=Path({logs!r}), say=lambda name, line: print(name, line, flush=True),
                     grace=Grace(learner_s=20, failed_s=20, other_s=20)).run()
sys.exit(outcome.code)
"""


def start_launcher(
    tmp_path: Path, producer: str = "FOREVER", learner: str = "FOREVER"
) -> tuple[subprocess.Popen[str], list[int]]:
    """A supervisor in a process of its own, once all its children are up; with their pids."""
    code = LAUNCHER.format(
        tests=str(Path(__file__).parent), logs=str(tmp_path / "logs"), producer=producer, learner=learner
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    logs = [tmp_path / "logs" / f"{name}.log" for name in ("buffer", "producer-0", "learner")]
    wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    pids = descendants(launcher.pid)
    assert len(pids) == 3
    return launcher, pids


def wait_for(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_first_signal_stops_gracefully_learner_first(tmp_path: Path, number: signal.Signals, code: int) -> None:
    launcher, pids = start_launcher(tmp_path)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    asked = [line.split()[0] for line in output.splitlines() if line.endswith("asked")]
    assert asked == ["learner", "producer-0", "buffer"]
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def stopping(tmp_path: Path, code: int, reason: str) -> tuple[Supervisor, Child]:
    """A supervisor that stops, and its learner."""
    plan = ProcessPlan("learner", "learner", ("x",))
    supervisor = Supervisor([plan], logs=tmp_path, say=lambda *_: None)
    supervisor._begin_stop(code, reason)
    return supervisor, supervisor.children[0]


@pytest.mark.parametrize(
    ("before", "code", "after"),
    [
        ((0, "stopped by SIGTERM"), 0, 0),
        ((0, "stopped by SIGTERM"), 143, 0),  # while it imported: nothing was lost
        ((0, "stopped by SIGTERM"), 69, 69),
        ((130, "stopped by SIGINT"), 69, 69),
        ((70, "no step for 600 s"), 69, 70),
        ((137, "killed by SIGINT"), 138, 137),
    ],
)
def test_a_learner_that_fails_while_it_is_stopped_gives_the_run_its_code(
    tmp_path: Path, before: tuple[int, str], code: int, after: int
) -> None:
    supervisor, learner = stopping(tmp_path, *before)
    supervisor._judge_stop(learner, code)
    changed = after != before[0]
    why = f"{before[1]}, but learner ended with code {code}: its last checkpoint may be missing"
    assert supervisor._outcome == ((after, why, learner) if changed else (*before, None))


def test_a_buffer_that_ends_before_the_learner_does_not_make_a_stop_a_failure(tmp_path: Path) -> None:
    """After a signal to all processes the learner writes its checkpoint without the buffer and ends with 69."""
    supervisor, learner = stopping(tmp_path, 0, "stopped by SIGTERM")
    buffer = Child(ProcessPlan("buffer", "buffer", ("x",)), tmp_path / "buffer.log")
    supervisor.children.append(buffer)
    buffer.started, buffer.code = True, 0
    supervisor._judge_stop(learner, 69)
    assert supervisor._outcome == (0, "stopped by SIGTERM", None)
    buffer.code = 70
    supervisor._judge_stop(learner, 69)
    assert supervisor._outcome[0] == 69


@pytest.mark.timeout(300)
def test_a_stop_of_a_learner_that_is_killed_after_its_grace_is_a_failure(tmp_path: Path) -> None:
    supervisor = Supervisor(
        [script("learner", STUBBORN), script("producer", FOREVER)],
        logs=tmp_path / "logs",
        say=lambda *_: None,
        tick=lambda: stop_once_up(supervisor, tmp_path / "logs" / "learner.log"),
        grace=Grace(learner_s=0.5, failed_s=5, other_s=5),
    )
    outcome = supervisor.run()
    assert outcome.code == 137 and outcome.failed == "learner" and outcome.last_lines == ("up",)
    assert outcome.reason.startswith("stopped by SIGTERM, but learner was killed, because it did not end in time")


def stop_once_up(supervisor: Supervisor, log: Path) -> None:
    if "up" in log.read_text() and not supervisor._signals.requests:
        supervisor._signals.note(signal.SIGTERM)


@pytest.mark.timeout(300)
def test_second_signal_kills_everything(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, producer="STUBBORN")
    launcher.send_signal(signal.SIGINT)
    wait_for(lambda: "asked" in (tmp_path / "logs" / "learner.log").read_text())
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 137
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.timeout(300)
def test_sigterm_to_all_processes_at_once_leaves_the_learner_its_checkpoint(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, learner="SAVES")
    for pid in (launcher.pid, *pids):
        os.kill(pid, signal.SIGTERM)
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=60)
    assert launcher.returncode == 0 and "learner saved" in output, output
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.timeout(300)
def test_killed_launcher_leaves_nobody(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, producer="STUBBORN")
    launcher.kill()
    launcher.communicate(timeout=60)
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def test_child_of_a_dead_parent_starts_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    command = [sys.executable, "-m", "asyncrl.launcher.parent_guard", "--parent", "999999", "--", "touch", str(flag)]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 1
    assert not flag.exists()


@pytest.mark.timeout(300)
def test_gang_under_torchrun(tmp_path: Path) -> None:
    """A worker's own exit code comes through torchrun; SIGTERM reaches workers; nobody outlives torchrun."""
    pytest.importorskip("torch")
    worker = tmp_path / "gang_worker.py"
    worker.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        def say(text):  # one write per line: both ranks share a pipe
            os.write(1, text.encode() + b"\\n")
        signal.signal(signal.SIGTERM, lambda *_: (say("asked"), sys.exit(0)))
        say("rank " + os.environ["RANK"])
        up = lambda rank: os.path.join(sys.argv[3], "up" + rank)
        open(up(os.environ["RANK"]), "w").close()
        end = time.time() + 60
        while not (os.path.exists(up("0")) and os.path.exists(up("1"))) and time.time() < end:
            time.sleep(0.05)  # one that ends takes the other along, maybe before it spoke
        time.sleep(float(sys.argv[1]))
        sys.exit(int(sys.argv[2]))
    """)
    )
    tail = plan(config(), ("learner",), config_path=Path("c"), python_path=[str(tmp_path), str(ROOT)])[0]
    cut = tail.argv.index("learners.main")
    gang = ProcessPlan(
        "learner", "learner", (*tail.argv[:cut], "gang_worker", "0.5", "75", str(tmp_path)), tail.env, gang=True
    )
    outcome, said, _ = supervise(tmp_path, [gang])
    assert outcome.code == 75
    # Where one rank ends before the other, torchrun asks the other to end, which it says.
    ours = sorted(line for line in said if "torch/distributed" not in line and not line.startswith("learner: asked"))
    assert ours == ["learner: rank 0", "learner: rank 1"]  # torchrun's own page is in the log only
    for rank in "01":
        (tmp_path / f"up{rank}").unlink()

    gang = ProcessPlan(
        "learner", "learner", (*tail.argv[:cut], "gang_worker", "90", "0", str(tmp_path)), tail.env, gang=True
    )
    both = f"all(os.path.exists('{tmp_path}/up' + rank) for rank in '01')"
    crash = script("producer", f"import os, time\nwhile not {both}: time.sleep(0.1)\nraise SystemExit(2)")
    outcome, said, events = supervise(tmp_path, [gang, crash], grace=Grace(learner_s=10, failed_s=10, other_s=5))
    assert said.count("learner: asked") == 2 and names(events, "kill") == []
    assert [event["code"] for event in events if event.get("name") == "learner" and event["event"] == "exit"][-1] == 0
