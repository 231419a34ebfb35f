"""The process of an online tracker: it goes on where it was, and whatever becomes of it, the run does not notice."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from test_tracker_contract import environment
from tracker_rigs import RIGS, STANDINS, standin_lines, standin_told

from asyncrl.config import dump, parse
from asyncrl.errors import ConfigError
from asyncrl.launcher.supervisor import Grace, Supervisor
from asyncrl.metrics import log
from asyncrl.plugins import Tracker
from asyncrl.process_plan.plan import onlookers
from asyncrl.runtime.metrics_tail import Following
from asyncrl.runtime.run_dir import RunDir
from learners.trackers.main import GIVE_UP_S, Tracking, read_positions, run_id

ROOT = Path(__file__).parents[2]
TEXT = """
run.dir = "{root}"
model.path = "m"
data.path = "d"
[[reward]]
function = "a:b"
[trackers]
use = ["trackio"]
offline = true
every_s = 0.1
"""


def make_run(folder: Path) -> RunDir:
    run = RunDir(folder / "run").create()
    run.config.write_text(dump(parse(TEXT.format(root=run.root))))
    return run


def write(run: RunDir, steps: range, *, file: str = "learner") -> None:
    """Lines as the learner writes them."""
    with (run.metrics / f"{file}.jsonl").open("ab") as out:
        for step in steps:
            line = {"t": 1000.0 + step, "step": step, "lag_mean": step / 2, "groups_of_step": [1, 2]}
            out.write(msgspec.json.encode(line) + b"\n")


class Server:
    """A tracker's server that can be away, and refuse a step."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.values: list[dict[str, float]] = []
        self.away = False
        self.refused: set[int] = set()
        self.begun = self.ended = 0

    def make(self) -> Tracker:
        if self.away:
            raise ConnectionError("away")
        self.begun += 1
        return self

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        if self.away or step in self.refused:
            raise ConnectionError("away")
        self.told.append(step)
        self.values.append(dict(values))

    def close(self) -> None:
        self.ended += 1


class Lab:
    def __init__(self, tmp_path: Path) -> None:
        self.run = make_run(tmp_path)
        self.server, self.now, self.said = Server(), 0.0, list[str]()
        self.state = tmp_path / "state.json"
        self.tracking = self.start()

    def start(self) -> Tracking:
        following = Following(self.run, positions=read_positions(self.state))
        return Tracking(
            following, make=self.server.make, name="t", state=self.state, say=self.said.append, clock=lambda: self.now
        )


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_point_holds_what_everybody_said_when_its_step_ended(lab: Lab) -> None:
    def line(file: str, **values: object) -> None:
        with (lab.run.metrics / f"{file}.jsonl").open("ab") as out:
            out.write(msgspec.json.encode(values) + b"\n")

    for name, share in (("producer-0", 0.5), ("producer-1", 1.0)):
        line("roles", t=1000.5, role="producer", name=name, pid=7, busy_share=share)
    line("roles", t=980.0, role="producer", name="producer-2", busy_share=0.0)  # silent for long
    line("roles", t=1002.0, role="producer", name="producer-0", busy_share=0.0)  # after the step
    line("buffer", t=1000.9, dropped=3, ready=5, unknown=1.0, step=0)
    line("weightsync", t=1000.7, round_s=0.25, version=1, members={"producer-0": "d"})
    line("evaluation", t=1003.0, step=1, **{"val-core/add/acc/pass@4/mean": 0.75, "evaluation_missing": 1})
    line("learner", t=1001.0, step=1, lag_mean=0.5, version=1, **{"reward/exact": 0.25})
    assert lab.tracking.look()
    assert lab.server.told == [1, 1]
    assert lab.server.values[0] == {
        "health/lag_mean": 0.5,
        "learning/reward/exact": 0.25,
        "health/version": 1.0,
        "faults/dropped": 3.0,
        "health/ready": 5.0,
        "speed/round_s": 0.25,
        "speed/producer/busy_share": 0.75,
    }
    assert lab.server.values[1] == {"val-core/add/acc/pass@4/mean": 0.75, "faults/evaluation_missing": 1.0}


def test_a_server_that_is_away_is_told_everything_later(lab: Lab) -> None:
    lab.server.away = True
    write(lab.run, range(1, 6))
    for lab.now in (0.0, 0.5, 1.1, 2.0, 3.2, 100.0):
        assert not lab.tracking.look()
    assert "fails since" in lab.tracking.waits and len(lab.said) == 2  # at once, and after a minute
    lab.server.away, lab.now = False, 200.0
    write(lab.run, range(6, 8))
    assert not lab.tracking.look() and lab.tracking.look()  # what is new since is the next look's
    assert lab.server.told == [1, 2, 3, 4, 5, 6, 7] and lab.tracking.waits == ""


def test_a_next_process_goes_on_and_repeats_at_most_what_was_not_finished(lab: Lab) -> None:
    write(lab.run, range(1, 4))
    lab.tracking.look()
    write(lab.run, range(4, 7))
    lab.server.refused = {6}
    assert not lab.tracking.look()  # 4 and 5 were told, and nobody wrote that down: it is killed here
    lab.server.refused = set()
    assert lab.start().look()
    assert lab.server.told == [1, 2, 3, 4, 5, 4, 5, 6]


@pytest.mark.parametrize("killed", [False, True])
def test_every_step_has_the_numbers_of_the_workers_also_when_catching_up(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """The file of the workers is ten times as long: it is not left behind, also by a process that takes over."""
    monkeypatch.setattr(log, "TAIL_BYTES", 4000)
    write(lab.run, range(1, 101))
    with (lab.run.metrics / "roles.jsonl").open("ab") as out:
        for beat in range(1000):
            line = {"t": 1000.0 + beat / 10, "role": "producer", "name": "producer-0", "busy_share": beat / 1000}
            out.write(msgspec.json.encode(line) + b"\n")
    tracking = lab.tracking
    for _ in range(1000):
        if tracking.look():
            break
        tracking = lab.start() if killed else tracking
    assert lab.server.told == list(range(1, 101)) and not tracking.following.behind_bytes
    shares = [values.get("speed/producer/busy_share") for values in lab.server.values]
    wanted = [(10 * step - 1) / 1000 for step in range(1, 101)]  # the last beat before its line
    if killed:  # the newest numbers of the process before are not known: there may be none since
        assert shares.count(None) < 5
        shares = [share or wanted[place] for place, share in enumerate(shares)]
    assert shares == wanted


def test_numbers_that_a_working_server_refuses_are_left_out_after_a_while(lab: Lab) -> None:
    write(lab.run, range(1, 4))
    lab.server.refused = {2}
    while lab.now < GIVE_UP_S + 70:
        lab.tracking.look()
        lab.now += 5
    assert lab.server.told == [1, 3] and lab.tracking.left_out == 1
    assert any("step 2 is left out" in text for text in lab.said)


def test_the_end_hands_on_what_is_left_and_says_what_is_not(lab: Lab) -> None:
    write(lab.run, range(1, 4))
    lab.tracking.close()
    assert lab.server.told == [1, 2, 3] and lab.server.ended == 1 and lab.said == []
    write(lab.run, range(4, 6))
    lab.server.away = True
    late = lab.start()
    late.close()
    assert "2 steps" in lab.said[-1] and "were not sent" in lab.said[-1] and lab.server.ended == 1


def test_a_missing_package_is_no_reason_to_try_again(lab: Lab) -> None:
    def missing() -> Tracker:
        raise ConfigError("config.extra", "No module named 'x'")

    write(lab.run, range(1, 2))
    tracking = Tracking(Following(lab.run), make=missing, name="t", state=lab.state, say=lab.said.append)
    with pytest.raises(ConfigError):
        tracking.look()


def test_the_identity_is_made_once_per_folder(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert run_id(tmp_path) == first and len(first) == 16
    (tmp_path / "other").mkdir()
    assert run_id(tmp_path / "other") != first


# ---------------------------------------------------------------- real processes


def start(run: RunDir, fails: Path) -> subprocess.Popen[str]:
    [plan] = onlookers(parse(run.config.read_text()), config_path=run.config)
    env = {**environment(RIGS[3]), "STANDIN_FAILS": str(fails), "PYTHONPATH": f"{STANDINS}:{ROOT}"}
    return subprocess.Popen(
        plan.argv, env=env, cwd=run.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(what: object, *, limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not what():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def test_a_killed_process_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    """Through the real command: killed with steps told, started again, asked to end with steps still in the file."""
    run = make_run(tmp_path)
    fails, folder = tmp_path / "fails", run.trackers / "trackio"
    write(run, range(1, 21))
    first = start(run, fails)
    wait_for(lambda: (run.trackers / "trackio.json").exists() and len(standin_told(folder)) == 20)
    first.kill()
    first.wait(timeout=30)
    write(run, range(21, 41))
    second = start(run, fails)
    wait_for(lambda: len(standin_told(folder)) == 40)
    write(run, range(41, 51))
    second.send_signal(signal.SIGTERM)
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 0 and "30 points handed on, 0 left out" in said, said
    told = standin_told(folder)
    assert sorted(step for _, step in told) == list(range(1, 51))
    assert all(value == step / 2 for (_, step), value in told.items())
    assert len({line["begin"] for line in standin_lines(folder) if "begin" in line}) == 1
    assert (run.alive / "tracker-trackio.json").exists() is False  # it signed off
    lines = [msgspec.json.decode(line) for line in run.processes.read_bytes().splitlines()]
    assert [line["role"] for line in lines] == ["tracker", "tracker"]


@pytest.mark.long
def test_a_run_ends_well_with_trackers_that_hang_crash_or_are_missing(tmp_path: Path) -> None:
    """The real supervisor with a short learner: code 0, in its time, and what was given up is named."""
    from asyncrl.process_plan.plan import ProcessPlan

    def plan(role: str, name: str, code: str, restarts: int = 0) -> ProcessPlan:
        return ProcessPlan(role, name, (sys.executable, "-c", code), restarts=restarts)

    hangs = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(99)"
    )
    plans = [
        plan("learner", "learner", "import time; time.sleep(4)"),
        plan("tracker", "tracker-hangs", hangs),
        plan("tracker", "tracker-crashes", "raise SystemExit(70)", restarts=1),
        plan("tracker", "tracker-missing", "raise SystemExit(2)", restarts=5),
    ]
    said: list[str] = []
    outcome = Supervisor(
        plans, logs=tmp_path / "logs", say=lambda name, line: said.append(f"{name}: {line}"), grace=Grace(other_s=1.0)
    ).run()
    assert (outcome.code, outcome.reason) == (0, "done")
    assert outcome.given_up == {"tracker-crashes": 70, "tracker-missing": 2}
    assert outcome.restarts == {"tracker-crashes": 1} and math.isfinite(outcome.wall_s)
    assert any("tracker-hangs did not end in time: killed" in line for line in said)
