"""CPU threads of engines and ranks whose number is not set."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from asyncrl import config as configuration
from asyncrl.config import Config
from asyncrl.config.mode import present_roles
from asyncrl.preflight import threads
from asyncrl.preflight.check import check
from asyncrl.preflight.machine import Machine
from asyncrl.process_plan.plan import TARGETS, plan
from asyncrl.runtime.host_facts import count_cores

QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151_936, "tie_word_embeddings": True,
}  # fmt: skip


def made(*settings: str, model: str = "m") -> Config:
    text = f'model.path = "{model}"\ndata.source = "a:b"\ndata.max_prompt_tokens = 16\n[[reward]]\nfunction = "a:b"'
    return configuration.parse(text, overrides=list(settings))


@pytest.mark.parametrize(
    ("settings", "cores", "accelerator", "found"),
    [
        ((), 8, False, (4, 4)),
        ((), 2, False, (1, 1)),
        ((), 1, False, (1, 1)),
        (("producers.count=2", "learner.ranks=2"), 15, False, (3, 3)),
        (("producers.threads=3",), 8, False, (3, 4)),
        ((), 8, True, (1, 1)),
        (("producers.device=cpu",), 8, True, (8, 1)),
        (("producers.engine=vllm_http", 'producers.url=["http://a:1"]'), 8, False, (1, 8)),
    ],
)
def test_processes_that_compute_share_the_cores(
    settings: tuple[str, ...], cores: int, accelerator: bool, found: tuple[int, int]
) -> None:
    config = made(*settings)
    got = threads.set_threads(config, cores=cores, accelerator=accelerator)
    assert (got.producers.threads, got.learner.threads) == found


def test_several_policies_share_a_host() -> None:
    config = made()
    run = msgspec.structs.replace(config.run, other_policies={"second": "runs/second"})
    config = msgspec.structs.replace(config, run=run)
    got = threads.set_threads(config, cores=8, accelerator=False)
    assert (got.producers.threads, got.learner.threads) == (2, 2)


def test_a_small_or_unknown_model_has_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "look_at_machine", lambda _run: Machine(8, 1 << 34, {}, 1 << 34, 1 << 34))
    config = made(model=str(tmp_path))
    roles = present_roles(TARGETS["all"], config)

    def chosen(model: object) -> tuple[int, int]:
        (tmp_path / "config.json").write_text(json.dumps(model))
        got = threads.choose_threads(config)
        return got.producers.threads, got.learner.threads

    assert chosen(QWEN) == (4, 4)
    assert chosen(QWEN | {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}) == (1, 1)
    assert chosen({"model_type": "unheard of"}) == (1, 1)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert {row.role: row.threads for row in check(config, roles, play=False).starting}["learner"] == 4
    learner = plan(threads.choose_threads(config), roles, config_path=tmp_path / "c.toml")[-1]
    assert learner.role == "learner" and learner.env["OMP_NUM_THREADS"] == "4"


def test_a_setting_without_a_launcher_is_one_thread() -> None:
    assert made().producers.torch_threads == made().learner.torch_threads == 1
    assert made("learner.threads=5").learner.torch_threads == 5


def test_a_container_has_its_share(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    cores, whole = count_cores(limit)
    assert whole == cores >= 1
    limit.write_text("50000 100000\n")
    assert count_cores(limit) == (cores, 0.5)
    limit.write_text("max 100000\n")
    assert count_cores(limit) == (cores, float(cores))
