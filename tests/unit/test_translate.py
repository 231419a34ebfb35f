"""`init --from`: what a run of verl, TRL, prime-rl or OpenRLHF comes to; nothing of it is dropped in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli import main
from asyncrl.config import Config, parse
from asyncrl.config.suggestions import known_trainers, list_keys, translation_table
from asyncrl.configure.translate import translate
from asyncrl.errors import ConfigError, ConfigErrors

VERL = r"""
MODEL=models/m
DIR=${DATA_DIR:-data}
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="['$DIR/a.parquet','$DIR/b.parquet']" data.train_batch_size=64 \
    data.max_prompt_length=128 data.max_response_length=256 \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.clip_ratio=0.1 \
    actor_rollout_ref.rollout.n=5 +actor_rollout_ref.rollout.top_k=-1 \
    custom_reward_function.path=my_score.py \
    trainer.logger='["console","wandb"]' trainer.some_new_thing=3 trainer.total_epochs=2 $@
"""
TRL = """
from trl import GRPOConfig, GRPOTrainer
raise SystemExit("this file is parsed, never run")
args = GRPOConfig(learning_rate=5e-6, num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2,
                  beta=0.04, loss_type="dr_grpo", scale_rewards=False, max_steps=200, warmup_ratio=0.1)
trainer = GRPOTrainer(model="models/m", args=args, reward_funcs=[accuracy], train_dataset=load_dataset("x"))
"""
PRIME = """
max_async_level = 2
[trainer.optim]
lr = 3e-6
[orchestrator]
batch_size = 512
rollouts_per_example = 16
[orchestrator.sampling]
max_tokens = 2048
"""
OPENRLHF = r"""
python3 -m openrlhf.cli.train_ppo_ray --pretrain models/m --prompt_data rows.jsonl --input_key question \
   --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 128 --advantage_estimator group_norm \
   --remote_rm_url reward.py --apply_chat_template --init_kl_coef 0 --packing_samples
"""
WANTED: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "verl": ("run.sh", VERL, {
        "data.path": "data/a.parquet, data/b.parquet", "model.path": "models/m", "buffer.batch_groups": 64,
        "learner.algorithm.minibatches": 4, "sampling.group_size": 5, "learner.algorithm.kl.where": "loss",
        "learner.algorithm.kl.coeff": 0.01, "learner.algorithm.clip_low": 0.1, "learner.algorithm.clip_high": 0.1,
        "reward.function": "my_score.py:compute_score", "trackers.use": ["wandb"], "data.epochs": 2,
    }, ["trainer.some_new_thing = 3"]),
    "trl": ("train.py", TRL, {
        "learner.optim.lr": 5e-6, "buffer.batch_groups": 4, "sampling.group_size": 4, "model.path": "models/m",
        "learner.algorithm.kl.where": "loss", "learner.algorithm.kl.coeff": 0.04, "learner.steps": 200,
        "learner.algorithm.aggregation": "seq-mean-token-sum-norm", "learner.algorithm.advantage": "dr_grpo",
        "learner.optim.warmup_steps": 20,
    }, ["reward_funcs = [accuracy]", "train_dataset = load_dataset('x')"]),
    "prime-rl": ("rl.toml", PRIME, {
        "buffer.max_staleness": 2, "learner.optim.lr": 3e-6, "buffer.batch_groups": 32, "sampling.group_size": 16,
        "sampling.max_new_tokens": 2048,
    }, []),
    "openrlhf": ("run.sh", OPENRLHF, {
        "model.path": "models/m", "data.path": "rows.jsonl", "data.prompt_key": "question", "data.as_chat": True,
        "buffer.batch_groups": 32, "learner.algorithm.minibatches": 2, "learner.algorithm.advantage": "grpo",
        "reward.function": "reward.py:reward_func",
    }, ["packing_samples = True: rows are packed always"]),
}  # fmt: skip


@pytest.mark.parametrize("trainer", WANTED)
def test_a_run_of_theirs_in_our_names(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_DIR", raising=False)
    name, text, settings, notes = WANTED[trainer]
    (tmp_path / name).write_text(text)
    found = translate(tmp_path / name)
    assert found.trainer == trainer
    assert {key: found.settings.get(key) for key in settings} == settings
    assert set(found.settings) <= set(list_keys(Config))
    for note in notes:
        assert any(line.startswith(note) for line in found.notes), found.notes
    if trainer == "openrlhf":
        assert "learner.algorithm.kl.coeff" not in found.settings  # a weight of 0 is none


def test_the_table_names_settings_that_exist() -> None:
    known = set(list_keys(Config))
    for name in known_trainers():
        assert set(translation_table()[name]["settings"].values()) <= known, name
        assert not set(translation_table()[name]["settings"]) & set(translation_table()[name]["nothing"]), name
    assert set(translation_table()["values"]) <= known


def test_files_that_are_no_run(tmp_path: Path) -> None:
    for name, text in (("a.sh", "echo hello"), ("b.py", "x = ("), ("c.toml", "x = "), ("d.sh", "echo 'open")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError) as caught:
            translate(tmp_path / name)
        assert caught.value.code == "config.file"
    with pytest.raises(ConfigError, match="No such file"):
        translate(tmp_path / "gone.sh")


def test_init_writes_what_they_set_and_says_what_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n")
    (tmp_path / "my_score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth):\n    return 1.0\n"
    )
    script = VERL.replace("\"['$DIR/a.parquet','$DIR/b.parquet']\"", "rows.jsonl").replace("=models/m", "=model")
    (tmp_path / "run.sh").write_text(script.replace("trainer.logger=", "trainer.no_logger="))
    assert main(["init", "my.toml", "--from", "run.sh"]) == 0
    said = capsys.readouterr().out
    assert "settings of verl" in said and "left out: trainer.some_new_thing = 3: not translated" in said
    config = parse((tmp_path / "my.toml").read_text())
    assert config.buffer.batch_groups == 64 and config.sampling.group_size == 5 and config.data.epochs == 2
    assert config.learner.algorithm.minibatches == 4 and config.reward[0].function == "my_score.py:compute_score"
    assert config.learner.micro_batch_tokens >= 128 + 256


def test_a_table_of_theirs_in_our_file_names_our_settings() -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(PRIME)
    said = "\n".join(error.message for error in caught.value.errors)
    assert "did you mean [learner]?; trainer.optim.lr is learner.optim.lr" in said
    assert "orchestrator.sampling.max_tokens is sampling.max_new_tokens" in said and "asyncrl init --from" in said
