"""explain, diff, init, dry run and schema: what they say, what they write, and what they leave alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from quick_checks import no_parts_are_tried  # noqa: F401

from asyncrl import metrics
from asyncrl.cli import main
from asyncrl.config import Config, all_keys, dump, load, parse, redact, schema
from asyncrl.config.json_schema import meanings
from asyncrl.config.suggestions import list_sections
from asyncrl.configure.diff import differences
from asyncrl.configure.explain import error_texts, explain
from asyncrl.configure.proposal import proposed_settings
from asyncrl.configure.wizard import QUESTIONS, complete, format_toml
from asyncrl.errors import CATALOGUE, ConfigError
from asyncrl.launcher.dry_run import mask_passwords
from asyncrl.metrics import CATALOGUE as METRICS
from asyncrl.preflight import check as check_module
from asyncrl.preflight.hub import Settled
from asyncrl.preflight.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
GOOD = '[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n[[reward]]\nfunction = "my_reward:good"\n'
PLAIN = Machine(cores=2, memory_bytes=8 * GIB, devices={"cuda": 0, "npu": 0}, disk_free_bytes=GIB, shm_free_bytes=GIB)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    (tmp_path / "my_reward.py").write_text("def good(data_source, solution_str, ground_truth):\n    return 1.0\n")
    return tmp_path


# ---------------------------------------------------------------- budgets, in modules: time depends on the machine


@pytest.mark.parametrize(
    ("words", "most"),
    [(["--help"], 130), (["explain", "hang"], 260), (["schema"], 290), (["check", "none.toml"], 460)],
)
def test_commands_import_little(words: list[str], most: int, place: Path) -> None:
    code = (
        "import sys\nfrom asyncrl.cli import main\n"
        "try:\n main(sys.argv[1:])\nexcept SystemExit:\n pass\n"
        "print('modules:', *sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    modules = done.stderr.split("modules:")[1].split()
    heavy = {"torch", "redis", "transformers", "vllm", "sglang", "pyarrow", "rich", "aiohttp", "sympy", "hypothesis"}
    assert heavy & {name.partition(".")[0] for name in modules} == set()
    assert len(modules) <= most, sorted(modules)


# ---------------------------------------------------------------- explain


def test_every_code_has_a_text() -> None:
    lacking = sorted(set(CATALOGUE) - set(error_texts()))
    assert not lacking, (
        f'add to asyncrl/configure/error_texts.toml: ["{lacking[0]}"] with cause, example and do; all: {lacking}'
    )
    assert set(error_texts()) <= set(CATALOGUE), "texts of codes that are gone"


def test_the_texts_say_more_than_the_catalogue() -> None:
    for code, text in error_texts().items():
        assert text.example.startswith(f"error[{code}]"), code
        assert len(text.cause) > 30 and len(text.do) > 20 and text.do != CATALOGUE[code].remedy, code
        assert text.cause.endswith(".") and text.do.endswith("."), code


def test_everything_can_be_explained() -> None:
    for name in (*CATALOGUE, *all_keys(), *list_sections(Config), *METRICS):
        assert len(explain(name).splitlines()) >= 2, name
    assert "final" in explain("config.file") and "restarted" in explain("internal")
    assert "error[hang]" in explain("error[hang]")
    assert "elsewhere called: " in explain("buffer.max_staleness") and "int >= 0" in explain("buffer.max_staleness")
    assert "max_staleness = 4" in explain("[buffer]")
    assert metrics.OPEN[0] in explain(f"{metrics.OPEN[0]}x")


def test_without_a_name_all_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {code} " in listed for code in CATALOGUE)
    assert main(["explain", "buffer.max_stalenes"]) == 2
    assert "did you mean buffer.max_staleness" in capsys.readouterr().err


# ---------------------------------------------------------------- diff


def test_two_ways_to_write_the_same_are_no_difference(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "a.toml").write_text(GOOD)
    (place / "b.toml").write_text(GOOD + "[buffer]\nmax_staleness = 4\n[learner.optim]\nlr = 1e-6\n")
    assert main(["diff", "a.toml", "b.toml"]) == 0
    assert "come to the same" in capsys.readouterr().out


def test_differences_are_grouped_and_say_what_is_default(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "a.toml").write_text(GOOD)
    more = GOOD + '[[reward]]\nfunction = "my_reward:other"\n[buffer]\nmax_staleness = 8\n[learner.optim]\nlr = 1e-5\n'
    (place / "run").mkdir()
    (place / "run" / "config.toml").write_text(more)
    assert main(["diff", "a.toml", "run"]) == 1
    said = capsys.readouterr().out
    assert "[buffer]\n  max_staleness" in said and "4 (default) -> 8" in said
    assert "[learner.optim]\n" in said and "[reward[1]]\n" in said and '- -> "my_reward:other"' in said
    assert main(["diff", "a.toml", "run", "--json"]) == 1
    told = {one["key"]: (one["left"], one["right"]) for one in json.loads(capsys.readouterr().out)}
    assert said.splitlines()[0] == f"a.toml -> run: {len(told)} settings differ" and len(told) >= 6
    assert told["learner.optim.lr"] == (1e-6, 1e-5) and told["reward[1].function"] == (None, "my_reward:other")
    assert main(["diff", "a.toml", str(place)]) == 2  # a folder that is no run
    assert main(["diff", "a.toml", "none.toml"]) == 2


def test_a_preset_differs_by_what_it_sets() -> None:
    plain, preset = parse(GOOD), parse(GOOD, overrides=["learner.algorithm.preset=dapo"])
    keys = {one.key for one in differences(plain, preset)}
    assert "learner.algorithm.preset" in keys and "learner.algorithm.shaping.overlong_buffer" in keys


# ---------------------------------------------------------------- init


def test_what_init_writes_is_accepted(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", "--model", "model", "--data", "rows.jsonl", "--name", "one"]
    assert main(words) == 0
    made = load(Path("one.toml"))
    assert (made.run.dir, made.data.prompt_key, made.reward[0].function) == ("runs/one", "question", "my_rewards:exact")
    assert "no mistakes" not in capsys.readouterr().err
    assert main(["check", "one.toml"]) == 0
    assert main(words) == 2  # the file exists
    assert main([*words, "--force", "--reward", "my_reward:good"]) == 0
    assert load(Path("one.toml")).reward[0].function == "my_reward:good"


def test_the_written_reward_works_and_is_not_overwritten(place: Path) -> None:
    assert main(["init", "a.toml", "--model", "model", "--data", "rows.jsonl"]) == 0
    spec = importlib.util.spec_from_file_location("written_rewards", "my_rewards.py")
    assert spec is not None and spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert (written.exact("", "it is 4 ", "4"), written.exact("", "5", "4")) == (1.0, 0.0)
    Path("my_rewards.py").write_text("mine = 1\n")
    assert main(["init", "b.toml", "--model", "model", "--data", "rows.jsonl"]) == 2
    assert Path("my_rewards.py").read_text() == "mine = 1\n" and not Path("b.toml").exists()


def test_init_says_what_is_wrong_with_the_answers(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a.toml", "--model", "nowhere", "--data", "none.jsonl", "--reward", "my_reward:good"]) == 2
    said = capsys.readouterr().err
    assert "error[config.model] a.toml:" in said and "error[config.data] a.toml:" in said


def test_answers_come_from_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("answers.toml").write_text(
        'model = "model"\ndata = "rows.jsonl"\nreward = "my_reward:good"\npreset = "dapo"\n'
    )
    assert main(["init", "a.toml", "--answers", "answers.toml", "--name", "two"]) == 0
    made = load(Path("a.toml"))
    assert (made.run.name, made.learner.algorithm.preset) == ("two", "dapo")
    Path("answers.toml").write_text("size = 3\n")
    assert main(["init", "b.toml", "--answers", "answers.toml"]) == 2
    assert main(["init", "b.toml", "--answers", "none.toml"]) == 2
    assert main(["init", "b.toml", "--model", "model"]) == 2
    assert "no answer for --data" in capsys.readouterr().err


def test_five_questions_are_asked_and_have_defaults() -> None:
    asked: list[str] = []

    def answer(text: str) -> str:
        asked.append(text)
        return {0: "model", 1: "rows.jsonl"}.get(len(asked) - 1, "")

    answers = complete({}, answer)
    assert len(asked) == len(QUESTIONS) == 5 and answers["name"] == "first"
    assert complete({"model": "m", "data": "d"}, None)["preset"] == "grpo_decoupled"
    with pytest.raises(ConfigError, match="--model"):
        complete({"data": "d"}, None)


@pytest.mark.parametrize("devices", [{"cuda": 0, "npu": 0}, {"cuda": 8, "npu": 0}, {"cuda": 0, "npu": 2}])
def test_init_fits_the_machine_and_comments_every_setting(devices: Mapping[str, int]) -> None:
    machine = msgspec.structs.replace(PLAIN, devices=dict(devices))
    answers = {"model": 'a "quoted" name', "data": "d.jsonl", "reward": "a:b", "preset": "dapo", "name": "n"}
    text = format_toml(answers, machine)
    made = parse(text)
    assert made.model.path == 'a "quoted" name' and parse(text) == made
    count = sum(devices.values())
    assert made.learner.ranks + made.producers.count == max(2, count)
    assert all("  # " in line for line in text.splitlines() if " = " in line)
    assert set(proposed_settings(answers, machine)) <= set(all_keys())


# ---------------------------------------------------------------- rows of a hub


def test_epochs_count_the_rows_that_come_from_a_hub(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "rows.jsonl").write_text('{"prompt": "a"}\n' * 64)
    (place / "a.toml").write_text(GOOD.replace("rows.jsonl", "somebody/rows"))

    def settle(config: Config, *, fetch: bool) -> Settled:
        data = msgspec.structs.replace(config.data, path=str(place / "rows.jsonl"))
        return Settled(msgspec.structs.replace(config, data=data), [], [], frozenset())

    monkeypatch.setattr(check_module, "settle_hub", settle)
    config, _ = check_module.check_files([Path("a.toml")], ["data.epochs=2", "buffer.batch_groups=16"])
    assert config is not None and config.learner.steps == 8


# ---------------------------------------------------------------- dry run


def test_a_dry_run_shows_commands_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.dumps({"prompt": "1"}) + "\n"
    (place / "rows.jsonl").write_text(rows)
    (place / "a.toml").write_text(GOOD)
    before = sorted(place.rglob("*"))
    assert main(["launch", "all", "a.toml", "--dry-run", "--set", "producers.count=2", "--set", "run.dir=out"]) == 0
    said = capsys.readouterr().out
    parts = ("-m buffers.main", "--name producer-1", "-m learners.main", "export OMP_NUM_THREADS=1")
    assert [part for part in parts if part not in said] == []
    assert "6 processes would start; nothing was started or written" in said
    assert str(place / "out" / "config.toml") in said
    assert sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts) == before
    assert main(["launch", "producers", "a.toml", "--dry-run", "--json", "--connect", "tcp://10.0.0.1:5"]) == 0
    told = json.loads(capsys.readouterr().out)
    [producer] = told["processes"]
    assert producer["name"] == "producer-0" and producer["command"][-2:] == ["--connect", "tcp://10.0.0.1:5"]
    assert told["resumes"] is False


def test_a_dry_run_of_a_wrong_configuration_says_so(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "a.toml").write_text(GOOD + "[buffer]\nmax_stalnes = 1\n")
    assert main(["launch", "all", "a.toml", "--dry-run"]) == 2
    assert "config.unknown_key" in capsys.readouterr().err
    assert main(["launch", "all", "a.toml", "--json"]) == 2


def test_a_dry_run_says_what_changed_since(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "rows.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n")
    (place / "out").mkdir()
    (place / "out" / "config.toml").write_text(GOOD + "[buffer]\nmax_staleness = 2\n")
    (place / "a.toml").write_text(GOOD + '[run]\ndir = "out"\n')
    assert main(["launch", "all", "a.toml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "goes on with what is there" in said and "buffer.max_staleness: 2 -> 4" in said


def test_a_dry_run_shows_no_password_and_the_asked_judges(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "rows.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n")
    text = GOOD + '[run]\ndir = "out"\n[buffer]\nredis_url = "redis://:topsecret@h:1"\n'
    (place / "a.toml").write_text(text)
    (place / "out").mkdir()
    (place / "out" / "config.toml").write_text(dump(redact(parse(text))))
    assert main(["launch", "all", "a.toml", "--dry-run", "--set", "learner.steps=7"]) == 0
    said = capsys.readouterr().out
    assert "topsecret" not in said and "learner.steps: 100 -> 7" in said and "redis_url:" not in said


def test_passwords_do_not_stand_in_a_plan() -> None:
    assert mask_passwords("redis://user:secret@host:1/0") == "redis://user:***@host:1/0"
    assert mask_passwords("redis://:secret@host") == "redis://:***@host"
    assert mask_passwords("tcp://host:1") == "tcp://host:1"


# ---------------------------------------------------------------- schema


def test_the_schema_describes_every_setting_and_refuses_others() -> None:
    made = json.loads(json.dumps(schema()))
    known = meanings(Config)
    assert set(known) == set(all_keys()) and all(known.values())
    definitions = made["$defs"]
    assert definitions["BufferConfig"]["properties"]["max_staleness"]["description"] == known["buffer.max_staleness"]
    assert definitions["CriticConfig"]["properties"]["beta1"]["description"]  # inherited
    sections = [one for one in definitions.values() if one.get("type") == "object"]
    assert all(one["additionalProperties"] is False for one in sections) and len(sections) > 15
    assert definitions["ModelConfig"]["required"] == ["path"]
    assert definitions["BufferConfig"]["properties"]["store"]["enum"] == ["auto", "redis", "sqlite"]
