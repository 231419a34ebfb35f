"""Python of a model folder against every command and role: it runs only with `trust_remote_code = true`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from e2e_run import Run
from planted_code import marks, plant

from asyncrl.cli import parser
from asyncrl.config import load
from asyncrl.process_plan.plan import MODULES
from learners.service.messages import ServicePaths
from learners.service.trainer import Trainer

#: Commands that get a model folder, directly or by a configuration or a run; {..} are filled in below.
GIVEN = {
    "check": "check {config}",
    "plan": "plan {config} --from {run} --steps 2",
    "launch": "launch all {config}",
    "export": "export {run}",
    "replay": "replay {run}",
    "rescore": "rescore {run}",
    "fork": "fork {run} {folder}/fork --step 8",
    "trace": "trace {run} 0",
    "samples": "samples {run}",
    "report": "report {run}",
    "audit": "audit {run}",
    "status": "status {run} --json",
    "top": "top {run} --once --plain",
    "metrics": "metrics {run}",
    "diff": "diff {config} {run}",
    "tune": "tune {run} --list",
    "stop": "stop {run}",
    "test-env": "test-env my_turns:once --config {config}",
}
#: Those that never see one, with the reason.
WITHOUT = {
    "demo": "makes its model itself",
    "init": "writes the path of the folder down",
    "explain": "has a name alone",
    "presets": "has a name alone",
    "schema": "has no argument",
    "keys": "makes keys",
    "new": "writes a file",
    "test-reward": "has rows and a function",
    "test-loss": "has made tensors and a function",
    "sandbox-server": "runs programs in the sandbox",
    "doctor": "looks at the machine",
    "serve": "does not end by itself: a test of its own trainer",
}
#: Commands that read the model by transformers, so that they run its code if they may.
RUN_IT = ("launch", "export", "replay", "test-env")
TURNS = """
async def once(chat, row):
    await chat.say()
    await chat.say("1")
    return 0.0
"""
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_the_lists_are_complete() -> None:
    [commands] = [one for one in parser()._actions if isinstance(one, argparse._SubParsersAction)]
    assert GIVEN.keys() | WITHOUT.keys() == set(commands.choices) and not GIVEN.keys() & WITHOUT.keys()


def prepare(run: Run, model: Path, *, trust: bool) -> Path:
    """A run with a planted model as policy, critic and, without the permission, as a judge. Return its folder."""
    folder = plant(model, run.folder / f"{run.folder.name}-{'trusted' if trust else 'planted'}")
    (run.folder / "my_turns.py").write_text(TURNS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines = (run.folder / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    chats = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (run.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    text = run.config.read_text().replace(f'path = "{model}"', f'path = "{folder}"')
    text = text.replace('dtype = "float32"\n', f'dtype = "float32"\ntrust_remote_code = {str(trust).lower()}\n')
    text = text.replace("[learner]\nsteps = 5\n", "[learner]\nsteps = 8\ndevice = 'cpu'\n")
    text = text.replace("[producers]\n", "[producers]\ndevice = 'cpu'\n")
    text = text.replace("[log]\n", "[log]\narchive = true\n")
    if not trust:
        text += '[learner.algorithm]\nadvantage = "gae"\n[[reward]]\njudge = "scorer"\n'
        text += f'[[judge]]\nname = "scorer"\nkind = "classifier"\nmodel = "{folder}"\nlabel = 0\ndevice = "cpu"\n'
        text += (
            f'[evaluation]\npath = "{run.folder}/prompts.jsonl"\nmax_prompts = 4\nat_end = true\nlane = "evaluators"\n'
        )
    run.config.write_text(text)
    return folder


def words_of(run: Run, name: str) -> list[str]:
    values = {"config": run.config, "run": run.dir, "folder": run.folder}
    return GIVEN[name].format(**values).split()


@pytest.mark.long
def test_no_command_and_no_role_runs_it(run: Run, tiny_model: Path) -> None:
    model = prepare(run, tiny_model, trust=False)
    names = ["check", "launch", *(name for name in GIVEN if name not in ("check", "launch", "plan")), "plan"]
    for name in names:
        done = run.command(*words_of(run, name))
        assert done.returncode in (0, 1, 69), f"{name}: {done.stdout}\n{run.logs()}"
        assert marks(model) == set(), name
    assert {line["role"] for line in run.lines("processes.jsonl")} >= set(MODULES)
    assert {"reward-scorer-0"} <= {line["name"] for line in run.lines("processes.jsonl")}
    assert run.steps() == list(range(1, 9))


@pytest.mark.chaos
def test_with_the_permission_they_do(run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other test can fail. These are processes of their own: transformers has a folder for such code."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(run.folder / "modules"))
    run.fresh = True
    model = prepare(run, tiny_model, trust=True)
    for name in RUN_IT:
        done = run.command(*words_of(run, name))
        assert marks(model), f"{name}: {done.stdout}\n{run.logs()}"


def test_the_trainer_of_a_service_runs_none(tiny_model: Path, tmp_path: Path) -> None:
    model = plant(tiny_model, tmp_path / "planted")
    file = tmp_path / "service.toml"
    file.write_text(f'[run]\ndir = "{tmp_path}/run"\n[model]\npath = "{model}"\n[service]\nport = 8000\n')
    config = load(file)
    paths = ServicePaths(config.run_dir)
    paths.folder.mkdir(parents=True)
    said: list[str] = []
    Trainer(config, paths, said.append).run(lambda _seconds: False)
    assert said == ["ready"] and marks(model) == set()
