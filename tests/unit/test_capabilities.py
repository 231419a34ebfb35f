"""What parts can do: every pair of part and feature, in the check, at the start and in the table."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from test_learner_loop import gang, model_dir

from asyncrl.config import load_all
from asyncrl.config.capabilities import (
    BACKENDS,
    DEVICES,
    ENGINES,
    REFUSED,
    UNUSED,
    refuse,
)
from asyncrl.config.features import FEATURES, OF_ENGINES, OF_LEARNERS
from asyncrl.config.tree import Config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.preflight import check as checks
from asyncrl.preflight import code as check_code
from asyncrl.preflight.machine import Machine
from asyncrl.preflight.start import StartReport
from asyncrl.runtime.model_folder import model_json
from learners.gang.gang import Gang

assert gang and model_dir  # fixtures

ROOT = Path(__file__).parents[2]
TOML = """
[model]
path = "{model}"
dtype = "{dtype}"
[data]
path = "rows.jsonl"
max_prompt_tokens = 16
[sampling]
max_new_tokens = 16
[learner]
backend = "fsdp2"
micro_batch_tokens = 64
device = "cpu"
[producers]
device = "cpu"
[[reward]]
function = "my_rewards:good"
"""
FROZEN = ("learner.vision.tower=false", "learner.vision.projector=false")
#: Feature -> settings that ask for it, and fields of config.json.
ASKED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "float16": (("model.dtype=float16",), {}),
    "reward_model": (("learner.mode=reward_model", "producers.engine=dataset", "sampling.group_size=2"), {}),
    "iteration": (
        (
            "learner.mode=dpo",
            "producers.engine=dataset",
            "sampling.group_size=2",
            "learner.micro_batch_tokens=4096",
            "learner.preference.iteration=2",
        ),
        {},
    ),
    "critic": (("learner.algorithm.advantage=gae",), {}),
    "process": (("learner.algorithm.advantage=prime",), {}),
    "lora": (("learner.lora.rank=4",), {}),
    **{
        name: ((f"learner.parallel.{name}=2", "learner.ranks=2"), {"num_experts": 4} if name == "expert" else {})
        for name in ("replicate", "tensor", "sequence", "pipeline", "expert")
    },
    **{
        name: ((f"learner.{name}=true",), {})
        for name in ("cpu_offload", "reference_offload", "offload_idle", "compile", "liger")
    },
    "muon": (("learner.optim.name=muon",), {}),
    "adamw_8bit": (("learner.optim.name=adamw_8bit",), {}),
    "varlen": (("model.attn_implementation=varlen", "model.dtype=bfloat16"), {}),
    "varlen_float32": (("model.attn_implementation=varlen",), {}),
    "sequence_parallel": (("learner.megatron.sequence_parallel=true",), {}),
    "adapter": (("learner.lora.rank=4", "learner.lora.publish=adapter"), {}),
    "exact_truncation": (("sampling.top_p=0.9",), {}),
    "second_weights": (("evaluation.path=rows.jsonl", "evaluation.lane=second_weights"), {}),
    "router_replay": (("learner.router_replay=true",), {"model_type": "qwen3_moe", "num_experts": 8}),
    "speculation": (("producers.speculative_tokens=4",), {}),
    "speculation_by_caches": (("producers.speculative_tokens=4",), {"model_type": "lfm2"}),
    "mixture_of_experts": ((), {"model_type": "qwen3_moe", "num_experts": 8}),
    "senses": (FROZEN, {"vision_config": {"hidden_size": 8}, "model_type": "qwen2_vl"}),
    "tile_senses": (FROZEN, {"vision_config": {"hidden_size": 8}, "model_type": "llava"}),
    "other_senses": (FROZEN, {"vision_config": {"hidden_size": 8}}),
    "moving_tower": (("learner.vision.tower=false",), {"vision_config": {"hidden_size": 8}, "model_type": "qwen2_vl"}),
    "vision_layout": (("learner.compile=true",), {"vision_config": {"hidden_size": 8}, "model_type": "qwen2_vl"}),
    "encoder_decoder": ((), {"is_encoder_decoder": True}),
    "architecture": ((), {"model_type": "olmo2"}),
    "dense_variant": ((), {"hidden_act": "gelu"}),
    "head_scale": ((), {"logits_scaling": 8.0}),
    "head_cap": ((), {"final_logit_softcapping": 30.0}),
    "attention_cap": (("model.attn_implementation=sdpa",), {"attn_logit_softcapping": 50.0}),
    "attention_cap_split": (("learner.parallel.sequence=2", "learner.ranks=2"), {"attn_logit_softcapping": 50.0}),
}
MACHINE = Machine(8, 1 << 40, {}, 1 << 40, 1 << 40)


@pytest.fixture(autouse=True)
def no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the user is not the subject: it would be imported in another process for every pair."""
    monkeypatch.setattr(check_code, "_problem", lambda command, **_: "")


@pytest.fixture
def place(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1", "chosen": "2", "rejected": "3"}) + "\n")
    shutil.copytree(model_dir, tmp_path / "model")
    return tmp_path


def make(place: Path, feature: str, *settings: str) -> tuple[Path, list[str]]:
    """The file of a configuration that asks for the feature, and its overrides."""
    asked, fields = ASKED[feature] if feature else ((), {})
    file = place / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    path = place / "run.toml"
    path.write_text(TOML.format(model=place / "model", dtype="float32"))
    return path, [*asked, *settings]


def checked(place: Path, feature: str, *settings: str, machine: Machine = MACHINE) -> list[AsyncRLError]:
    """Errors of `asyncrl check`."""
    path, overrides = make(place, feature, *settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "look_at_machine", lambda _: machine)
        patch.setattr(checks, "ask_roles", lambda *_, **__: StartReport([], [], []))  # `started` asks in this process
        return checks.check_files(path, overrides)[1].errors


def started(place: Path, feature: str, *settings: str, role: Any, device: str = "cpu") -> ConfigError | None:
    """The error of the function that a role calls at its start."""
    path, overrides = make(place, feature, *settings)
    config = load_all([path], overrides).config
    assert config is not None
    try:
        refuse(config, model_json(config.model.path), role=role, device=device)
    except ConfigError as error:
        return error
    return None


def pairs(parts: tuple[str, ...], features: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(part, name) for part in parts for name in features]


def test_every_feature_has_an_example_and_every_refusal_a_feature() -> None:
    assert ASKED.keys() == FEATURES.keys() == {*OF_LEARNERS, *OF_ENGINES}
    assert REFUSED.keys() == {*BACKENDS, *ENGINES}
    for part, refused in REFUSED.items():
        asked = OF_LEARNERS if part in BACKENDS else OF_ENGINES
        assert refused.keys() <= set(asked) and not set(UNUSED.get(part, ())) & refused.keys()
        assert all(why and remedy for why, remedy in refused.values())
    needs = {one.needs for one in FEATURES.values() if one.needs}
    assert needs <= set.union(*map(set, DEVICES.values()))


@pytest.mark.parametrize(("part", "feature"), pairs(BACKENDS, OF_LEARNERS))
def test_check_and_the_start_of_a_learner_agree_with_the_table(part: str, feature: str, place: Path) -> None:
    settings = (f"learner.backend={part}", "learner.device=cuda")  # of a device that has all
    if feature in ("replicate", "expert") and part == "fsdp2":
        settings += ("learner.ranks=2",)
    if (part, feature) == ("megatron", "vision_layout"):
        pytest.skip("it refuses the model and the other setting each for itself")
    agree(place, feature, settings, what=f"backend {part!r}", role="learner", wanted=feature in REFUSED[part])


@pytest.mark.parametrize(("part", "feature"), pairs(ENGINES, OF_ENGINES))
def test_check_and_the_start_of_a_producer_agree_with_the_table(part: str, feature: str, place: Path) -> None:
    settings = (f"producers.engine={part}",)
    agree(place, feature, settings, what=f"engine {part!r}", role="producer", wanted=feature in REFUSED[part])


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("kind", "feature"), pairs(tuple(DEVICES), tuple(n for n, f in FEATURES.items() if f.needs)))
def test_check_and_the_start_agree_about_a_device(kind: str, feature: str, named: bool, place: Path) -> None:
    """Named, or what `auto` is on the machine."""
    settings = (f"learner.device={kind if named else 'auto'}",)
    machine = Machine(8, 1 << 40, {} if kind == "cpu" else {kind: 1}, 1 << 40, 1 << 40)
    wanted = FEATURES[feature].needs not in DEVICES[kind]
    what = f"needs a device with {FEATURES[feature].needs}"
    agree(place, feature, settings, what=what, role="learner", wanted=wanted, machine=machine, device=kind)


def agree(
    place: Path,
    feature: str,
    settings: tuple[str, ...],
    *,
    what: str,
    role: Any,
    wanted: bool,
    machine: Machine = MACHINE,
    device: str = "cpu",
) -> None:
    """The check and the start refuse it, or both do not; with code, place, reason and remedy."""
    found = [error for error in checked(place, feature, *settings, machine=machine) if what in error.message]
    start = started(place, feature, *settings, role=role, device=device)
    refused = start is not None and what in start.message
    assert bool(found) == refused == wanted, (found, start)
    key = FEATURES[feature].key
    for error in found:
        assert error.code in ("config.conflict", "config.model") and error.remedy
        line = error.where.partition(":")[2].isdigit() or error.where.startswith("--set") or key in error.where
        assert line, error.where
    if refused:
        assert start is not None and start.code == found[0].code and start.where == key and start.remedy


@pytest.mark.parametrize("engine", [name for name in ENGINES if "exact_truncation" in REFUSED[name]])
@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=20", "min_p=0.05"])
def test_a_cut_of_training_samples_is_exact_or_wished_to_be_biased(engine: str, cut: str, place: Path) -> None:
    given = (f"producers.engine={engine}", f"sampling.{cut}")
    [found] = [error for error in checked(place, "", *given) if "a cut" in error.message]
    assert found.code == "config.conflict" and cut.replace("=", " = ") in found.message
    assert "sampling.truncation = 'biased'" in found.remedy
    start = started(place, "", *given, role="producer")
    assert start is not None and start.where == "sampling.truncation"
    for allowed in (("sampling.truncation=biased", *given), (f"producers.engine={engine}", f"evaluation.{cut}")):
        assert not [error for error in checked(place, "", *allowed) if "a cut" in error.message]
        assert started(place, "", *allowed, role="producer") is None


@pytest.mark.parametrize("feature", ["other_senses", "encoder_decoder", "head_scale"])
def test_folders_of_companions_and_judges_are_looked_at(feature: str, place: Path) -> None:
    other = place / "other"
    shutil.copytree(place / "model", other)
    asked = ASKED[feature][1]
    (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | asked))
    path, _ = make(place, "")
    text = path.read_text() + f'judge = "g"\n[[judge]]\nname = "g"\nkind = "generative"\nmodel = "{other}"\n'
    text = text.replace('function = "my_rewards:good"\n', "") + 'prompt = "{response}"\nrange = [0, 1]\n'
    path.write_text(text)
    settings = [f'learner.critic.model="{other}"', f'learner.process_reward.model="{other}"']
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "look_at_machine", lambda _: MACHINE)
        found = checks.check_files(path, settings)[1].errors
    refused = {error.message.partition(":")[0] for error in found if error.code == "config.model"}
    wanted = {"learner.critic.model", "learner.process_reward.model", "judge[0].model"}
    assert refused == (wanted if feature != "head_scale" else {"learner.process_reward.model"}), found


@pytest.mark.parametrize("key", ["learner.device", "producers.device"])
@pytest.mark.parametrize("name", ["rocm", "gpu", "tpu", "cuda:one", "auto:1"])
def test_an_unknown_device_is_refused(key: str, name: str, place: Path) -> None:
    [found] = [error for error in checked(place, "", f"{key}={name}") if "is not auto or one of" in error.message]
    assert found.code == "config.type" and found.remedy and f"{key} = {name!r}" in found.message
    assert ("'cuda'" in found.remedy) == (name in ("rocm", "gpu"))
    start = started(place, "", f"{key}={name}", role="learner" if key.startswith("learner") else "producer")
    assert start is not None and start.code == "config.type" and start.where == key


def test_parts_of_other_packages_refuse_for_themselves(place: Path) -> None:
    config = load_all([make(place, "senses", "learner.backend=mine", "producers.engine=ours")[0]], []).config
    assert isinstance(config, Config)
    _, overrides = make(place, "senses", "learner.backend=mine", "producers.engine=ours", "learner.device=xpu")
    config = load_all([place / "run.toml"], overrides).config
    assert config is not None
    refuse(config, model_json(config.model.path), role="learner")
    refuse(config, model_json(config.model.path), role="producer")


# ---------------------------------------------------------------- what starts, starts


def startable() -> Iterator[Any]:
    for part in BACKENDS:
        for name in OF_LEARNERS:
            if FEATURES[name].key.startswith(("learner.parallel", "learner.megatron")):
                continue  # ranks: tests/distributed
            if name in ("lora", "adamw_8bit", "liger") and name not in REFUSED[part]:
                packages = {"lora": "peft", "adamw_8bit": "torchao", "liger": "liger_kernel"}
                if importlib.util.find_spec(packages[name]) is None:
                    continue
            if ASKED[name][1] and name not in REFUSED[part]:
                continue  # another model: tests/unit/test_export.py, tests/contract
            yield pytest.param(part, name, id=f"{part}-{name}")


@pytest.mark.parametrize(("part", "feature"), list(startable()))
def test_a_back_end_starts_or_refuses_as_the_table_says(part: str, feature: str, place: Path, gang: Gang) -> None:
    """The back-ends themselves, in a process group of one on a CPU."""
    if part == "megatron" and importlib.util.find_spec("megatron") is None:
        pytest.skip("the extra megatron is not installed")
    from asyncrl.plugins import find

    path, overrides = make(place, feature, f"learner.backend={part}")
    config = load_all([path], overrides).config
    assert config is not None
    need = FEATURES[feature].needs
    unfit = bool(need) and feature not in UNUSED.get(part, ()) and need not in DEVICES["cpu"]
    kind: Any = find("asyncrl.backends", part)
    if feature in REFUSED[part] or unfit:
        with pytest.raises(ConfigError) as refused:
            kind(config, gang)
        assert refused.value.code in ("config.conflict", "config.model") and refused.value.remedy
    else:
        assert kind(config, gang).weight_specs()


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "feature", "settings"),
    [
        ("learners.main", "other_senses", ()),
        ("learners.main", "muon", ("learner.backend=megatron",)),
        ("producers.main", "other_senses", ()),
        ("producers.main", "encoder_decoder", ()),
    ],
)
def test_the_process_of_a_role_refuses_what_check_refuses(
    module: str, feature: str, settings: tuple[str, ...], place: Path
) -> None:
    path, overrides = make(place, feature, *settings)
    expected = [error.code for error in checked(place, feature, *settings)]
    config = load_all([path], overrides).config
    assert config is not None and expected
    from asyncrl.config import dump

    (place / "resolved.toml").write_text(dump(config))
    words = [sys.executable, "-m", module, "--config", str(place / "resolved.toml"), "--name", "role"]
    done = warm.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 2 and f"error[{expected[0]}]" in said and "->" in said, said
