"""CONTRIBUTING.md says which files an extension touches: here one of each kind is added to a copy of the product."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from second_edits import missing_edits

ROOT = Path(__file__).parents[2]
PACKAGES = ("asyncrl", "buffers", "learners", "producers", "weightsync")

#: Edits by kind: file -> (old text, new text, old text, new text, ...); an empty old text is a new file.
LOSS = {
    "learners/algorithms/token_losses.py": (
        "def reinforce(",
        "def mirrored(inputs: LossInputs, *, scale: float = 1.0) -> TokenLoss:\n"
        "    return reinforce(inputs)\n\n\n"
        "def reinforce(",
    ),
    "learners/algorithms/losses.py": (
        '    "ppo",\n',
        '    "mirrored",\n    "ppo",\n',
        "import aipo,",
        "import mirrored, aipo,",
    ),
    "asyncrl/config/sections/algorithm_catalogue.py": (
        "LOSSES: dict[str, Entry] = {\n",
        'LOSSES: dict[str, Entry] = {\n    "mirrored": Entry("losses:mirrored", ratio="none"),\n',
    ),
}
FORM = {
    "producers/rewards/forms/paired.py": (
        "",
        "from producers.rewards.forms.base import Form\n\n\n"
        "class Paired(Form):\n"
        '    name = "paired"\n'
        '    signature = "reward(left, right)"\n\n'
        "    @classmethod\n"
        "    def claims(cls, parameters):\n"
        '        return {"left", "right"} <= parameters.names\n\n'
        "    def keywords(self, samples):\n"
        '        return {"left": samples[0].response, "right": samples[0].ground_truth}\n',
    ),
    "producers/rewards/forms/__init__.py": (
        "FORMS: tuple[type[Form], ...] = (",
        "from producers.rewards.forms.paired import Paired\n\nFORMS: tuple[type[Form], ...] = (Paired, ",
    ),
}
ENGINE = {
    "producers/engines/echo.py": (
        "",
        "from producers.engines.dataset import DatasetEngine\n\n\nclass EchoEngine(DatasetEngine):\n    pass\n",
    ),
    "asyncrl/plugins.py": (
        '    "asyncrl.engines": {\n',
        '    "asyncrl.engines": {\n        "echo": "producers.engines.echo:EchoEngine",\n',
    ),
}
TRANSPORT = {
    "weightsync/transports/tape.py": (
        "",
        "from weightsync.transports.disk import DiskInbox, DiskOutbox\n\n\n"
        "class TapeInbox(DiskInbox):\n    pass\n\n\nclass TapeOutbox(DiskOutbox):\n    pass\n",
    ),
    "weightsync/transports/catalogue.py": (
        "    raise KeyError(name)\n",
        '    if name == "tape":\n'
        "        from weightsync.transports.tape import TapeOutbox\n\n"
        "        return TapeOutbox(config.disk_dir or str(run_dir / DISK_FOLDER))\n"
        "    raise KeyError(name)\n",
        '    return {"local": local, "collective": collective, "stream": stream, "disk": disk, "direct": collective}\n',
        "    from weightsync.transports.tape import TapeInbox\n\n"
        '    return {"local": local, "collective": collective, "stream": stream, "disk": disk, "direct": collective}'
        ' | {"tape": TapeInbox}\n',
    ),
    "asyncrl/config/sections/weightsync.py": ('"disk", "direct"]', '"disk", "direct", "tape"]'),
    "weightsync/publisher/outboxes.py": (
        '    "disk": ("disk",),\n',
        '    "disk": ("disk",),\n    "tape": ("tape",),\n',
    ),
    "weightsync/coordinator/routing.py": (
        '        if mode == "disk" and',
        '        if mode == "tape" and _reaches(member, "tape", scene):\n'
        '            return Route("tape", "set", scene.offers["tape"], target.publisher)\n'
        '        if mode == "disk" and',
    ),
}
COMMAND = {
    "asyncrl/commands/greeting.py": (
        "",
        "from asyncrl.commands.options import command\n\n\n"
        "def add(commands):\n"
        '    one = command(commands, "greet", "say hello", example="asyncrl greet")\n'
        "    one.set_defaults(run=_greet)\n\n\n"
        "def _greet(args):\n"
        '    print("hello")\n'
        "    return 0\n",
    ),
    "asyncrl/commands/__init__.py": ("COMMANDS = (\n", 'COMMANDS = (\n    ("greeting", "add"),\n'),
}
KINDS = {"a loss": LOSS, "a reward form": FORM, "an engine": ENGINE, "a transport": TRANSPORT, "a command": COMMAND}
#: What works once all edits of a kind are made.
USES = {
    "a loss": """
from asyncrl.config.sections.algorithm import AlgorithmConfig
from learners.algorithms.registry import choose
chosen = choose(AlgorithmConfig(loss="mirrored", loss_options={"scale": 2}), "loss")
assert chosen.function.__name__ == "mirrored" and chosen.options == {"scale": 2.0}
""",
    "a reward form": """
from producers.rewards.forms import recognise
assert recognise(lambda left, right: 0.0).name == "paired"
""",
    "an engine": """
from asyncrl.plugins import find
assert find("asyncrl.engines", "echo").__name__ == "EchoEngine"
""",
    "a transport": """
from pathlib import Path
import msgspec
from asyncrl.config import WeightSyncConfig
from weightsync.publisher.outboxes import ALLOWED
from weightsync.transports.catalogue import make_inboxes, make_outbox
config = msgspec.convert({"transport": "tape"}, WeightSyncConfig)
(name,) = ALLOWED[config.transport]
assert make_inboxes(config)[name].__name__ == "TapeInbox"
assert type(make_outbox(name, config, run_dir=Path("."))).__name__ == "TapeOutbox"
""",
    "a command": """
from asyncrl.cli import main
assert main(["greet"]) == 0
""",
}


def table() -> dict[str, list[str]]:
    """The files of each kind in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (an? [\w ]+) \| (.*) \|$", text, re.M)
    return {kind: re.findall(r"`([^`]+)`", files) for kind, files in rows}


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    yield tmp_path


def edit(root: Path, file: str, texts: tuple[str, ...]) -> None:
    path = root / file
    text = path.read_text() if texts[0] else ""
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert not old or text.count(old) == 1, f"{file} no longer holds {old!r}"
        text = text.replace(old, new) if old else new
    path.write_text(text)


def test_every_second_edit_of_the_product_is_made() -> None:
    assert not missing_edits(ROOT)


@pytest.mark.parametrize("kind", KINDS)
def test_an_extension_touches_the_files_of_the_table_and_works(kind: str, copy: Path) -> None:
    edits = KINDS[kind]
    touched = [file if old else f"{Path(file).parent}/" for file, (old, *_) in edits.items()]
    assert sorted(touched) == sorted(table()[kind]), "CONTRIBUTING.md lists other files"
    for file, texts in edits.items():
        edit(copy, file, texts)
    assert not missing_edits(copy)
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(  # noqa: PLW1510 - asserted below, with its output
        [sys.executable, "-c", USES[kind]], cwd=copy, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "forgotten"),
    [(kind, file) for kind, edits in KINDS.items() for file in list(edits)[1:]],
)
def test_a_forgotten_second_edit_is_named(kind: str, forgotten: str, copy: Path) -> None:
    for file, texts in KINDS[kind].items():
        if file != forgotten:
            edit(copy, file, texts)
    messages = missing_edits(copy)
    assert messages and all(forgotten in message for message in messages)
