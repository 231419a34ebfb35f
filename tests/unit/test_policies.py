"""`[policies]`: one file, several configurations; their errors, collisions and launchers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from asyncrl.config import Config, dump, load, load_all, parse
from asyncrl.config.policies import policy_names
from asyncrl.config.rules.policies import find_collisions
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.launcher.launch import LaunchOptions
from asyncrl.launcher.policies import Launchers, choose, command
from asyncrl.preflight.check import check_files
from asyncrl.preflight.memory import estimate
from asyncrl.preflight.policies import merge_errors
from asyncrl.process_plan.device_assignment import Devices
from asyncrl.runtime.run_dir import RunDir, policy_runs
from learners.other_policies import OthersWait, describe_unfinished

GAME = """
[run]
dir = "{folder}/run"
name = "game"
[model]
path = "{folder}/model"
[data]
path = "rows.jsonl"
[environment]
name = "games:play"
[buffer]
max_staleness = 3
[policies.first]
[policies.second]
model.path = "{folder}/other"
[policies.second.buffer]
max_staleness = 1
[[policies.second.reward]]
function = "m:f"
"""


@pytest.fixture
def game(tmp_path: Path) -> Path:
    path = tmp_path / "game.toml"
    path.write_text(GAME.format(folder=tmp_path))
    return path


def of(path: Path, name: str, *overrides: str) -> Config:
    return load(path, [*overrides, f"run.policy={name}"])


def test_each_policy_is_the_file_with_its_table_on_top(game: Path) -> None:
    first, second = of(game, "first"), of(game, "second")
    assert (first.buffer.max_staleness, second.buffer.max_staleness) == (3, 1)
    assert first.model.path.endswith("/model") and second.model.path.endswith("/other")
    assert not first.reward and second.reward[0].function == "m:f"
    assert (first.run.name, second.run.name) == ("game-first", "game-second")
    root = game.parent / "run"
    assert first.run.dir == str(root / "first") and first.run.other_policies == {"second": str(root / "second")}
    assert second.run.dir == str(root / "second") and second.run.other_policies == {"first": str(root / "first")}


def test_the_resolved_file_of_a_policy_is_an_ordinary_one(game: Path) -> None:
    second = of(game, "second")
    assert parse(dump(second)) == second
    assert "[policies" not in dump(second)


def test_overrides_are_for_all_policies_or_for_one(game: Path, tmp_path: Path) -> None:
    words = ["learner.steps=7", "policies.second.learner.steps=9", f"run.dir={tmp_path}/elsewhere"]
    first, second = of(game, "first", *words), of(game, "second", *words)
    assert (first.learner.steps, second.learner.steps) == (7, 9)
    assert first.run.dir == str(tmp_path / "elsewhere" / "first")
    assert second.run.other_policies == {"first": str(tmp_path / "elsewhere" / "first")}


def test_names_without_a_choice(game: Path) -> None:
    assert policy_names(game) == ["first", "second"]
    assert policy_names(game, ["run.policy=first"]) == []
    with pytest.raises(ConfigErrors, match=r"several policies: first, second.*works on one") as error:
        load(game)
    assert "--policy first" in error.value.render()


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("", ["run.policy=secnd"], "'secnd': the policies are first, second; did you mean 'second'"),
        ("", ["run.policy=first", "policies.third.learner.steps=1"], "the policies are first, second"),
        ('[policies."a b"]\n', ["run.policy=first"], "'a b' is no name of a policy"),
        ('[policies.third.run]\ndir = "x"\n', ["run.policy=first"], "the folder of a policy is run.dir/third"),
        ("[policies]\nthird = 3\n", ["run.policy=first"], "policies.third is a table of sections"),
    ],
)
def test_wrong_tables_and_names(game: Path, text: str, overrides: list[str], message: str) -> None:
    more = game.with_name("more.toml")
    more.write_text(text)
    with pytest.raises(ConfigErrors, match=message):
        load([game, more], overrides)


def test_an_error_names_the_line_in_the_table_of_the_policy(game: Path) -> None:
    text = game.read_text().replace("max_staleness = 1", 'max_staleness = "x"')
    game.write_text(text)
    line = text.splitlines().index('max_staleness = "x"') + 1
    assert [error.where for error in load_all(game, ["run.policy=second"]).errors] == [f"{game}:{line}"]
    assert not load_all(game, ["run.policy=first"]).errors


def test_checks_of_all_policies_report_a_mistake_once(game: Path) -> None:
    found = {}
    for name in ("first", "second"):
        _, checked = check_files(game, [f"run.policy={name}", "learner.stepps=3"])
        found[name] = checked.errors
    texts = [error.message for error in merge_errors(found) if "stepps" in error.message]
    assert len(texts) == 1 and texts[0].startswith("policy first, second: learner.stepps")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("producers.checkpoint_tokens=64", "replayed would meet other answers"),
        ('cluster.devices="turns"', "do not take turns"),
    ],
)
def test_settings_that_several_policies_cannot_have(game: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigErrors, match=message):
        of(game, "first", override)


def test_two_policies_cannot_listen_at_one_address(game: Path) -> None:
    words = ['network.buffer="tcp://127.0.0.1:5555"', 'network.weightsync="tcp://127.0.0.1:0"']
    configs = {name: of(game, name, *words) for name in ("first", "second")}
    [found] = find_collisions(configs)
    assert found.message.startswith("policies.second.network.buffer = tcp://127.0.0.1:5555")
    own = [*words, 'policies.second.network.buffer="tcp://127.0.0.1:6555"']
    assert not list(find_collisions({name: of(game, name, *own) for name in ("first", "second")}))


def test_two_policies_cannot_own_one_device(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def messages(*words: str, count: int = 4) -> list[str]:
        devices = Devices("cuda", tuple(map(str, range(count))))
        monkeypatch.setattr("asyncrl.preflight.policies.find_devices", lambda: devices)
        configs = {name: of(game, name, *words) for name in ("first", "second")}
        return [error.message for error in merge_errors({}, configs) if error.code == "config.conflict"]

    assert messages() == [], "they share"
    own = 'cluster.devices="own"'
    [message] = messages(own)
    assert message.startswith("policies.first.cluster.devices = 'own', and policies first and second would")
    assert message.endswith("both use cuda 0, 1")
    assert messages(f"policies.second.{own}")[0].startswith("policies.second.cluster.devices = 'own'")
    shared = messages('cluster.devices="share"', f"policies.first.{own}")
    assert len(shared) == 1 and shared[0].endswith("both use cuda 0")
    assert messages(own, count=0) == []
    named = [f'policies.second.{role}.device="cuda:{number}"' for role, number in (("learner", 2), ("producers", 3))]
    assert messages(own, *named) == []


def test_memory_of_a_producer_counts_the_other_policies(game: Path) -> None:
    model = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100,
    }  # fmt: skip
    first, second = of(game, "first"), of(game, "second")
    alone = estimate(first, model, ["producer"], accelerator=False)
    both = estimate(
        first, model, ["producer"], accelerator=False, others={"second": (second, {**model, "vocab_size": 200})}
    )
    [weights] = [part for part in both[0].parts if part.name == "weights of second"]
    [own] = [part for part in both[0].parts if part.name == "weights"]
    assert weights.bytes > own.bytes > 0
    assert both[0].total_bytes > alone[0].total_bytes + weights.bytes


# ---------------------------------------------------------------- launchers and folders


def test_the_command_of_one_launcher(game: Path) -> None:
    options = LaunchOptions(overrides=("learner.steps=3",), verbose=True, job=True)
    words = command([game], options, "second")
    assert words[1:] == [
        "-m", "asyncrl", "launch", "all", str(game), "--policy", "second", "--plain", "--set", "learner.steps=3",
        "--verbose", "--job",
    ]  # fmt: skip
    assert choose(options, "second").overrides == ("learner.steps=3", "run.policy=second")


WAITS = """
import signal, sys
signal.alarm(60)
for number in (1, 2, 15):
    signal.signal(number, lambda *_: sys.exit({code}))
print("waits")
while True: signal.pause()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def test_the_others_are_stopped_if_one_fails(tmp_path: Path) -> None:
    said: list[str] = []
    ready = tmp_path / "ready"

    def say(line: str) -> None:
        said.append(line)
        if line == "first | waits":
            ready.touch()

    fails = f"import os, time\nwhile not os.path.exists({str(ready)!r}): time.sleep(0.01)\nraise SystemExit(70)"
    assert Launchers([("first", python(WAITS.format(code=0))), ("second", python(fails))], say=say).run() == 70
    assert "policy second ended with exit code 70; asked the launchers of first to stop" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_go_to_all_launchers(number: signal.Signals) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if sorted(said) == ["first | waits", "second | waits"]:
            os.kill(os.getpid(), number)

    both = [(name, python(WAITS.format(code=code))) for name, code in (("first", 0), ("second", 7))]
    missed: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda *_: missed.append(1))  # not ignored, and no end of this process
    try:
        assert Launchers(both, say=say).run() == 7 and not missed
    finally:
        signal.signal(signal.SIGHUP, before)


def test_output_that_cannot_be_printed_stops_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    talks = "import signal\nsignal.alarm(20)\nfor _ in range(4000): print('a line of some length, ' * 3)"
    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        code = Launchers([("first", python(talks))]).run()
        monkeypatch.undo()
    assert code == 0


def test_the_folder_of_several_policies(tmp_path: Path) -> None:
    for name in ("first", "second"):
        run = RunDir(tmp_path / name).create()
        run.config.write_text("")
    assert policy_runs(tmp_path) == [tmp_path / "first", tmp_path / "second"]
    assert policy_runs(tmp_path / "first") == []
    with pytest.raises(ConfigError, match=r"several policies; name the run of one: .*first, .*second"):
        RunDir(tmp_path).require()


def test_a_policy_waits_for_the_last_checkpoint_of_the_others(game: Path) -> None:
    first, second = of(game, "first", "learner.steps=4"), of(game, "second", "learner.steps=4")
    assert describe_unfinished(first) == "policy second, which has not started"
    run = RunDir(second.run_dir).create()
    run.config.write_text(dump(second))
    (run.checkpoints / "step_000003").mkdir()
    assert describe_unfinished(first) == "policy second: its newest checkpoint is of step 3 of 4"
    (run.checkpoints / "step_000004").mkdir()
    assert describe_unfinished(first) == ""


def test_the_wait_for_a_policy_that_does_nothing_ends(game: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, now = of(game, "first", "run.hang_timeout_s=5", "run.start_timeout_s=2"), [100.0]
    waits = OthersWait(first, clock=lambda: now[0])
    assert waits.describe() == "policy second, which has not started"
    now[0] += 4.0
    assert waits.describe()
    run = RunDir(of(game, "second").run_dir).create()
    run.history.write_text("{}")  # a sign of life
    now[0] += 4.0
    assert waits.describe()
    now[0] += 5.1
    assert waits.describe() == "" and "for 5 s in the runs of other policies" in capsys.readouterr().out
