"""Roles that are forked from a process with their imports: like executed ones in everything but the start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config import parse
from asyncrl.launcher import forked
from asyncrl.launcher.fork_server import module_words
from asyncrl.launcher.forked import ForkedProcess, ForkServer, import_settings
from asyncrl.launcher.process import Child, effective_exit_code
from asyncrl.launcher.supervisor import Grace, Supervisor
from asyncrl.metrics import read_lines
from asyncrl.process_plan.heavy_imports import heavy_imports
from asyncrl.process_plan.plan import TARGETS, ProcessPlan, environment, plan
from asyncrl.runtime.host_facts import descendants, is_alive

ROOT = Path(__file__).resolve().parents[2]
SMALL = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[reward]]\nfunction = "x:y"\n'
PROBE = """
import gc, json, os, random, resource, signal, sys
import numpy
command = open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode().split("\\0")
state = {
    "argv": sys.argv, "name": __name__, "package": __package__, "folder": os.getcwd(), "path": sys.path,
    "environment": dict(os.environ), "leads": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "parent": os.getppid(), "descriptors": sorted(os.listdir("/proc/self/fd")), "umask": os.umask(0o22),
    "signals": {str(number): str(signal.getsignal(number)).partition(" at ")[0] for number in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "nice": os.nice(0),
    "collects": gc.isenabled(), "threads": len(os.listdir("/proc/self/task")),
    "stdin": os.readlink("/proc/self/fd/0"), "stdout": [sys.stdout.encoding, sys.stdout.line_buffering],
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "command": command,
}
numbers = [random.random(), numpy.random.random()]
print(json.dumps({"state": state, "planted": "planted" in sys.modules, "numbers": numbers}))
"""
ENDS = {
    "0": "print('done')",
    "code 3": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('gone wrong')",
    "raises": "raise ValueError('on purpose')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)",
    "at exit": "import atexit, threading as t; atexit.register(print, 'late'); t.Timer(0.1, print, ['timer']).start()",
}
SLEEPER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("asked", flush=True), sys.exit(0)))
print("forked" if "planted" in sys.modules else "executed", flush=True)
time.sleep(60)
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A folder of modules on the path of the roles."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "planted.py").write_text("import numpy")
    (folder / "probe.py").write_text(PROBE)
    (folder / "sleeper.py").write_text(SLEEPER)
    return folder


def role(
    modules: Path, module: str, *, name: str = "producer-0", imports: tuple[str, ...] = ("planted",)
) -> ProcessPlan:
    return ProcessPlan(
        role=name.partition("-")[0],
        name=name,
        argv=(sys.executable, "-m", module, "--name", name),
        env=environment(1, [str(modules), str(ROOT)]) | {"ASYNCRL_MAY_RENAME": "1", "CUDA_VISIBLE_DEVICES": "1"},
        imports=imports,
        restarts=3,
    )


def started(server: ForkServer, timeout_s: float = 60.0) -> ForkServer:
    """The server, once it is ready or has ended."""
    server.start()
    deadline = time.monotonic() + timeout_s
    while server.is_importing():
        assert time.monotonic() < deadline, "the server is late"
        time.sleep(0.01)
    return server


def run(plan: ProcessPlan, log: Path, forks: ForkServer | None) -> tuple[int, str, bool]:
    """Exit code and output of a process, and whether it was forked."""
    child = Child(plan, log)
    child.start(forks)
    assert child.process is not None
    return child.process.wait(timeout=60), log.read_text(), isinstance(child.process, ForkedProcess)


# ---------------------------------------------------------------- rules


def test_only_roles_with_torch_have_heavy_imports() -> None:
    plans = plan(parse(SMALL), TARGETS["all"], config_path=Path("c"))
    assert {one.role for one in plans if one.imports} == {"producer", "learner"}
    for change in ('[producers]\npython = "/other/python"\n', '[producers]\nengine = "vllm"\n'):
        plans = plan(parse(SMALL + change), TARGETS["all"], config_path=Path("c"))
        assert {one.role for one in plans if one.imports} == {"learner"}, change
    for change in ('[learner]\nbackend = "megatron"\n', "[cluster]\nlearner_hosts = 2\n"):
        assert heavy_imports("learner", parse(SMALL + change)) == ()


def test_heavy_imports_name_the_module_of_the_model(tmp_path: Path) -> None:
    config = parse(SMALL.replace('"m"', json.dumps(str(tmp_path))))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert heavy_imports("producer", config)[-1] == "transformers.models.qwen3.modeling_qwen3"
    (tmp_path / "config.json").write_text('{"model_type": "../x"}')
    assert not any("transformers.models." in name for name in heavy_imports("producer", config))


def test_commands_of_this_interpreter() -> None:
    guard = [sys.executable, "-m", "asyncrl.launcher.parent_guard", "--parent", "0", "--"]
    assert module_words([sys.executable, "-m", "m", "--", "x"]) == ["m", "--", "x"]
    assert module_words([*guard, sys.executable, "-m", "m", "x"]) == ["m", "x"]
    for other in (
        ["numactl", sys.executable, "-m", "m"],
        ["/other/python", "-m", "m"],
        [sys.executable, "m.py"],
        guard,
    ):
        assert module_words(other) == [], other


def test_variables_that_an_import_reads_must_agree() -> None:
    late = {"CUDA_VISIBLE_DEVICES": "3", "ASYNCRL_FAILPOINT": "x", "RANK": "1", "MY_KEY": "secret"}
    early = {"OMP_NUM_THREADS": "2", "PYTHONPATH": "/a", "HF_HOME": "/b", "LD_PRELOAD": "/c"}
    assert import_settings({**late, **early}) == early


# ---------------------------------------------------------------- processes


def test_a_forked_role_is_like_an_executed_one(tmp_path: Path, modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "of the launcher")  # reaches a role that inherits everything, and not the server
    server = started(ForkServer([role(modules, "probe")], tmp_path / "server.log"))
    assert server._process is not None
    assert b"MY_KEY" not in Path(f"/proc/{server._process.pid}/environ").read_bytes()
    try:
        outcomes = [
            run(role(modules, "probe"), tmp_path / f"{n}.log", forks) for n, forks in enumerate([None, server, server])
        ]
    finally:
        server.close()
    assert [code for code, _, _ in outcomes] == [0, 0, 0], outcomes
    assert [is_forked for _, _, is_forked in outcomes] == [False, True, True]
    executed, first, second = (json.loads(text) for _, text, _ in outcomes)
    assert (executed["planted"], first["planted"]) == (False, True)
    assert executed["state"]["parent"] == os.getpid() and executed["state"]["environment"]["MY_KEY"]
    assert first["state"] == second["state"] == executed["state"]
    numbers = [one["numbers"] for one in (executed, first, second)]
    assert len({one[0] for one in numbers}) == len({one[1] for one in numbers}) == 3, numbers


def test_codes_and_last_words(tmp_path: Path, modules: Path) -> None:
    server = started(ForkServer([role(modules, "probe")], tmp_path / "server.log"))
    try:
        for number, (end, code) in enumerate(ENDS.items()):
            (modules / f"end{number}.py").write_text(code)
            one = role(modules, f"end{number}")
            executed, *_ = wanted = run(one, tmp_path / f"executed-{number}.log", None)
            got = run(one, tmp_path / f"forked-{number}.log", server)
            assert got[0] == executed and got[2], end
            assert got[1].splitlines()[-1:] == wanted[1].splitlines()[-1:], end
    finally:
        server.close()


@pytest.mark.parametrize("harm", ["killed", "stopped"])
def test_a_lost_server_harms_no_role(tmp_path: Path, modules: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = started(ForkServer([role(modules, "sleeper")], tmp_path / "server.log"))
    first = Child(role(modules, "sleeper"), tmp_path / "first.log")
    second = Child(role(modules, "sleeper", name="producer-1"), tmp_path / "second.log")
    try:
        first.start(server)
        assert server._process is not None
        monkeypatch.setattr(forked, "ANSWER_TIMEOUT_S", 1.0)
        os.kill(server._process.pid, signal.SIGKILL if harm == "killed" else signal.SIGSTOP)
        second.start(server)
        wait_for_text(tmp_path / "first.log", "forked")
        wait_for_text(tmp_path / "second.log", "executed")
        assert first.process is not None and first.process.poll() is None
        first.terminate()
        assert first.process.wait(timeout=60) == 0 and "asked" in (tmp_path / "first.log").read_text()
    finally:
        for child in (first, second):
            child.kill()
            if child.process is not None:
                child.process.wait(timeout=60)
        server.close()
    assert server._process is None


def wait_for_text(path: Path, text: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in {path}"
        time.sleep(0.02)


UNFIT = {
    "a thread": ("import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()", "2 threads"),
    "an open file": ("held = open(__file__)", "the imports opened"),
    "a backend": ("raise AssertionError('imported')", "a backend of torch"),
}  # fmt: skip


@pytest.mark.parametrize("why", UNFIT)
def test_unfit_imports_end_the_server(tmp_path: Path, modules: Path, why: str) -> None:
    code, reason = UNFIT[why]
    (modules / "planted.py").write_text(code)
    if why == "a backend":
        (modules / "torch_npu.py").write_text("")
    server = started(ForkServer([role(modules, "probe")], tmp_path / "server.log"))
    assert run(role(modules, "probe"), tmp_path / "role.log", server)[::2] == (0, False)
    assert reason in (tmp_path / "server.log").read_text()


def test_what_differs_at_import_is_executed(tmp_path: Path, modules: Path) -> None:
    one = role(modules, "probe")
    server = started(ForkServer([one], tmp_path / "server.log"))
    others = {
        "threads": replace(one, env={**one.env, "OMP_NUM_THREADS": "2"}),
        "light": replace(one, imports=()),
        "wrapped": replace(one, argv=("env", *one.argv)),
    }
    try:
        for name, other in others.items():
            assert run(other, tmp_path / f"{name}.log", server)[::2] == (0, False), name
        assert run(one, tmp_path / "same.log", server)[::2] == (0, True)
    finally:
        server.close()
    (modules / "sitecustomize.py").write_text("")
    for plans in ([one], [others["light"]], []):
        custom = started(ForkServer(plans, tmp_path / "none.log"))
        assert custom._process is None


# ---------------------------------------------------------------- under a supervisor

LAUNCHER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_forked import role
from asyncrl.launcher.forked import ForkServer
from asyncrl.launcher.supervisor import Grace, Supervisor
modules, logs = Path({modules!r}), Path({logs!r})
plans = [role(modules, "sleeper", name="producer-0"), role(modules, "sleeper", name="learner")]
Supervisor(plans, logs=logs, say=print, grace=Grace(20, 20, 20), forks=ForkServer(plans, logs / "server.log")).run()
"""


def test_kill_9_of_the_launcher_ends_forked_roles_and_their_server(tmp_path: Path, modules: Path) -> None:
    logs = tmp_path / "logs"
    code = LAUNCHER.format(tests=str(Path(__file__).parent), modules=str(modules), logs=str(logs))
    launcher = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    for name in ("producer-0", "learner"):
        wait_for_text(logs / f"{name}.log", "forked")
    below = descendants(launcher.pid)
    assert len(below) == 3
    launcher.kill()
    launcher.wait(timeout=60)
    deadline = time.monotonic() + 60
    while left := [pid for pid in below if is_alive(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_a_killed_role_is_forked_again(tmp_path: Path, modules: Path) -> None:
    (modules / "worker.py").write_text(SLEEPER.replace("time.sleep(60)", "time.sleep(0.5)"))
    plans = [role(modules, "sleeper", name="producer-0"), role(modules, "worker", name="learner")]
    logs = tmp_path / "logs"
    killed: list[int] = []
    before = set(descendants(os.getpid()))

    def tick() -> None:
        found = [
            event["pid"]
            for event in read_lines(logs / "launch.jsonl")
            if event.get("name") == "producer-0" and "pid" in event
        ]
        if found and not killed and (logs / "producer-0.log").read_text():
            killed.append(found[0])
            os.kill(found[0], signal.SIGKILL)
        if len(found) == 2 and (logs / "producer-0.log").read_text().count("forked") == 2:
            (tmp_path / "done").touch()

    (modules / "worker.py").write_text(
        f"import os, sys, time\nwhile not os.path.exists({str(tmp_path / 'done')!r}): time.sleep(0.05)\n"
    )
    outcome = Supervisor(
        plans, logs=logs, say=print, tick=tick, grace=Grace(20, 20, 20), forks=ForkServer(plans, logs / "server.log")
    ).run()
    assert (outcome.code, outcome.restarts) == (0, {"producer-0": 1})
    assert set(descendants(os.getpid())) <= before


RANK = """
import os, sys
how = "forked" if "learners.loop" in sys.modules else "executed"
os.write(1, f"rank {os.environ['RANK']} {sys.argv[1:]} {how}\\n".encode())  # both ranks write to one file
sys.exit(75 if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.long
def test_ranks_of_a_gang_are_forked_and_keep_their_threads(tmp_path: Path, modules: Path) -> None:
    (modules / "rank.py").write_text(RANK)
    (modules / "counted.py").write_text("import torch, os; print(torch.get_num_threads(), torch.initial_seed())")
    heavy = ("learners.loop", "learners.gang.local_gang")
    guard = ("asyncrl.launcher.parent_guard", "--parent", "0", "--", sys.executable, "-m", "rank", "a")
    words = ("learners.gang.local_gang", "--max-restarts", "0", "--nproc-per-node", "2", "--no-python", sys.executable)
    gang = replace(
        role(modules, "rank", name="learner", imports=heavy),
        argv=(sys.executable, "-m", *words, "-m", *guard),
        gang=True,
    )
    counted = replace(role(modules, "counted"), imports=heavy)
    server = started(ForkServer([gang], tmp_path / "server.log"), 300)
    try:
        code, text, was_forked = run(gang, tmp_path / "gang.log", server)
        assert was_forked and effective_exit_code(code, text.encode(), gang=True) == 75, text
        assert {line for line in text.splitlines() if line.startswith("rank")} == {
            f"rank {number} ['a'] forked" for number in (0, 1)
        }
        logs = {tmp_path / f"counted-{number}.log": forks for number, forks in enumerate((None, server, server))}
        outcomes = [run(counted, log, forks) for log, forks in logs.items()]
        assert [was_forked for *_, was_forked in outcomes] == [False, True, True]
        threads, seeds = zip(*(text.split() for _, text, _ in outcomes), strict=True)
        assert set(threads) == {"1"} and len(set(seeds)) == 3, outcomes
    finally:
        server.close()
