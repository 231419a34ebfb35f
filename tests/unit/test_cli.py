"""The command line: fast, light, mistakes are text; and `launch` with stand-ins for the roles."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest
from synthetic_run import write_run

from asyncrl.cli import main
from asyncrl.config import Config, load, parse
from asyncrl.demo.demo import demo, promises, quickstart, task_settings
from asyncrl.errors import ConfigError
from asyncrl.launcher.launch import Launched, LaunchOptions, absolute, changes, settle_config
from asyncrl.launcher.progress import Progress, is_loud
from asyncrl.metrics import JsonTail
from asyncrl.monitor.status import render, run_status, stop_command
from asyncrl.process_plan.plan import Outcome
from asyncrl.report.data import load_run
from asyncrl.runtime.liveness import Sign
from asyncrl.runtime.run_dir import RunDir, launchers

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "redis", "transformers", "vllm", "sglang", "pyarrow", "rich"}


def asyncrl(*words: str, cwd: Path = ROOT, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=env,
        check=False,
    )


def small(tmp_path: Path, **settings: str) -> Config:
    values = {"model.path": "m", "data.path": "d.jsonl", "reward": '[{function = "x:y"}]'}
    values["run.dir"] = str(tmp_path / "run")
    return parse("", overrides=[f"{key}={value}" for key, value in {**values, **settings}.items()])


# ---------------------------------------------------------------- fast and light


def test_help_answers_in_half_a_second() -> None:
    """Of a core: a busy machine takes longer (benchmarks/results/cli.json has the time on the wall)."""
    used = []
    for _ in range(2):
        before = os.times()
        done = asyncrl("--help")
        after = os.times()
        used.append(after.children_user + after.children_system - before.children_user - before.children_system)
        assert done.returncode == 0 and "launch" in done.stdout and "demo" in done.stdout
    assert 0 < min(used) < 0.5


def test_front_door_imports_nothing_heavy() -> None:
    names = ["asyncrl." + path.stem for path in sorted((ROOT / "asyncrl").glob("*.py")) if path.stem != "__main__"]
    names += ["asyncrl.report." + path.stem for path in sorted((ROOT / "asyncrl" / "report").glob("*.py"))]
    names += ["buffers.client.producer", "buffers.client.learner"]
    code = f"import {', '.join(names)}\nimport sys\nprint(' '.join(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded & HEAVY == set()
    roles = {"producers", "learners", "buffers.main", "weightsync.main"}
    assert roles & set(done.stdout.split()) == set()


def test_version_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("asyncrl 0.")
    assert main(["schema"]) == 0
    assert "BufferConfig" in json.dumps(json.loads(capsys.readouterr().out))


# ---------------------------------------------------------------- mistakes are text


def test_mistakes_of_a_configuration_come_at_once_without_traceback(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "m"\n[buffer]\nmax_stalenes = 3\n[learner]\nsteps = "ten"\n')
    for words in (("check", str(path)), ("launch", "all", str(path))):
        done = asyncrl(*words)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert "c.toml:4" in done.stderr and "max_staleness" in done.stderr and "learner.steps" in done.stderr


def test_launch_starts_nothing_when_the_check_fails(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[run]\ndir = "run"\n[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[reward]]\nfunction = "x:y"\n')
    done = asyncrl("launch", "all", str(path), cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    for code in ("config.model", "config.data", "config.reward"):
        assert f"error[{code}]" in done.stderr


@pytest.mark.parametrize("command", ["status", "audit", "report", "stop"])
def test_not_a_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert "error[run.missing]" in capsys.readouterr().err


def test_wrong_words_are_usage_errors() -> None:
    for words in (["lunch"], ["launch", "everything", "c.toml"], []):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert main(["status"]) == 2


# ---------------------------------------------------------------- looking at a run


def test_audit_report_and_status_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=5)
    assert main(["audit", str(run.root)]) == 0
    assert "audit: OK" in capsys.readouterr().out
    assert main(["audit", str(run.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trained"] == 10
    assert main(["report", str(run.root)]) == 0 and run.report.exists()
    assert main(["stop", str(run.root)]) == 0
    run.history.write_bytes(run.history.read_bytes().replace(b'"bound":2', b'"bound":0'))
    assert main(["audit", str(run.root)]) == 1
    capsys.readouterr()


def test_status_text() -> None:
    state = {
        "run": "/r",
        "steps": 9,
        "launchers": [{"target": "all", "pid": 5}],
        "last_step": {"step": 4, "reward_mean": 0.5},
        "result": {},
        "queue": {"leased": 3.0, "ready": 2},
        "workers": {"producer-0": {"waiting_for": "a lease"}},
        "buffer": {"error": "no answer"},
        "weightsync": {"version": 4},
    }
    state["weightsync"] = {
        "version": 4,
        "committed": 3,
        "members": {"producer-0": {"state": "stale", "version": 3, "why": "late"}},
    }
    text = render(state)
    assert "/r (launched here: all pid 5)" in text
    assert "step        4 of 9  reward 0.500" in text and "queue       leased 3 · ready 2" in text
    assert "producer-0  waits: a lease" in text and "buffer      silent: no answer" in text
    assert "version 4, held by generators 3; producer-0 stale version 3 (late)" in text
    state["buffer"] = {
        "store": "sqlite",
        "version": 4,
        "total_groups": 18,
        "ledger": {"leased": 3, "trained": 8},
        "waiting_for": "step 5 waits 2 s",
        "fault": {"code": "hang", "message": "x"},
    }
    text = render({**state, "last_step": {}})
    assert "18 groups in all: leased 3 · trained 8" in text and "step        none of 9 yet" in text
    assert "step 5 waits 2 s" in text and "ends the run: hang: x" in text


# ---------------------------------------------------------------- configuration of a launch


def test_config_is_settled_and_changes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = absolute(small(tmp_path))
    run = RunDir(first.run_dir).create()
    assert settle_config(run, first, LaunchOptions(), tag="") == run.config
    assert load(run.config) == first
    settle_config(run, first, LaunchOptions(), tag="")
    assert capsys.readouterr().out == ""
    second = absolute(small(tmp_path, **{"buffer.max_staleness": "2"}))
    assert changes(run.config, second) == ["buffer.max_staleness: 4 -> 2"]
    joined = settle_config(run, second, LaunchOptions(target="producers"), tag="ab")
    assert joined.parent == run.logs and load(joined) == second and load(run.config) == first
    settle_config(run, second, LaunchOptions(), tag="")
    assert "buffer.max_staleness: 4 -> 2" in capsys.readouterr().out and load(run.config) == second


def test_a_run_that_has_begun_says_where_it_goes_on_and_keeps_the_size_of_its_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run").create()
    text = '[model]\npath = "m"\n[data]\npath = "p"\n[[reward]]\nfunction = "a:b"\n[learner]\nsteps = 40\n'
    settle_config(run, parse(text), LaunchOptions(), tag="")
    assert capsys.readouterr().out == ""
    (run.checkpoints / "step_000012").mkdir(parents=True)
    settle_config(run, parse(text), LaunchOptions(), tag="")
    assert capsys.readouterr().out == "goes on from step 12 of 40; another run.dir starts anew\n"
    settle_config(run, parse(text.replace("40", "12")), LaunchOptions(), tag="")
    assert "note: this run is over, step 12 of 12: raise learner.steps" in capsys.readouterr().out
    settle_config(run, parse(text.replace("40", "12"), overrides=["data.epochs=1"]), LaunchOptions(), tag="")
    assert "step 12 of 12: raise data.epochs to go on" in capsys.readouterr().out
    other = parse(text, overrides=["sampling.group_size=2"])
    run.history.write_text("{}\n")
    with pytest.raises(ConfigError, match="this run has groups of 8 samples, and 2 are asked for"):
        settle_config(run, other, LaunchOptions(), tag="")
    run.history.unlink()
    settle_config(run, other, LaunchOptions(), tag="")  # nothing has begun


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("weightsync.bucket_bytes=1048576", "weightsync.bucket_bytes"),
        ("weightsync.transport=direct weightsync.in_place=true", "weightsync.transport"),
        ("weightsync.dtype=float32", "weightsync.dtype"),
        ("model.dtype=float32", "model.dtype"),
    ],
)
def test_a_checkpoint_keeps_the_layout_of_its_version(tmp_path: Path, setting: str, key: str) -> None:
    """The buffer knows its digest, and would refuse every sample of the same weights in another layout."""
    run = RunDir(tmp_path / "run").create()
    text = '[model]\npath = "m"\n[data]\npath = "p"\n[[reward]]\nfunction = "a:b"\n'
    settle_config(run, parse(text), LaunchOptions(), tag="")
    other = parse(text, overrides=setting.split())
    settle_config(run, other, LaunchOptions(), tag="")  # there is no checkpoint yet
    settle_config(run, parse(text), LaunchOptions(), tag="")
    (run.checkpoints / "step_000012").mkdir(parents=True)
    settle_config(run, parse(text, overrides=["weightsync.transport=stream"]), LaunchOptions(), tag="")
    with pytest.raises(ConfigError, match="no sample of it would be accepted") as refused:
        settle_config(run, other, LaunchOptions(), tag="")
    assert refused.value.where == key


def test_demo_settings_give_a_whole_configuration() -> None:
    for task in ("running_sum", "add", "long_sum", "shapes"):
        made = load(quickstart(), task_settings(task))
        assert made.run.dir == f"runs/demo-{task}" and made.reward[0].function.endswith(f"{task}_reward")
    with pytest.raises(ConfigError):
        task_settings("chess")


def test_a_stopped_demo_breaks_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", steps=3)
    stopped = Launched(load(run.config), run, Outcome(code=0, reason="SIGINT", wall_s=4.0, stopped=True))
    monkeypatch.setattr("asyncrl.demo.demo.launch_config", lambda *_: stopped)
    files = {"data.path": "rows.jsonl", "evaluation.path": "held_out.jsonl", "model.path": "model"}
    (tmp_path / "rows.jsonl").write_text("{}\n")
    overrides = tuple(f"{key}={tmp_path / name}" for key, name in (files | {"run.dir": "new"}).items())
    assert demo("add", overrides, resume=True, verbose=False, plain=True) == 0
    said = capsys.readouterr().out
    assert "--resume" in said and "BROKEN" not in said


def test_promises_are_kept_and_broken(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30)
    launched = Launched(load(run.config), run, Outcome(code=0, reason="done", wall_s=40.0))
    listed = promises(launched, load_run(run))
    assert len(listed) >= 8 and all(promise.kept for promise in listed), [p.text for p in listed if not p.kept]
    synchronous = msgspec.structs.replace(
        launched.config, buffer=msgspec.structs.replace(launched.config.buffer, max_staleness=0)
    )
    broken = [p.text for p in promises(Launched(synchronous, run, launched.outcome), load_run(run)) if not p.kept]
    assert broken == [f"synchronous: the largest lag is {load_run(run).audit.lag_max} (0)"]
    metrics = (run.metrics / "learner.jsonl").read_bytes()
    lines = [json.loads(line) for line in metrics.splitlines()]
    flat = [{**line, "reward_mean": 0.4 + 0.2 * (line["step"] > 25), "t": line["t"] + 200} for line in lines]
    (run.metrics / "learner.jsonl").write_text("".join(json.dumps(line) + "\n" for line in flat))
    broken = [p.text for p in promises(launched, load_run(run)) if not p.kept]  # it rose, but not enough, and too late
    assert len(broken) == 2 and "rose by 0.200" in broken[0] and "at least 0.25" in broken[0] and "180 s" in broken[1]
    assert sum(not p.kept for p in promises(launched, load_run(run), task="add")) == 1  # 0.2 is enough for add
    (run.metrics / "learner.jsonl").write_bytes(metrics)
    rounds = (run.metrics / "weightsync.jsonl").read_text()
    (run.metrics / "weightsync.jsonl").write_text(rounds.replace('"producer-1":"0', '"producer-9":"0'))
    broken = [p.text for p in promises(launched, load_run(run)) if not p.kept]
    assert len(broken) == 1 and "producer-1 0" in broken[0]
    (run.metrics / "weightsync.jsonl").write_text(rounds)
    run.history.write_bytes(b"".join(x for x in run.history.read_bytes().splitlines(True) if b'"drop"' not in x))
    broken = [p.text for p in promises(launched, load_run(run)) if not p.kept]
    assert len(broken) == 2 and "ledger" in broken[0] and "lost 1" in broken[1]


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("add", ["add-answers.jsonl", "add-heldout.jsonl", "add-labels.jsonl", "add-pairs.jsonl", "add.jsonl"]),
        ("shapes", ["shapes-heldout.parquet", "shapes.parquet"]),
    ],
)
def test_prepare_only_makes_what_is_missing_and_starts_nothing(
    task: str, files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Path] = []

    def make_model(_task: str, folder: Path) -> None:
        made.append(folder)
        folder.mkdir(parents=True)
        (folder / "warm_start.json").write_text("{}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asyncrl.demo.demo._make_model", make_model)
    for _ in range(2):
        assert main(["demo", "--task", task, "--prepare-only"]) == 0
    assert made == [Path(f"runs/models/{task}")] and not (tmp_path / "runs" / f"demo-{task}").exists()
    assert sorted(path.name for path in (tmp_path / "runs" / "data").iterdir()) == files
    said = capsys.readouterr().out
    assert said.count("held out") == 1 and said.count("ready") == 2


def test_a_demo_of_images_without_pillow_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["demo", "--task", "shapes", "--prepare-only"]) == 2
    said = capsys.readouterr().err
    assert "error[config.extra]" in said and 'pip install "asyncrl[hf]"' in said


# ---------------------------------------------------------------- progress


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"old":1}\n')
    tail = JsonTail(path)
    with path.open("a") as file:
        file.write('{"a":1}\n{"b"')
        file.flush()
        assert tail.poll() == [{"a": 1}]
        file.write(":2}\nnot json\n")
        file.flush()
    assert tail.poll() == [{"b": 2}] and tail.poll() == []


def test_plain_progress_prints_steps_and_loud_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "run").create()
    progress = Progress(run, steps=9, plain=True, out=sys.stdout)
    progress.say("producer-0", "a quiet line")
    progress.say("producer-0", "error[net.unreachable] no answer")
    progress.say("learner", "a line of the learner")
    progress.say("learner", '  File "/x/sockets.py", line 195 in _await')  # stacks are for the log
    line = {
        "step": 3,
        "reward_mean": 0.5,
        "lag_mean": 1.0,
        "lag_max": 2,
        "bound_max": 2,
        "tokens_per_s": 800,
        "step_s": 1,
    }
    (run.metrics / "learner.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    progress.tick()
    progress.close()
    quiet = Progress(run, steps=9, plain=True, table=False, out=sys.stdout)
    quiet.tick()
    out = capsys.readouterr().out
    assert (
        "quiet" not in out
        and "sockets.py" not in out
        and "[producer-0] error[net.unreachable]" in out
        and "[learner] a line" in out
    )
    assert out.count("step 3/9") == 1 and "step 3/9  reward 0.500  lag 1.00 (max 2 of 2)  800 tok/s" in out
    assert is_loud("ValueError: x") and is_loud("WARNING: y") and not is_loud("loss 0.1")


# ---------------------------------------------------------------- a whole launch with stand-ins


ROLE = """
import pathlib, signal, socket, sys, time
from asyncrl.config import load
from asyncrl.runtime.run_dir import RunDir, endpoint
config = load(pathlib.Path(sys.argv[sys.argv.index("--config") + 1]))
run = RunDir(config.run_dir)
run.record_process({role!r}, sys.argv[sys.argv.index("--name") + 1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if {role!r} in ("buffer", "weightsync"):
    listener = socket.socket(socket.AF_UNIX)
    pathlib.Path(endpoint(config, {role!r})[6:]).unlink(missing_ok=True)
    listener.bind(endpoint(config, {role!r})[6:])
    listener.listen()
print("up", flush=True)
time.sleep({seconds})
"""


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """A folder whose modules take the place of the roles in child processes."""
    modules = {
        "buffers.main": ("buffer", 60),
        "weightsync.main": ("weightsync", 60),
        "producers.main": ("producer", 60),
        "producers.rewards.main": ("reward", 60),
        "learners.main": ("learner", 1.5),
    }
    for dotted, (role, seconds) in modules.items():
        path = tmp_path / Path(*dotted.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ROLE.format(role=role, seconds=seconds))
    for folder in ("buffers", "weightsync", "producers", "producers/rewards", "learners"):
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    functions = 'import sys\nif __name__ == "__main__":\n    sys.exit(0)\n'
    (tmp_path / "producers" / "rewards" / "functions.py").write_text(functions)
    (tmp_path / "c.toml").write_text(
        textwrap.dedent("""
        [run]
        dir = "run"
        [model]
        path = "model"
        [data]
        path = "rows.jsonl"
        [[reward]]
        function = "rewards:f"
    """)
    )
    return tmp_path


def path_of_slot(run: RunDir, pid: int) -> Path:
    """A staged version as a learner with this pid would have left it."""
    stem = hashlib.blake2b(os.fsencode((run.root / "weights").resolve()), digest_size=6).hexdigest()
    path = Path("/dev/shm") / f"asyncrl-{os.getuid()}-{stem}-{pid}-1"
    path.write_bytes(b"weights")
    return path


@pytest.mark.timeout(300)
def test_launch_all_runs_ends_and_reports(stand_ins: Path) -> None:
    learner = stand_ins / "learners" / "main.py"  # it writes a result, as a complete run's learner does
    learner.write_text(learner.read_text() + 'run.result.write_text(\'{"reward_last5": 0.9, "steps": 0}\')\n')
    run = RunDir(stand_ins / "run").create()
    run.result.write_text('{"started_with": "this"}')
    (run.root / "weights").mkdir()
    staged, alive = (path_of_slot(run, pid) for pid in (4_194_303, os.getpid()))
    done = asyncrl("launch", "all", "c.toml", "--set", "producers.count=2", cwd=stand_ins)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "= 6 processes" in done.stdout and "ended     done" in done.stdout
    result = json.loads(run.result.read_text())
    assert run.report.exists() and result["code"] == 0 and result["reward_last5"] == 0.9 and result["steps"] == 0
    assert "started_with" not in result  # nothing is left of an earlier end
    assert not staged.exists() and alive.exists()
    alive.unlink()
    names = [json.loads(line)["name"] for line in run.processes.read_text().splitlines()]
    assert sorted(names) == ["buffer", "learner", "producer-0", "producer-1", "reward-0", "weightsync"]
    assert load(run.config).run.dir == str(run.root)  # resolved: tools work from any folder


@pytest.mark.timeout(300)
def test_second_launcher_is_refused_and_stop_ends_the_first(stand_ins: Path) -> None:
    path = stand_ins / "learners" / "main.py"
    path.write_text(path.read_text().replace("time.sleep(1.5)", "time.sleep(60)"))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        [sys.executable, "-m", "asyncrl", "launch", "all", "c.toml"],
        cwd=stand_ins,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    log = stand_ins / "run" / "logs" / "learner.log"
    deadline = time.monotonic() + 90
    while not (log.exists() and "up" in log.read_text()):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    second = asyncrl("launch", "all", "c.toml", cwd=stand_ins)
    assert second.returncode == 75 and "error[service.duplicate]" in second.stderr
    run = RunDir(stand_ins / "run")
    (run.root / "launcher-all-1.lock").write_text("pid 1 on nowhere")  # of a launcher that was killed: nobody holds it
    assert launchers(run) == [("all", first.pid)] and not (run.root / "launcher-all-1.lock").exists()
    assert stop_command(run.root, timeout_s=30) == 0
    output, _ = first.communicate(timeout=30)
    assert first.returncode == 0 and "stopped by SIGTERM" in output
    assert json.loads((stand_ins / "run" / "result.json").read_text())["done"] is False


@pytest.mark.timeout(300)
def test_stop_says_that_the_learner_failed(stand_ins: Path) -> None:
    """Its checkpoint could not be written. The command waits for the launcher's result."""
    path = stand_ins / "learners" / "main.py"
    failing = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(74))\ntime.sleep(60)"
    path.write_text(path.read_text().replace("time.sleep(1.5)", failing))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "asyncrl", "launch", "all", "c.toml"]
    with subprocess.Popen(words, cwd=stand_ins, env=env, stdout=subprocess.PIPE, text=True) as first:
        log = stand_ins / "run" / "logs" / "learner.log"
        deadline = time.monotonic() + 90
        while not (log.exists() and "up" in log.read_text()):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        stop = asyncrl("stop", "run", cwd=stand_ins)
        first.communicate(timeout=30)
    assert first.returncode == stop.returncode != 0, stop.stdout + stop.stderr
    assert "stopped, with exit code" in stop.stdout and "but learner ended with code 74" in stop.stdout


@pytest.mark.timeout(300)
def test_a_closed_terminal_stops_the_run_in_order(stand_ins: Path) -> None:
    """The hang-up comes as a signal, and as an error of every line that is printed after it."""
    path = stand_ins / "learners" / "main.py"
    path.write_text(path.read_text().replace("time.sleep(1.5)", "time.sleep(60)"))
    master, terminal = os.openpty()
    takes_it = (
        "import fcntl, os, signal, sys, termios\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", takes_it, "-m", "asyncrl", "launch", "all", "c.toml"],
        cwd=stand_ins,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    log = stand_ins / "run" / "logs" / "learner.log"
    deadline = time.monotonic() + 90
    while not (log.exists() and "up" in log.read_text()):
        assert time.monotonic() < deadline and launcher.poll() is None
        if select.select([master], [], [], 0.05)[0]:
            os.read(master, 1 << 16)
    os.close(master)
    assert launcher.wait(timeout=60) == 0
    result = json.loads((stand_ins / "run" / "result.json").read_text())
    assert result["code"] == 0 and result["reason"] == "stopped by SIGHUP"
    assert (stand_ins / "run" / "report.html").exists() and launchers(RunDir(stand_ins / "run")) == []


@pytest.mark.timeout(300)
def test_failed_role_is_named_with_its_last_lines(stand_ins: Path) -> None:
    (stand_ins / "producers" / "main.py").write_text("raise SystemExit('error[config.model] this model is odd')\n")
    (stand_ins / "learners" / "main.py").write_text(ROLE.format(role="learner", seconds=240))  # the producer ends it
    done = asyncrl("launch", "all", "c.toml", "--set", "producers.restarts=1", cwd=stand_ins)
    assert done.returncode == 1
    assert "error[role.failed] producer-0" in done.stderr and "this model is odd" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout.count("[producer-0] error[config.model]") == 2


@pytest.mark.timeout(300)
def test_producers_join_under_their_own_names(stand_ins: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "asyncrl", "launch", "producers", "c.toml"]
    joined = subprocess.Popen([*words, "--connect", "tcp://127.0.0.1:9"], cwd=stand_ins, env=env)
    processes = stand_ins / "run" / "processes.jsonl"
    deadline = time.monotonic() + 90
    while not processes.exists():
        assert time.monotonic() < deadline and joined.poll() is None
        time.sleep(0.05)
    joined.send_signal(signal.SIGTERM)
    assert joined.wait(timeout=30) == 0
    name = json.loads(processes.read_text().splitlines()[0])["name"]
    assert name.startswith("producer-") and name.endswith("-0") and name != "producer-0"
    assert not (stand_ins / "run" / "config.toml").exists()


def test_status_says_who_waits_since_when_and_who_is_silent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    now = time.time()
    for name, age, waits, since in (
        ("producer-0", 0.0, "a lease", 12.0),
        ("producer-1", 0.0, "", 0.0),
        ("reward-0", 30.0, "samples", 40.0),
    ):
        sign = Sign(run.alive, role=name.split("-")[0], name=name, clock=lambda age=age: now - age)
        sign._since = now - since if since else 0.0
        sign.beat(waits)
    text = render(run_status(run) | {"result": {}})
    who = f"(pid {os.getpid()} on {socket.gethostname()})"
    assert f"producer-0  waits for 12 s: a lease {who}" in text and f"producer-1  works {who}" in text
    assert "reward-0    silent for 30 s; last heard of: waits for 40 s: samples" in text


def test_status_of_a_stopped_and_of_an_ended_process(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=3)
    child = subprocess.Popen(["sleep", "60"])
    sign = Sign(run.alive, role="producer", name="producer-0")
    sign._who = ("producer", "producer-0", child.pid, socket.gethostname())
    sign.beat()
    child.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 90
    while run_status(run)["alive"]["producer-0"]["state"] != "T" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "producer-0  is stopped (state T), silent for" in render(run_status(run) | {"result": {}})
    child.kill()
    child.wait(timeout=60)
    assert f"producer-0  has ended (pid {child.pid} on" in render(run_status(run) | {"result": {}})
