"""`asyncrl check` refuses what a role refuses at its start, with the same code, and finds everything at once."""

from __future__ import annotations

import ast
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from small_folder import write_folder

from asyncrl.cli import main
from asyncrl.errors import CATALOGUE, EXIT_CONFIG, AsyncRLError
from asyncrl.preflight.check import Checked, check_files

ROOT = Path(__file__).parents[2]
ROLES = ("producers", "learners", "buffers", "weightsync")
SHARED = ("asyncrl/runtime", "asyncrl/net", "asyncrl/config", "asyncrl/process_plan")
#: Codes of these modules that no start of a role ends with, and why.
LATER = {
    "usage": "a command line",
    "run.missing": "a command about a run that is not there",
    "replay.missing": "`asyncrl replay`",
    "rescore.file": "`asyncrl replay`",
    "tune.refused": "`asyncrl tune`",
    "plan.stuck": "`asyncrl plan`",
    "reward.judge": "the command line of reward workers",
    "config.forbidden": "a request with the key of another role",
    "learner.packing": "it compares results of the loaded weights",
}


class Place(NamedTuple):
    """A folder with a configuration that is right."""

    root: Path

    def model(self, **fields: object) -> str:
        return str(write_folder(self.root / "model", **fields))  # type: ignore[arg-type]

    def rows(self, *rows: object) -> None:
        (self.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def check(self, *overrides: str, play: bool = False) -> Checked:
        return check_files(self.root / "run.toml", list(overrides), play=play)[1]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    made = Place(tmp_path)
    made.model()
    made.rows(*({"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(20)))
    (tmp_path / "mine.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(TOML)
    return made


TOML = """
[run]
dir = "runs/mine"
[model]
path = "model"
dtype = "float32"
[data]
path = "rows.jsonl"
max_prompt_tokens = 32
[sampling]
max_new_tokens = 32
[learner]
steps = 2
[[reward]]
function = "mine.py:right"
"""
PARTS = """
def right(prompts, completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def wrong_signature(one, two, three):
    return 1.0

def rows():
    raise RuntimeError("no rows today")

class Game:
    def reset(self, row):
        return None
    def step(self, turn):
        return "more", 1.0, turn.number > 0, {}
"""

Setup = Callable[[Place, pytest.MonkeyPatch], list[str]]


class Case(NamedTuple):
    """A mistake. `overrides`: settings; `make`: changes files and returns further ones; `play`: found by the command
    alone, which plays the first row.
    """

    code: str
    title: str
    overrides: tuple[str, ...] = ()
    make: Setup | None = None
    play: bool = False


def case(code: str, title: str, *overrides: str, make: Setup | None = None, play: bool = False) -> Case:
    return Case(code, title, overrides, make, play)


def _chat(place: Place, **folder: object) -> list[str]:
    place.model(**folder)
    place.rows({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})
    return []


GAME = 'row_environment=[{agent_name="play", name="mine.py:Game"}]'


def _named(*names: str, held_out: str = "") -> Setup:
    """Rows with these names of environments."""

    def write(place: Place, _: pytest.MonkeyPatch) -> list[str]:
        place.rows(*({"prompt": "1+1=", "answer": "2", "agent_name": name} for name in names))
        row = {"prompt": "1+1=", "answer": "2", "agent_name": held_out}
        (place.root / "held_out.jsonl").write_text(json.dumps(row) + "\n")
        return []

    return write


def _taken_port(place: Place, patch: pytest.MonkeyPatch) -> list[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    patch.setattr(place.__class__, "_listener", listener, raising=False)  # open until the end of the test
    return [f"network.buffer=tcp://127.0.0.1:{listener.getsockname()[1]}"]


def _no_programs(place: Place, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setenv("PATH", str(place.root))
    return []


def _damaged_tokenizer(place: Place, patch: pytest.MonkeyPatch) -> list[str]:
    (place.root / "model/tokenizer.json").write_text("{")
    return []


def _a_file_is_there(place: Place, patch: pytest.MonkeyPatch) -> list[str]:
    (place.root / "taken").write_text("")
    return ["run.dir=taken/run"]


STUBBORN = "{{ raise_exception('no roles here') }}"
FORGETFUL = "{{ messages[-1].content }}"
CASES = (
    case("config.conflict", "a row that holds no sample", "learner.micro_batch_tokens=8"),
    case("config.data", "no such file", "data.path=elsewhere.jsonl"),
    case("config.data", "every prompt too long", "data.max_prompt_tokens=2"),
    case("config.data", "a source that raises", "data.path=''", 'data.source="mine.py:rows"'),
    case("config.data", "chat without a template switch", "data.chat_template=false", make=lambda p, _: _chat(p)),
    case("config.data", "no held-out rows", "evaluation.path=elsewhere.jsonl"),
    case("config.environment", "no such function", 'environment.name="mine.py:nothing"'),
    case("config.environment", "no such module", 'environment.name="nothing:f"'),
    case("config.environment", "other arguments", 'environment.name="mine.py:Game"', "environment.args={size=3}"),
    case("config.environment", "no such tool", 'environment.name="tools"', 'environment.tools=["mine.py:nothing"]'),
    case("config.environment", "no such agent", 'environment.name="agent"', 'environment.agent.command=["nothing"]'),
    case("config.environment", "rows name nothing", 'row_environment=[{agent_name="a", name="mine.py:nothing"}]'),
    case("config.environment", "rows name no environment", GAME, make=_named("play", "walk")),
    case(
        "config.environment",
        "held-out rows name no environment",
        GAME,
        "evaluation.path=held_out.jsonl",
        make=_named("play", held_out="walk"),
    ),
    case("config.extra", "an engine that is not there", 'producers.engine="nothing:f"'),
    case("config.filter", "a filter that is not there", 'buffer.filters=["mine.py:nothing"]'),
    case("config.missing", "no rewards", "reward=[]"),
    case("config.model", "no such folder", "model.path=elsewhere"),
    case("config.model", "too few positions", make=lambda p, _: [p.model(max_position_embeddings=48)][1:]),
    case("config.model", "an unknown architecture", make=lambda p, _: [p.model(model_type="nothing")][1:]),
    case("config.model", "adapters without a layer", "learner.lora.rank=2", 'learner.lora.target_modules=["nothing"]',
         play=True),
    case("config.network", "open to everybody", "network.buffer=tcp://0.0.0.0:5599"),
    case("config.preset", "an unknown preset", "learner.algorithm.preset=nothing"),
    case("config.reward", "no such function", 'reward=[{function="mine.py:nothing"}]'),
    case("config.reward", "another signature", 'reward=[{function="mine.py:wrong_signature"}]'),
    case("config.template", "a template that refuses", make=lambda p, _: _chat(p, template=STUBBORN)),
    case("config.template", "a template that forgets", 'environment.name="mine.py:Game"',
         make=lambda p, _: _chat(p, template=FORGETFUL), play=True),
    case("config.tokenizer", "chat without a template", make=lambda p, _: _chat(p)),
    case("config.tokenizer", "no end of sequence", make=lambda p, _: [p.model(end=False)][1:]),
    case("config.tokenizer", "damaged", make=_damaged_tokenizer),
    case("config.tokenizer", "of another model", make=lambda p, _: [p.model(vocab_size=8)][1:]),
    case("config.trust", "only its own code can read it",
         make=lambda p, _: [p.model(model_type="own", auto_map={"AutoConfig": "own.Own"})][1:]),
    case("config.type", "an unknown environment", 'environment.name="nothing"'),
    case("config.unknown_key", "a misspelled setting", "sampling.group_sise=4"),
    case("file.refused", "a file in the way", make=_a_file_is_there),
    case("net.port_in_use", "a port in use", make=_taken_port),
    case("sandbox.unavailable", "no bubblewrap", 'reward=[{function="builtin:code"}]', make=_no_programs),
    case("store.no_server", "no Redis", "buffer.store=redis", make=_no_programs),
)  # fmt: skip


def codes_of_roles() -> set[str]:
    """Codes that ask for another configuration, in the text of the roles and of what they share."""
    found = set()
    for folder in (*ROLES, *SHARED):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            found |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {code for code in found if code in CATALOGUE and CATALOGUE[code].exit_code == EXIT_CONFIG}


def test_every_code_has_a_case() -> None:
    with_case = {case.code for case in CASES} | {"config.file"}
    assert codes_of_roles() - with_case == set(LATER)
    assert not with_case & set(LATER)


def test_the_configuration_itself_is_right(place: Place) -> None:
    checked = place.check(play=True)
    assert checked.errors == []
    shown = {finding.name: f"{finding.value} {finding.arithmetic}" for finding in checked.findings}
    assert shown["prompt lengths"].startswith("4 to 5 tokens, median 4")
    assert "'0+1='" in shown["first prompt"] or "+1='" in shown["first prompt"]
    assert shown["first reward"].startswith("1 right of the answer ")


@pytest.mark.parametrize("wrong", CASES, ids=lambda wrong: f"{wrong.code}-{wrong.title.replace(' ', '-')}")
def test_a_mistake_is_found(wrong: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [*wrong.overrides, *(wrong.make(place, monkeypatch) if wrong.make else [])]
    errors = place.check(*overrides, play=wrong.play).errors
    assert {error.code for error in errors} == {wrong.code}, "\n".join(error.render() for error in errors)
    assert all(error.where and error.remedy for error in errors)


def test_a_file_that_is_not_there(place: Place) -> None:
    assert [error.code for error in check_files(place.root / "none.toml")[1].errors] == ["config.file"]


def test_everything_at_once(place: Place) -> None:
    place.model(end=False, max_position_embeddings=48)
    errors = place.check(
        'environment.name="mine.py:nothing"',
        'buffer.filters=["mine.py:nothing"]',
        'reward=[{function="mine.py:nothing"}]',
        "evaluation.path=elsewhere.jsonl",
    ).errors
    assert sorted(error.code for error in errors) == [
        "config.data",
        "config.environment",
        "config.filter",
        "config.model",
        "config.reward",
        "config.tokenizer",
    ]


def test_the_last_line_of_a_role_is_said_before(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """The words of check are those with which the producer would end."""
    place.model(end=False)
    [error] = place.check().errors
    from producers.data.tokenizer import Tokenizer

    with pytest.raises(AsyncRLError) as refused:
        Tokenizer("model", trust_remote_code=False)
    assert refused.value.message in error.message and refused.value.code == error.code


def test_some_long_prompts_are_a_note(place: Place) -> None:
    place.rows({"prompt": "1+1=", "answer": "2"}, {"prompt": "9" * 40, "answer": "9"})
    checked = place.check()
    assert checked.errors == []
    [note] = [note for note in checked.notes if "set aside" in note]
    assert note.startswith("1 of 2 rows would be set aside; the first: too_long: 40 tokens")


def test_the_first_row_is_played(place: Place) -> None:
    checked = place.check('environment.name="mine.py:Game"', play=True)
    shown = {finding.name: f"{finding.value} {finding.arithmetic}" for finding in checked.findings}
    assert shown["first episode"].startswith("2 turns, reward 2")


def test_a_row_of_every_environment_is_played(place: Place) -> None:
    _named("", "", "play")(place, pytest.MonkeyPatch())
    checked = place.check(GAME, play=True)
    shown = {finding.name: f"{finding.value} {finding.arithmetic}" for finding in checked.findings}
    assert checked.errors == [] and shown["first episode play"].startswith("2 turns, reward 2")


def test_a_reward_that_fails_is_a_note(place: Place) -> None:
    (place.root / "mine.py").write_text("def right(prompts, completions, **_):\n    raise ValueError('not today')\n")
    checked = place.check(play=True)
    assert checked.errors == []
    assert any("raised" in note and "not today" in note for note in checked.notes)


def test_variables_of_rewards_are_not_seen_by_environments(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    spy = "import os, pathlib\npathlib.Path('seen').write_text(os.environ.get('JUDGE_KEY', 'nothing'))\n"
    (place.root / "spy.py").write_text(spy + "async def play(chat, row):\n    await chat.say()\n    return 1.0\n")
    reward = 'reward=[{function="mine.py:right", env=["JUDGE_KEY"]}]'
    checked = place.check('environment.name="spy.py:play"', reward, play=True)
    assert checked.errors == [] and (place.root / "seen").read_text() == "nothing"
    assert any("were not played: JUDGE_KEY" in note for note in checked.notes)


def test_a_launch_builds_the_parts_and_plays_nothing(place: Place) -> None:
    place.rows(*({"prompt": "1+1=", "answer": "2"} for _ in range(3)))
    names = {finding.name for finding in place.check().findings}
    assert "prompt lengths" in names and not names & {"first reward", "first episode"}


def test_with_another_mistake_the_parts_are_not_tried(place: Place) -> None:
    checked = place.check("sampling.group_sise=4")
    assert "the parts of roles were not tried: correct the other mistakes first" in checked.notes


# ---------------------------------------------------------------- paths


@pytest.fixture
def elsewhere(
    place: Place, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    monkeypatch.chdir(tmp_path_factory.mktemp("shell"))
    yield place


def test_files_next_to_the_configuration_are_found(elsewhere: Place) -> None:
    config, checked = check_files(elsewhere.root / "run.toml", [])
    assert checked.errors == [] and config is not None
    assert config.data.path == str(elsewhere.root / "rows.jsonl")
    assert config.run.dir == "runs/mine"  # written: from the folder of the shell


def test_the_folder_of_the_shell_comes_first(elsewhere: Place) -> None:
    Path("rows.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n")
    config, checked = check_files(elsewhere.root / "run.toml", [])
    assert checked.errors == [] and config is not None
    assert config.data.path == "rows.jsonl"


def test_an_error_names_the_places_that_were_tried(elsewhere: Place) -> None:
    (elsewhere.root / "rows.jsonl").unlink()
    [error] = elsewhere.check().errors
    assert f"tried {Path.cwd() / 'rows.jsonl'} and {elsewhere.root / 'rows.jsonl'}" in error.message


def test_the_home_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place.root))
    settings = ['model.path="~/model"', 'data.path="~/rows.jsonl, rows.jsonl"', 'run.dir="~/runs/mine"']
    config, checked = check_files(place.root / "run.toml", settings)
    assert checked.errors == [] and config is not None
    assert config.model.path == str(place.root / "model") and config.run.dir == str(place.root / "runs/mine")
    assert config.data.path == f"{place.root / 'rows.jsonl'},rows.jsonl"


def test_the_command_shows_lengths_and_the_first_row(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.toml"]) == 0
    shown = capsys.readouterr().out
    assert "prompt lengths" in shown and "first prompt" in shown and "first reward" in shown
    assert os.listdir(place.root).count("runs") == 0  # nothing was written
