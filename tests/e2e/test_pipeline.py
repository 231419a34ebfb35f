"""The whole pipeline as real processes, by the command line a user types."""

import html
import json
import os
import re
import shutil
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import warm
from status_form import strangers

from asyncrl.monitor.status_schema import Status

pytestmark = pytest.mark.slow


def need_redis() -> None:
    if shutil.which("redis-server") or shutil.which("valkey-server"):
        return
    if os.environ.get("CI"):
        pytest.fail("no redis-server on the PATH: `make redis` installs one")
    pytest.skip("no redis-server on the PATH")


def assert_complete(run, steps: int = 5, groups: int = 4) -> dict:  # type: ignore[no-untyped-def, type-arg]
    audit = run.audit()
    assert audit["exit"] == 0, audit
    assert (audit["lost"], audit["doubled"], audit["trained"]) == (0, 0, steps * groups)
    assert sorted(set(run.steps())) == list(range(1, steps + 1))
    return audit


def assert_time_is_accounted_for(lines) -> None:  # type: ignore[no-untyped-def]
    """The parts of a step are its wall time, by the clock that stamped the lines."""
    parts = ("wait_s", "fetch_s", "assemble_s", "proximal_s", "train_s", "publish_s", "commit_s", "checkpoint_s")
    for line in lines:
        assert all(line[part] >= 0 for part in parts)
        assert abs(sum(line[part] for part in parts) - line["step_s"]) <= 0.001 * line["step_s"]
    assert all(line[part] > 0 for line in lines for part in ("wait_s", "fetch_s", "assemble_s", "train_s", "publish_s"))
    # Between two lines as by their clock: the median, since a process may stand still before it writes a line.
    gaps = [line["t"] - before["t"] - line["step_s"] for before, line in pairwise(lines)]
    assert abs(statistics.median(gaps)) <= 0.03 * statistics.median(line["step_s"] for line in lines) + 0.02
    assert all(line["model_flops"] > 0 and line["memory_bytes"] > 0 for line in lines)


def assert_report_agrees(run, lines) -> None:  # type: ignore[no-untyped-def]
    """The page that the launch wrote holds the numbers of the learner's file."""
    text = (run.dir / "report.html").read_text()
    first, last = (sum(line["reward_mean"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert f"{first:.3f} → {last:.3f}" in text and f"trained {4 * len(lines)} (100.0%)" in text
    charts = [json.loads(html.unescape(found)) for found in re.findall(r"data-chart='([^']*)'", text)]
    drawn = next(chart["lines"][0]["points"] for chart in charts if chart["lines"][0]["name"] == "reward")
    assert drawn == [[line["step"], float(f"{line['reward_mean']:.6g}")] for line in lines]


def assert_samples_are_kept(run) -> None:  # type: ignore[no-untyped-def]
    """Two of each step, each token with the log-probs of engine and learner; alike under the same weights."""
    samples = run.lines("samples.jsonl")
    assert len(samples) == 2 * len(run.steps())
    for line in samples:
        assert "".join(line["tokens"]) == line["response"] and len(line["tokens"]) == line["length"]
        gaps = [abs(a - b) for a, b in zip(line["engine"], line["learner"], strict=True)]
        assert line["lag"] or max(gaps) < 1e-3, line


def test_six_processes_train_and_every_prompt_is_accounted_for(run) -> None:  # type: ignore[no-untyped-def]
    run.fresh = True
    done = run.launch()
    assert done.returncode == 0, done.stdout + run.logs()
    assert_complete(run)
    processes = run.lines("processes.jsonl")
    assert len({line["pid"] for line in processes}) >= 6
    assert {line["role"] for line in processes} == {"buffer", "weightsync", "producer", "reward", "learner"}
    assert run.living() == []
    lines = run.lines("metrics/learner.jsonl")
    assert all(line["lag_max"] <= 2 for line in lines)
    assert_time_is_accounted_for(lines)
    rounds = run.lines("metrics/weightsync.jsonl")
    committed = [line for line in rounds if line.get("members_committed")]
    assert committed
    for line in committed:
        assert all(digest == line["digest"] for digest in line["members"].values()), line
    assert (run.dir / "report.html").stat().st_size > 10_000
    assert_report_agrees(run, lines)
    assert_samples_are_kept(run)
    assert (run.dir / "export" / "model.safetensors").exists()
    result = json.loads((run.dir / "result.json").read_text())
    assert result["steps"] == 5


@pytest.mark.long
def test_redis_two_learner_ranks_and_gloo(run) -> None:  # type: ignore[no-untyped-def]
    need_redis()
    run.fresh = True
    done = run.launch("buffer.store=redis", "learner.ranks=2", "weightsync.transport=collective")
    assert done.returncode == 0, done.stdout + run.logs()
    assert_complete(run)
    assert len([line for line in run.lines("processes.jsonl") if line["role"] == "learner"]) == 2
    assert_samples_are_kept(run)
    transports = {line.get("transport") for line in run.lines("metrics/weightsync.jsonl")}
    assert "collective" in transports


def test_synchronous_has_no_lag(run) -> None:  # type: ignore[no-untyped-def]
    done = run.launch("buffer.max_staleness=0", "learner.steps=4")
    assert done.returncode == 0, done.stdout + run.logs()
    audit = assert_complete(run, steps=4)
    assert audit["lag_max"] == 0
    assert [line["lag_max"] for line in run.lines("metrics/learner.jsonl")] == [0, 0, 0, 0]


@pytest.mark.chaos
def test_a_late_producer_joins_and_a_killed_one_is_not_missed(run) -> None:  # type: ignore[no-untyped-def]
    main = run.start(
        "launch",
        "all",
        str(run.config),
        "--set",
        "learner.steps=120",
        "--set",
        "producers.count=1",
        "--set",
        "producers.restarts=3",
    )
    run.wait("the first step", lambda: bool(run.steps()))
    address = f"ipc://{run.dir}/sockets/buffer.sock"
    late = run.start("launch", "producers", str(run.config), "--connect", address, "--set", "producers.count=2")
    run.wait("a late producer's samples", lambda: len(producers_with_samples(run)) >= 2)
    victim = next(line for line in run.lines("processes.jsonl") if line["role"] == "producer")
    trained = len(run.steps())
    os.kill(victim["pid"], signal.SIGKILL)
    run.wait("steps after the kill", lambda: len(run.steps()) >= trained + 3)
    out, _ = main.communicate(timeout=150)
    assert main.returncode in (0, 1), out + run.logs()
    assert run.audit()["lost"] == 0
    late.send_signal(signal.SIGINT)
    late.communicate(timeout=30)
    assert_complete(run, steps=120)


def producers_with_samples(run) -> set[str]:  # type: ignore[no-untyped-def]
    return {line["producer"] for line in run.lines("history.jsonl") if line.get("e") == "sample"}


def test_a_killed_learner_resumes_by_the_same_command(run) -> None:  # type: ignore[no-untyped-def]
    words = [
        "launch",
        "all",
        str(run.config),
        "--set",
        "learner.steps=40",
        "--set",
        "learner.restarts=0",
        "--set",
        "learner.checkpoint_every=4",
    ]
    first = run.start(*words)
    run.wait("step 5", lambda: 5 in run.steps())
    os.kill(run.pid("learner"), signal.SIGKILL)
    out, _ = first.communicate(timeout=60)
    assert first.returncode != 0, out
    assert run.living() == []
    before = max(run.steps())
    assert before < 40
    second = run.command(*words)
    assert second.returncode == 0, second.stdout + run.logs()
    assert_complete(run, steps=40)
    replayed = [line for line in run.lines("metrics/learner.jsonl") if line.get("replayed")]
    assert replayed, "the steps after the checkpoint come back as recorded batches"


@pytest.mark.long
def test_every_service_can_be_killed_while_it_trains(run) -> None:  # type: ignore[no-untyped-def]
    main = run.start("launch", "all", str(run.config), "--set", "learner.steps=100")
    for number, role in enumerate(["buffer", "weightsync", "reward", "producer", "learner"]):
        run.wait(f"step {15 * number + 2}", lambda number=number: max(run.steps(), default=0) >= 15 * number + 2)
        os.kill(run.pid(role), signal.SIGKILL)
    out, _ = main.communicate(timeout=180)
    assert main.returncode == 0, out + run.logs()
    assert_complete(run, steps=100)
    assert run.living() == []


@pytest.mark.long
def test_ctrl_c_once_writes_a_checkpoint_and_leaves_nobody(run) -> None:  # type: ignore[no-untyped-def]
    words = ["launch", "all", str(run.config), "--set", "learner.steps=2000", "--set", "learner.checkpoint_every=100"]
    main = run.start(*words)
    run.wait("step 3", lambda: 3 in run.steps())
    main.send_signal(signal.SIGINT)
    out, _ = main.communicate(timeout=60)
    assert run.living() == [], out
    steps = max(run.steps())
    assert sorted(path.name for path in (run.dir / "checkpoints").glob("step_*")) == [f"step_{steps:06d}"], out
    again = run.start("launch", "all", str(run.config), "--set", f"learner.steps={steps + 3}")
    out, _ = again.communicate(timeout=120)
    assert again.returncode == 0, out + run.logs()
    assert_complete(run, steps=steps + 3)


@pytest.mark.long
def test_a_killed_launcher_leaves_no_orphan(run) -> None:  # type: ignore[no-untyped-def]
    run.fresh = True
    main = run.start("launch", "all", str(run.config), "--set", "learner.steps=2000")
    run.wait("step 2", lambda: 2 in run.steps())
    os.kill(main.pid, signal.SIGKILL)
    run.wait("the end of all roles", lambda: run.living() == [])


@pytest.mark.long
def test_a_second_learner_is_refused_by_name(run) -> None:  # type: ignore[no-untyped-def]
    main = run.start("launch", "all", str(run.config), "--set", "learner.steps=2000")
    run.wait("step 2", lambda: 2 in run.steps())
    first = run.pid("learner")
    words = [sys.executable, "-m", "learners.main", "--config", str(run.dir / "config.toml")]
    second = warm.run(
        words, cwd=run.folder, env=run.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode == 75, second.stdout + second.stderr
    assert "error[learner.duplicate]" in second.stderr
    assert f"pid {first}" in second.stderr
    assert "Traceback" not in second.stderr
    trained = max(run.steps())
    run.wait("the first one to go on", lambda: max(run.steps()) >= trained + 2)
    main.send_signal(signal.SIGINT)
    main.communicate(timeout=60)


BAD = {
    "typo": (["buffer.max_stalness=3"], "config.unknown_key", "did you mean buffer.max_staleness"),
    "missing reward": (['reward=[{function="my_rewards:nope"}]'], "config.reward", "nope"),
    "missing reward module": (['reward=[{function="no_such_module:f"}]'], "config.reward", "no_such_module"),
    "missing model": (["model.path=/does/not/exist"], "config.model", "/does/not/exist"),
    "missing data": (["data.path=/does/not/exist.jsonl"], "config.data", "/does/not/exist.jsonl"),
    "redis unreachable": (["buffer.store=redis", "buffer.redis_url=redis://127.0.0.1:9/0"], "store.unreachable", ":9"),
    "no keys": (["network.buffer=tcp://0.0.0.0:5999"], "config.network", "key_file"),
    "unknown engine": (["producers.engine=turbo"], "config.type", "turbo"),
}


@pytest.mark.parametrize("case", BAD, ids=list(BAD))
def test_bad_input_is_one_clear_error(run, case: str) -> None:  # type: ignore[no-untyped-def]
    settings, code, part = BAD[case]
    started = time.monotonic()
    done = run.launch(*settings, timeout=60)
    assert done.returncode in (2, 69), done.stdout
    assert f"error[{code}]" in done.stdout, done.stdout
    assert part in done.stdout
    assert "->" in done.stdout
    assert "Traceback" not in done.stdout
    assert time.monotonic() - started < 55
    assert not (run.dir / "processes.jsonl").exists(), "nothing was started"


def test_a_port_in_use_is_named(run) -> None:  # type: ignore[no-untyped-def]
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = run.launch(f"network.buffer=tcp://127.0.0.1:{port}", timeout=60)
    assert done.returncode == 2, done.stdout
    assert "error[net.port_in_use]" in done.stdout
    assert str(port) in done.stdout
    assert "Traceback" not in done.stdout


def test_a_reward_that_raises_ends_the_run_with_its_name_and_never_counts_as_zero(run) -> None:  # type: ignore[no-untyped-def]
    done = run.launch(
        'reward=[{function="my_rewards:failing_reward"}]',
        "reward_workers.max_failed_groups=3",
        "reward_workers.retries=1",
        timeout=120,
    )
    assert done.returncode == 65, done.stdout + run.logs()
    assert "error[reward.budget]" in done.stdout
    assert "restart 1 of" not in done.stdout  # it would meet the same end
    assert "this reward always fails" in done.stdout
    assert "failing_reward" in done.stdout
    assert run.steps() == []
    dead = [line for line in run.lines("history.jsonl") if line.get("e") == "dead"]
    assert {line["reason"].split(":")[0] for line in dead} == {"reward_failed"}
    assert not any(line.get("e") == "score" for line in run.lines("history.jsonl"))
    assert run.living() == []


@pytest.mark.long
def test_check_and_status_speak(run) -> None:  # type: ignore[no-untyped-def]
    done = run.command("check", str(run.config), timeout=60)
    assert done.returncode == 0, done.stdout
    assert "12 groups = (pipeline_depth 2 + 1) x batch_groups 4" in done.stdout
    main = run.start("launch", "all", str(run.config), "--set", "learner.steps=2000")
    run.wait("step 2", lambda: 2 in run.steps())
    shown = run.command("status", str(run.dir), "--json", timeout=30)
    status = json.loads(shown.stdout)
    assert status["buffer"]["ledger"]["issued"] >= 8
    assert strangers(status, Status) == [], "asyncrl/monitor/status_schema.py does not publish what the services say"
    top = run.command("top", str(run.dir), "--once", "--plain", timeout=30)
    assert top.returncode == 0, top.stdout
    assert "running  step" in top.stdout and "of 12 under way" in top.stdout and "advice" in top.stdout
    assert {"producer-0", "producer-1", "reward-0"} <= {line.split()[0] for line in top.stdout.splitlines()}
    far = run.command("top", "--connect", f"ipc://{run.dir}/sockets/buffer.sock", "--once", "--plain", timeout=30)
    assert far.returncode == 0 and "running  step" in far.stdout and "held by generators" in far.stdout, far.stdout
    main.send_signal(signal.SIGTERM)
    main.communicate(timeout=60)
    assert Path(run.dir / "config.toml").exists()
