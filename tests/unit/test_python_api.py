"""The Python door without processes: the public names, functions as source, rows, and the configuration object."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_folder import CHAT, write_folder

import asyncrl
from asyncrl.config import load
from asyncrl.errors import AsyncRLError, ConfigError, ConfigErrors
from asyncrl.preflight.files import settle_steps
from asyncrl.python_api import run as runs
from asyncrl.python_api.function_source import write_functions
from asyncrl.python_api.settings import flatten, nest, write_rows
from asyncrl.runs.exported import exported_step, record_step
from asyncrl.runtime import hub
from asyncrl.runtime.run_dir import RunDir, launcher_mark

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"run.name": "a", "learner.optim.lr": 1e-4, "learner.algorithm.loss_options": {"beta": 1.0}}


def test_the_public_names_are_these_and_cost_nothing() -> None:
    assert sorted(asyncrl.__all__) == ["Config", "Run", "__version__", "launch", "train"]
    assert set(asyncrl.__all__) <= set(dir(asyncrl)) and all(getattr(asyncrl, name) for name in asyncrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'learn'"):
        _ = asyncrl.learn  # type: ignore[attr-defined]
    code = "import asyncrl, sys; print(sorted({'torch', 'redis', 'msgspec', 'pandas'} & {*sys.modules}))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"


# ---------------------------------------------------------------- functions as source


def in_main(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a script whose functions other processes cannot import; it writes them with `written`."""
    script = tmp_path / "script.py"
    head = (
        "import sys\nfrom pathlib import Path\nfrom asyncrl.python_api.function_source import write_functions\n"
        f"def written(*given):\n    return write_functions(Path({str(tmp_path)!r}) / 'code', list(given))\n"
    )
    script.write_text(head + textwrap.dedent(code))
    command = [sys.executable, str(script)]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=60)


def test_a_function_travels_with_what_it_names(tmp_path: Path) -> None:
    done = in_main(
        tmp_path,
        """
        import re
        import json as reader
        from collections import Counter
        LIMIT, TABLE = 3, {"a": (1, 2.5)}

        class Words:
            def __init__(self, text):
                self.count = Counter(re.findall("[a-z]", text))

        def helper(text, most=LIMIT):
            return min(most, sum(Words(text).count.values())) * TABLE["a"][1]

        def outer(scale):
            def right(prompts, completions, **columns: "Columns"):
                seen: list[Unknown] = []
                for completion in completions:
                    seen.append(scale * helper(completion) + len(reader.dumps(0)))
                return [value for value in seen]
            return right

        print(written(outer(2.0)))
        """,
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "code" / "functions.py"
    assert done.stdout.strip() == str([f"{path}:right"])
    names: dict[str, Any] = {"__name__": "elsewhere"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert names["right"](["p"], ["ab1", "abcdef"]) == [2.0 * 2 * 2.5 + 1, 2.0 * 3 * 2.5 + 1]
    manifest = json.loads((path.parent / "manifest.json").read_text())
    assert len(manifest["sha256"]) == 64 and {"right", "helper", "Words", "LIMIT"} <= set(manifest["names"])


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("right = lambda completions, **_: [0.0]", "lambda"),
        ("file = open(__file__)\ndef right(completions):\n    return [file.read()]", "uses file, a TextIOWrapper"),
        ("class Model:\n    pass\nmodel = Model()\ndef right(completions):\n    return model", "uses model, a Model"),
        (
            "def right(completions):\n    return [missing(c) for c in completions]",
            "names missing, which is not defined",
        ),
        ("exec('def right(completions): return 0')", "its source is not known"),
    ],
    ids=["lambda", "file", "object", "undefined", "without source"],
)
def test_what_has_no_text_is_refused_with_the_reason(code: str, says: str, tmp_path: Path) -> None:
    done = in_main(tmp_path, code + "\nwritten(right)\n")
    assert done.returncode and "error[config.reward]" in done.stderr and says in done.stderr, done.stderr
    assert not (tmp_path / "code").exists()


def test_the_types_of_a_function_travel_if_they_can(tmp_path: Path) -> None:
    """Whoever reads the types of a loss finds them; those without a text are no reason to refuse it."""
    done = in_main(
        tmp_path,
        """
        import types
        from fractions import Fraction
        Secret = types.SimpleNamespace(kind=open)

        def loss(inputs: Fraction, secret: Secret, *, most: float = 2.0) -> "Fraction":
            return inputs

        print(written(loss))
        """,
    )
    assert done.returncode == 0, done.stderr
    code = f"import typing, asyncrl.plugins as p; f = p.load_object('{tmp_path}/code/functions.py:loss', code='x'); "
    code += "f.__annotations__.pop('secret'); print(typing.get_type_hints(f)['inputs'])"
    out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert out.strip() == "<class 'fractions.Fraction'>"


def test_a_function_of_a_module_keeps_its_name(tmp_path: Path) -> None:
    assert write_functions(tmp_path / "code", [textwrap.dedent]) == ["textwrap:dedent"]
    assert not (tmp_path / "code").exists()


# ---------------------------------------------------------------- rows


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def test_rows_of_every_kind(tmp_path: Path) -> None:
    import pandas
    import pyarrow

    tables = [ROWS, iter(ROWS), pandas.DataFrame(ROWS), pyarrow.Table.from_pylist(ROWS)]
    for number, table in enumerate(tables):
        path = Path(write_rows(table, tmp_path / f"{number}.jsonl"))
        assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS
    assert write_rows("rows.parquet", tmp_path / "x") == "rows.parquet" and not (tmp_path / "x").exists()


@pytest.mark.parametrize("rows", [7, [1, 2], [{"x": object()}], []], ids=["number", "numbers", "objects", "none"])
def test_what_is_no_table_is_refused(rows: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        write_rows(rows, tmp_path / "rows.jsonl")
    assert error.value.code == "config.data" and error.value.remedy


# ---------------------------------------------------------------- the configuration


def test_dotted_keys_and_back() -> None:
    assert flatten(nest(SETTINGS)) == SETTINGS
    resolved = load(ROOT / "configs" / "quickstart.toml")
    assert nest(flatten(msgspec.to_builtins(resolved))) == msgspec.to_builtins(resolved)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def test_a_configuration_is_built_checked_saved_and_read(model: Path, tmp_path: Path) -> None:
    given = {"learner.steps": 7, "learner.algorithm.preset": "dapo", "buffer.max_staleness": 3}
    config = asyncrl.Config.build(
        model, ROWS, ["builtin:exact"], dir=tmp_path / "run", evaluation=ROWS[:1], settings=given
    )
    assert config.check() == [] and config["learner.steps"] == 7
    path = config.save(tmp_path / "mine.toml")
    read = load(path)
    assert (read.learner.steps, read.buffer.max_staleness, read.learner.algorithm.clip_high) == (7, 3, 0.28)
    assert read.reward[0].function == "builtin:exact" and Path(read.run.dir) == tmp_path / "run"
    again = asyncrl.Config.open(path)
    assert load(again.save(tmp_path / "again.toml")) == read


def test_numbers_fit_a_model_by_its_name_on_the_hub_or_in_the_home_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(model, template=CHAT)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "look_up", lambda *_: hub.OnHub(model, {"model.safetensors": 10}))
    for name in ("somebody/tiny", "~/model"):
        config = asyncrl.Config.build(name, ROWS, ["builtin:exact"], dir="~/runs/a")
        assert (config["learner.optim.lr"], config["data.as_chat"]) == (1e-4, True), name
        assert config["data.max_prompt_tokens"] < 512 and config["model.path"] == name
        assert Path(config["run.dir"]) == tmp_path / "runs" / "a" == asyncrl.Run("~/runs/a").folder


def test_a_name_that_the_hub_does_not_answer_for_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def unreachable(*_: object) -> hub.OnHub:
        raise ConfigError("config.model", "no such folder, and not on the hub: no network")

    monkeypatch.setattr(hub, "look_up", unreachable)
    with pytest.raises(ConfigErrors, match="not on the hub"):
        asyncrl.Config.build("somebody/tiny", ROWS, ["builtin:exact"], dir="run")


def test_every_mistake_is_told_before_anything_starts(model: Path, tmp_path: Path) -> None:
    config = asyncrl.Config.build(model, ROWS, ["builtin:exact"], dir=tmp_path / "run")
    config["buffer.max_stalenes"], config["learner.steps"] = 3, -1
    assert sorted(error.code for error in config.check()) == ["config.type", "config.unknown_key"]
    with pytest.raises(ConfigErrors):
        asyncrl.launch(config)
    with pytest.raises(ConfigErrors):
        asyncrl.launch(config.save(tmp_path / "mine.toml"))
    assert not (tmp_path / "run" / "logs").exists()
    with pytest.raises(ConfigError, match="no reward"):
        asyncrl.Config.build(model, ROWS, [], dir=tmp_path / "run")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        asyncrl.Run.open(tmp_path)
    assert error.value.code == "run.missing"


def test_a_run_that_went_back_is_at_the_step_it_went_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lines = [{"step": step, "t": 1.0} for step in (1, 2, 3, 2)]
    (folder / "metrics").mkdir(parents=True)
    (folder / "metrics" / "learner.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert asyncrl.Run(folder).step == 2


# ---------------------------------------------------------------- runs and their launchers


def test_a_second_start_of_a_running_run_is_refused_and_changes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(asyncrl.Run, "start", lambda _: pytest.fail("a launcher was started"))
    config = asyncrl.Config.build(model, ROWS, ["builtin:exact"], dir=folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    launcher = RunDir(folder).create().lock(launcher_mark("all"))  # as a launcher holds it
    try:
        for start in (
            lambda: asyncrl.train(model, ROWS[:1], ["builtin:exact"], dir=folder),
            lambda: asyncrl.launch(config),
        ):
            with pytest.raises(AsyncRLError, match="launcher of all runs") as error:
                start()
            assert error.value.code == "service.duplicate"
        assert before == {path: path.read_bytes() for path in before}
        assert not (folder / "python.toml").exists() and not any((folder / "logs").iterdir())
    finally:
        launcher.close()
    with RunDir(folder).lock(launcher_mark("producers")), pytest.raises(pytest.fail.Exception, match="was started"):
        asyncrl.launch(config)  # further producers wait until the run goes on


def with_launcher(monkeypatch: pytest.MonkeyPatch, run: asyncrl.Run, code: str) -> asyncrl.Run:
    """The run with a launcher that runs this code."""
    monkeypatch.setattr(runs, "guard_command", lambda _: [sys.executable, "-c", code])
    return run.start()


def test_the_output_of_earlier_launchers_stays_and_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = asyncrl.Run(RunDir(tmp_path / "run").create().root)
    for word in ("first", "second"):
        with pytest.raises(AsyncRLError, match=f"with code 3:\n{word}\n  ->") as error:
            with_launcher(monkeypatch, run, f"print('{word}'); exit(3)").wait(progress=False, timeout_s=60.0)
        assert error.value.code == "role.failed"
    assert (run.folder / "logs" / runs.OUTPUT).read_text() == "first\nsecond\n"


def test_a_timeout_of_on_step_stops_the_run_and_that_of_wait_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = asyncrl.Run(RunDir(tmp_path / "run").create().root)
    with_launcher(monkeypatch, run, "import time; time.sleep(100)")

    def slow(_: object) -> None:
        raise TimeoutError("an address did not answer")

    try:
        with pytest.raises(TimeoutError, match="did not end in time"):
            run.wait(progress=False, timeout_s=0.0)
        assert run.running
        (run.folder / "metrics" / "learner.jsonl").write_text(json.dumps({"step": 1, "t": 1.0}) + "\n")
        with pytest.raises(TimeoutError, match="an address"):
            run.wait(slow, progress=False, timeout_s=60.0)
        assert not run.running
    finally:
        run.stop()


def test_files_of_a_run_are_replaced_and_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The renamed file is new: a process that has opened the old one reads that to its end."""
    path = tmp_path / "rows.jsonl"
    write_rows(ROWS, path)
    config = asyncrl.Config({"run.name": "a"})
    saved = config.save(tmp_path / "a.toml")
    with path.open() as rows, saved.open() as settings:
        write_rows(ROWS[:1], path)
        asyncrl.Config({}).save(saved)
        assert len(rows.readlines()) == 2 and settings.read() == config.text()
    assert len(path.read_text().splitlines()) == 1 and saved.read_text() == ""


def export(run: asyncrl.Run, *, step: int, whole: bool = True) -> None:
    """Write what a learner exports."""
    with contextlib.suppress(InterruptedError), record_step(run.files, step, lead=True):
        run.files.export.mkdir(parents=True, exist_ok=True)
        (run.files.export / "config.json").write_text("{}")
        if not whole:
            raise InterruptedError


def test_the_step_of_exported_weights_is_that_of_the_last_whole_export(tmp_path: Path) -> None:
    run = asyncrl.Run(tmp_path)
    assert exported_step(run.files) is None
    export(run, step=100)
    run.files.result.write_text(json.dumps({"steps": 150}))  # continued, and stopped
    assert exported_step(run.files) == 100
    export(run, step=200, whole=False)
    assert exported_step(run.files) is None
    with pytest.raises(ConfigError, match="no exported weights"):
        run.evaluate(ROWS)
    run.files.result.write_text(json.dumps({"steps": 200, "ledger": {}}))  # of a version that wrote no such file
    assert exported_step(run.files) == 200


def test_an_evaluation_is_one_step_that_leaves_no_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that takes its steps from epochs, and has held-out rows and trackers of its own."""
    given = {
        "data.epochs": 3, "evaluation.source": "textwrap:dedent", "evaluation.every": 5, "log.archive": True,
        "learner.checkpoint_best": 1, "learner.checkpoint_metric": "val-core/all/reward/mean@1",
        "trackers.use": ["wandb"], "trackers.prometheus_port": 9000,
    }  # fmt: skip
    run = asyncrl.Run(tmp_path / "run")
    asyncrl.Config.build(model, ROWS, ["builtin:exact"], dir=run.folder, settings=given).save(run.files.config)
    export(run, step=40)
    launched = []

    def launch(config: asyncrl.Config, *, progress: bool) -> None:
        made = settle_steps(load(config.save(tmp_path / "short.toml")))
        assert (made.learner.steps, made.trackers.use, made.trackers.prometheus_port) == (1, (), 0)
        assert not made.log.archive and made.evaluation.at_start and made.model.path == str(run.files.export)
        files = RunDir(Path(made.run.dir)).create()
        for folder in (files.checkpoints, files.export, files.segments):
            folder.mkdir(exist_ok=True)
            (folder / "weights").write_text("large")
        (files.metrics / "evaluation.jsonl").write_text('{"step": 0, "evaluation_scored": 2}\n')
        launched.append(files)
        if len(launched) == 2:
            raise AsyncRLError("role.failed", "it failed")

    monkeypatch.setattr(runs, "launch", launch)
    assert run.evaluate(ROWS) == {"evaluation_scored": 2, "version": 40}
    with pytest.raises(AsyncRLError, match="it failed"):
        run.evaluate(ROWS)
    for files in launched:
        assert not list(files.root.rglob("weights")) and (files.root / "data.jsonl").exists()
