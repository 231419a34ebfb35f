"""Every TOML that ships is read, checked with stand-ins for what it names, planned, and fits its devices."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_folder import CHAT, write_folder

from asyncrl.config import Config, dump, load, parse
from asyncrl.config.mode import present_roles
from asyncrl.config.policies import policy_names
from asyncrl.preflight import code as check_code
from asyncrl.preflight.check import check_files
from asyncrl.preflight.derived import notes_on
from asyncrl.preflight.memory import estimate
from asyncrl.process_plan.plan import TARGETS, plan

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
#: Files that are put on top of others: tests/unit/test_tool_examples.py checks those of the tools together.
PARTS = (ROOT / "configs" / "presets", ROOT / "examples" / "tools")
SHIPPED = sorted(
    path for folder in ("configs", "examples") for path in (ROOT / folder).rglob("*.toml") if path.parent not in PARTS
)
EXAMPLES = [path for path in SHIPPED if path.parent == ROOT / "configs" / "examples"]
#: What this machine may lack: packages and environments of engines, a Redis server. Never a mistake of the file.
OF_THE_MACHINE = {"config.extra", "store.no_server"}
#: Sizes in the config.json of the models that examples name.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2.5-3B-Instruct": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
                            "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
                            "tie_word_embeddings": True, "model_type": "qwen2"},
    "Qwen2.5-1.5B-Instruct": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                              "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                              "tie_word_embeddings": True, "model_type": "qwen2"},
    "Qwen2.5-7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                   "num_key_value_heads": 4, "vocab_size": 152064, "model_type": "qwen2"},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3"},
    "Qwen3-14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
                  "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3"},
    "Qwen3-32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
                  "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "model_type": "qwen3"},
}  # fmt: skip
MODELS["Qwen2.5-7B-Instruct"] = MODELS["Qwen2.5-Coder-7B-Instruct"] = MODELS["Qwen2.5-7B"]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "model_type": "qwen3",
}
ROW = {
    "prompt": "1+1=",
    "response": "2",
    "chosen": "2",
    "rejected": "3",
    "completion": "2",
    "label": True,
    "data_source": "gsm8k",
    "reward_model": {"ground_truth": "2"},
}


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, where the modules of a user that examples name are stand-ins."""
    monkeypatch.chdir(tmp_path)
    code = "def {}(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n\n"
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "my_rewards.py").write_text(code.format("gsm8k"))
    (tmp_path / "my_tools.py").write_text(code.format("tidy") + "def search(query: str) -> str:\n    return query\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def same_imports_once() -> Iterator[None]:
    """A reward is tried in a process of its own; the same one not for every file anew."""
    asked = check_code._problem
    with pytest.MonkeyPatch.context() as patch:
        once = functools.cache(lambda *command: asked(list(command)))
        patch.setattr(check_code, "_problem", lambda command, *, env=(): once(*command))
        yield


@pytest.fixture(autouse=True)
def no_engine_is_asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An environment with an engine beside this one would be imported: minutes, and no question of the file."""
    monkeypatch.setattr("asyncrl.process_plan.interpreters.look", lambda config, env: ([], "", ""))
    yield


def stand_ins(config: Config) -> None:
    """The files that a configuration names, as far as `asyncrl check` looks at them."""
    learner = config.learner
    folders = [config.model.path, learner.critic.model, learner.process_reward.model, learner.process_reward.reference]
    for folder in (Path(one) for one in folders if one):
        write_folder(folder, template=CHAT, max_position_embeddings=32768, **MODELS.get(folder.name, SMALL))
    for listed in (config.data.path, config.evaluation.path):
        for rows in (Path(part.strip()) for part in listed.split(",") if part.strip()):
            rows.parent.mkdir(parents=True, exist_ok=True)
            if rows.suffix == ".parquet":
                from pyarrow import Table, parquet

                parquet.write_table(Table.from_pylist([ROW]), rows)
            else:
                rows.write_text(json.dumps(ROW) + "\n")


def test_all_kinds_of_use_have_an_example() -> None:
    wanted = {
        "grpo-gsm8k",
        "dapo",
        "ppo-critic",
        "lora",
        "megatron",
        "ascend",
        "multi-turn",
        "math-gspo",
        "code",
        "qwen3-32b",
    }
    assert wanted <= {path.stem for path in EXAMPLES} and len(SHIPPED) >= 17


@pytest.mark.parametrize("path", SHIPPED, ids=names)
def test_it_is_read_checked_and_planned(path: Path, place: Path) -> None:
    choice = [f"run.policy={name}" for name in policy_names(path)[:1]]
    config = load(path, choice)
    assert parse(dump(config)) == config
    stand_ins(config)
    made, checked = check_files(path, choice)
    assert made is not None
    wrong = [error for error in checked.errors if error.code not in OF_THE_MACHINE]
    assert wrong == [], "\n".join(error.render() for error in wrong)
    assert all(error.where.startswith(f"{path}") for error in checked.errors)
    roles = present_roles(TARGETS["all"], made)
    plans = plan(made, roles, config_path=place / "config.toml")
    assert len({one.name for one in plans}) == len(plans) and plans[-1].role == "learner"
    assert {row.role for row in checked.starting if row.count} == {one.role for one in plans}


@pytest.mark.parametrize("path", EXAMPLES, ids=names)
def test_an_example_fits_its_devices_by_the_estimate(path: Path) -> None:
    """80 GB each, 64 GB on Ascend; vLLM itself keeps less K/V where there is less room."""
    config = load(path)
    memory = estimate(config, MODELS[Path(config.model.path).name], TARGETS["all"], accelerator=True)
    room = (64 if config.learner.device == "npu" else 80) * 10**9
    used = {one.role: one.total_bytes for one in memory if one.place == "device"}
    assert set(used) == {"learner"} | ({"producer"} if config.producers.engine in ("hf", "vllm") else set())
    assert used["learner"] <= 0.95 * room, f"{used['learner'] / GIB:.1f} GiB"
    for producer in [one for one in memory if one.role == "producer" and one.place == "device"]:
        weights = sum(part.bytes for part in producer.parts if part.name.startswith("weights"))
        assert weights <= 0.7 * room, f"{weights / GIB:.1f} GiB of weights leave no room for K/V"


@pytest.mark.parametrize("path", SHIPPED, ids=names)
def test_it_says_what_it_is_for(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and len(lines[0]) > 40
    assert sum("# " in line for line in lines) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=names)
def test_an_example_sets_nothing_without_effect(path: Path) -> None:
    """A note says that something works and may surprise: an example should not."""
    config = load(path)
    assert [note for note in notes_on(config, TARGETS["all"], cores=64) if "no effect" in note] == []
