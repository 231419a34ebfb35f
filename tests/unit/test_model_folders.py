"""The code of a model folder runs only if the configuration allows it, and one module alone reads model folders."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted_code import marks, plant
from test_learner_loop import gang, make_config, make_learner, model_dir

from asyncrl import config as configuration
from asyncrl.config.sections.reward import JudgeConfig
from asyncrl.errors import ConfigError
from asyncrl.runtime import model_folder
from asyncrl.runtime.device import Device
from learners.backends.fsdp2.loading import load_model
from learners.backends.hf_folder import FolderWriter
from learners.checkpoints.export import export
from learners.gang.gang import Gang
from learners.main import _decoder
from learners.profiling.metered_backend import Meter
from producers.data.tokenizer import Tokenizer
from producers.engines.hf.loading import load_model as load_engine
from producers.rewards.judges.classifier import Classifier
from producers.rewards.judges.generative import YesNo, engine_config
from producers.rewards.outcome import JudgeSettings

assert gang and model_dir  # fixtures

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "asyncrl/runtime/model_folder.py"
SOURCES = [
    path
    for folder in ("asyncrl", "buffers", "learners", "producers", "weightsync", "examples", "configs")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != DOOR
]
#: Names of transformers that read a folder or import code from it, as attributes, names or texts (getattr).
READERS = {
    "from_pretrained", "_from_config", "get_class_from_dynamic_module", "get_cached_module_file",
    "resolve_trust_remote_code", "load_custom_generate", "dynamic_module_utils", "custom_generate",
}  # fmt: skip


def opened(source: str) -> list[str]:
    """Every place of a source text that reads a model folder by transformers, or decides whether its code may run."""
    bad = []
    for node in ast.walk(ast.parse(source)):
        place = f"line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("transformers", "peft"):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            bad += [place + word for word in words if word in READERS or word == "pipeline" or word.startswith("Auto")]
        elif isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", "")
            theirs = owner.startswith("Auto") and node.attr == "from_config"
            if (
                theirs
                or (owner, node.attr) == ("transformers", "pipeline")
                or node.attr in READERS
                or node.attr.startswith(("AutoC", "AutoM", "AutoP", "AutoT"))
            ):
                bad.append(place + node.attr)
        elif isinstance(node, ast.Constant) and node.value in READERS:
            bad.append(place + str(node.value))
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and not _given(node.value):
            bad.append(f"{place}trust_remote_code = {ast.unparse(node.value)}")
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "trust_remote_code" and not _given(value):
                    bad.append(f"{place}trust_remote_code = {ast.unparse(value)}")
    return bad


def _given(value: ast.expr) -> bool:
    """Whether a permission comes from the configuration or an argument, or is none."""
    if isinstance(value, ast.Constant):
        return value.value is False or isinstance(value.value, str)  # a text names the setting, in a table
    return str(getattr(value, "attr", getattr(value, "id", ""))).lstrip("_") == "trust_remote_code"


def test_the_lint_sees_every_way_in() -> None:
    ways = [
        "AutoConfig.from_pretrained(p)", "kind.from_pretrained(p)", "AutoModel.from_config(c)", "model._from_config(c)",
        "from transformers import AutoTokenizer", "from transformers import pipeline", "getattr(x, 'from_pretrained')",
        "transformers.AutoModelForCausalLM", "load(p, trust_remote_code=True)", "load(p, trust_remote_code=found)",
        "{'trust_remote_code': bool(config.auto_map)}", "from transformers.dynamic_module_utils import x",
        "transformers.pipeline(p)",
        "load(p, trust_remote_code=bool(getattr(c, 'auto_map', None)))",
    ]  # fmt: skip
    assert [way for way in ways if not opened(way)] == []
    fine = (
        "Topology.from_config(c); load(p, trust_remote_code=config.model.trust_remote_code); f(trust_remote_code=False)"
    )
    assert opened(fine) == []


def test_one_module_reads_model_folders() -> None:
    bad = {str(path.relative_to(ROOT)): found for path in SOURCES if (found := opened(path.read_text()))}
    assert bad == {}


# ---------------------------------------------------------------- what each door does


def settings(folder: Path, tmp_path: Path, *, trust: bool, extra: str = "", steps: int = 3) -> configuration.Config:
    allowed = f"model.trust_remote_code = {str(trust).lower()}\nlearner.device = 'cpu'\nproducers.device = 'cpu'\n"
    return make_config(folder, tmp_path / "run", steps=steps, extra=allowed + extra)


GANG: Any = SimpleNamespace(device=Device.find("cpu"))


def judge(folder: Path, *, trust: bool, kind: str) -> JudgeSettings:
    table = JudgeConfig(
        "grader",
        kind=kind,
        model=str(folder),
        device="cpu",
        prompt="{response}",
        trust_remote_code=trust,
        label=0,
        yes=("1",),
        no=("2",),
    )
    return JudgeSettings(table, 60.0, str(folder), "float32", "prompt")


def write(folder: Path, tmp_path: Path, trust: bool) -> None:
    read = model_folder.load_config(folder, trust_remote_code=False)
    FolderWriter(
        tmp_path / "out", read, dtype=torch.float32, source=folder, max_bytes=1 << 20, trust_remote_code=trust
    ).close()


def tokens(folder: Path, _: Path, trust: bool) -> None:
    Tokenizer(folder, trust_remote_code=trust).has_template()


def learner(extra: str, **options: Any) -> Callable[[Path, Path, bool], Any]:
    return lambda folder, tmp, trust: load_model(
        settings(folder, tmp, trust=trust, extra=extra), GANG.device, **options
    )


#: What reads a model folder in this package -> the files of the folder that it runs if it may.
DOORS: dict[str, tuple[Callable[[Path, Path, bool], Any], set[str]]] = {
    "learner, whole": (learner("learner.load = 'whole'"), {"planted_config", "planted_model"}),
    "learner, in parts": (learner("learner.load = 'parts'"), {"planted_config", "planted_model"}),
    "learner, scorer": (learner("learner.load = 'whole'", scorer=True), {"planted_config", "planted_scorer"}),
    "learner, scorer in parts": (learner("learner.load = 'parts'", scorer=True), {"planted_config", "planted_scorer"}),
    "learner's decoder": (lambda f, t, ok: _decoder(settings(f, t, trust=ok)), {"planted_tokenizer"}),
    "learner's costs": (
        lambda f, t, ok: Meter(settings(f, t, trust=ok), GANG).costs(str(f)),
        {"planted_config"},
    ),
    "export": (write, {"planted_model"}),
    "producer's tokenizer": (tokens, {"planted_tokenizer"}),
    "producer's engine": (
        lambda f, t, ok: load_engine(settings(f, t, trust=ok), device=torch.device("cpu"), max_len=32),
        {"planted_config", "planted_model"},
    ),
    "judge, classifier": (
        lambda f, t, ok: Classifier(judge(f, trust=ok, kind="classifier"))._load(),
        {"planted_config", "planted_scorer"},
    ),
    "judge, yes or no": (
        lambda f, t, ok: YesNo(judge(f, trust=ok, kind="generative"))._load(),
        {"planted_config", "planted_model"},
    ),
    "judge, written": (
        lambda f, t, ok: load_engine(
            engine_config(judge(f, trust=ok, kind="generative")), device=torch.device("cpu"), max_len=32
        ),
        {"planted_config", "planted_model"},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies the code of folders to: one place for the package that it makes of them."""
    with pytest.MonkeyPatch.context() as patch:
        place = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", place)
        patch.syspath_prepend(place)
        yield


@pytest.mark.parametrize("door", DOORS)
def test_code_of_a_folder_runs_with_the_permission_alone(door: str, model_dir: Path, tmp_path: Path) -> None:
    enter, wanted = DOORS[door]
    name = "".join(letter for letter in door if letter.isalpha())
    folder = plant(model_dir, tmp_path / name)
    enter(folder, tmp_path, False)
    assert marks(folder) == set()
    with suppress(ConfigError):  # transformers has no body for the planted classifier
        enter(folder, tmp_path, True)
    assert wanted <= marks(folder)  # the test can fail


@pytest.mark.parametrize("door", [door for door in DOORS if door not in ("export", "learner's decoder")])
def test_a_folder_that_needs_its_code_is_refused_without(door: str, model_dir: Path, tmp_path: Path) -> None:
    folder = plant(model_dir, tmp_path / "foreign", foreign=True)
    with pytest.raises(ConfigError, match=r"code that the folder brings") as refused:
        DOORS[door][0](folder, tmp_path, False)
    assert refused.value.code == "config.trust" and refused.value.where.startswith(str(folder))
    assert "trust_remote_code = true" in refused.value.remedy and marks(folder) == set()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="the extra megatron is not installed")
def test_nor_does_megatron_without_the_permission(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    from asyncrl.plugins import find

    folder = plant(model_dir, tmp_path / "megatron")
    for trust in (False, True):
        config = settings(folder, tmp_path, trust=trust, extra="learner.backend = 'megatron'")
        find("asyncrl.backends", "megatron")(config, gang).export_hf(tmp_path / f"out{trust}")
        assert bool(marks(folder)) is trust


def test_a_run_and_its_exports_do_not_run_it(gang: Gang, model_dir: Path, tmp_path: Path) -> None:
    folder = plant(model_dir, tmp_path / "trained")
    config = settings(folder, tmp_path, trust=False, steps=1)
    runner, _, _, services = make_learner(config, gang)
    runner.run()  # exports at its end
    services.close()
    export(config, out=tmp_path / "again")
    assert marks(folder) == set()
    assert (tmp_path / "again/planted_model.py").exists()  # it is part of the folder, and copied
