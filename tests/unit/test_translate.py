"""`init --from`: what a run of another trainer comes to; nothing of it is dropped in silence."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_checks import no_parts_are_tried, same_imports_once

from asyncrl.cli import main
from asyncrl.config import Config, parse
from asyncrl.config.suggestions import flatten, known_trainers, list_keys, translation_table
from asyncrl.configure.translate import translate
from asyncrl.configure.translate.given import NO_ENGINE_ARGS
from asyncrl.configure.translate.reading import read_settings
from asyncrl.configure.wizard import init_command
from asyncrl.errors import ConfigError, ConfigErrors
from learners.algorithms.corrections import tis
from producers.engines.vllm.args import OURS

assert no_parts_are_tried and same_imports_once  # fixtures
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


FOREIGN = sorted((Path(__file__).parent / "foreign").iterdir())
#: What is computed from several of their settings: ours -> the ends of their names.
COMPUTED = {
    "buffer.batch_groups": (
        "batch_size generation_batch_size global_batch_size gradient_accumulation_steps "
        "per_device_train_batch_size ppo_mini_batch_size require_batches train.batch_size train_batch_size"
    ),
    "buffer.filters": "dynamic_filtering_enable dynamic_sampling_filter_path",
    "environment.args": "args",
    "environment.name": "env source",
    "learner.algorithm.advantage": (
        "adv_estimator advantage_estimator estimator no_advantage_std_norm norm_adv_by_std_in_grpo "
        "recompute_logprob reward_norm.group_size reward_norm.mean_leave1out reward_norm.mean_level "
        "reward_norm.std_level use_decoupled_loss"
    ),
    "learner.algorithm.advantage_options": "discount gae_lambda gamma lam lambd",
    "learner.algorithm.aggregation": "calculate_per_token_loss loss_type",
    "learner.algorithm.clip_high": "eps_clip_high eps_clip_higher eps_clip_low_high",
    "learner.algorithm.clip_low": "clip_ratio eps_clip",
    "learner.algorithm.correction": (
        "is_correction_enable is_correction_type rollout_is use_tis vllm_importance_sampling_mode"
    ),
    "learner.algorithm.correction_options": (
        "is_correction_threshold rollout_is_threshold vllm_importance_sampling_cap"
    ),
    "learner.algorithm.kl.coeff": "kl_coef kl_loss_coef",
    "learner.algorithm.kl.where": "init_kl_coef use_kl_in_reward use_kl_loss use_loss",
    "learner.algorithm.loss": "loss_mode loss_type use_sapo_loss",
    "learner.algorithm.loss_options": (
        "c_clip clip_ratio_c delta eps_clip eps_clip_high epsilon_high "
        "sapo_tau_neg sapo_tau_pos sapo_temperature_neg sapo_temperature_pos"
    ),
    "learner.algorithm.minibatches": "num_steps_per_rollout",
    "learner.algorithm.shaping.overlong_buffer": (
        "overlong_buffer_cfg.enable overlong_buffer_cfg.len overlong_reward_penalty overlong_tokens"
    ),
    "learner.algorithm.shaping.overlong_factor": "overlong_buffer_cfg.penalty_factor overlong_penalty_factor",
    "learner.backend": "train_backend",
    "learner.gradient_checkpointing": "freq recompute_granularity",
    "learner.lora.rank": "use_lora",
    "learner.optim.beta1": "betas",
    "learner.optim.lr": "adam.lr",
    "learner.optim.name": "type",
    "learner.optim.warmup_steps": "lr_warmup_steps_ratio warmup_ratio warmup_steps_proportion",
    "learner.ranks": "actor.backend",
    "model.dtype": "bf16",
    "model.path": "vllm.model",
    "producers.engine": "allocation_mode rollout.backend use_vllm",
    "producers.engine_args": (
        "enable_chunked_prefill enable_lora enforce_eager engine_kwargs.vllm.seed "
        "gpu_memory_utilization inference.parallel.tp max_lora_rank max_model_len tensor_model_parallel_size "
        "tensor_parallel_size vllm_gpu_memory_utilization"
    ),
    "producers.url": "vllm_server_host vllm_server_port",
    "reward.args": "factor",
    "reward.function": (
        "custom_reward_function.name custom_reward_function.path custom_rm_path remote_rm_url reward_funcs "
        "rm_type rm_url"
    ),
    "trackers.use": "logger report_to use_wandb wandb.key wandb.mode",
}


def is_accounted(trainer: str, name: str, value: Any, settings: set[str], said: str) -> bool:
    """Whether a setting of theirs is one of ours, or named in a note. What is switched off needs neither."""
    table = translation_table()[trainer]
    ours = {table["settings"].get(table.get("older", {}).get(name, name), "")}
    ours |= {key for key, ends in COMPUTED.items() if any(f".{name}".endswith(f".{end}") for end in ends.split())}
    noted = name in said or any(key and f"{key} = " in said for key in ours)
    return bool(ours & settings) or noted or value in (None, False, 0, -1, [], {})


@pytest.mark.parametrize("path", FOREIGN, ids=lambda path: path.stem)
def test_every_setting_is_accounted_for_and_only_files_are_missing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DATA_HOME", "MODEL_PATH", "ROOT", "TRAIN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigErrors) as caught:  # folders and files that are not there
        init_command(Path("my.toml"), {}, theirs=path)
    said = capsys.readouterr().out
    trainer = path.stem.rpartition("-")[0] if path.stem.count("-") == 1 else path.stem.partition("-")[0]
    trainer = "prime-rl" if trainer.startswith("prime") else trainer
    found = translate(path)
    assert found.trainer == trainer
    assert "not translated" not in said, said
    config = tomllib.loads((tmp_path / "my.toml").read_text())
    config["reward"] = config["reward"][0]
    settings = set(dict(flatten(config))) | set(found.settings)
    given, _ = read_settings(path)
    left = [name for name, value in given.items() if not is_accounted(trainer, name, value, settings, said)]
    assert left == []
    for key in set(found.settings) - set(dict(flatten(config))):
        assert key in said or any(f"{key}." in one for one in dict(flatten(config))), key
    for error in caught.value.errors:
        assert error.code in ("config.model", "config.data", "config.extra", "config.reward"), error
        assert any(
            word in error.message for word in ("no such", "there is no file", "needs the package", "No module named")
        ), error


def test_what_the_configurations_come_to() -> None:
    """Values that are computed, references and arithmetic."""
    found = {path.stem: translate(path) for path in FOREIGN}
    wanted: dict[str, dict[str, Any]] = {
        "verl-grpo": {
            "data.max_prompt_tokens": 1024, "sampling.max_new_tokens": 2048, "learner.algorithm.minibatches": 2,
            "learner.optim.warmup_steps": 10, "learner.optim.beta2": 0.95, "learner.optim.schedule": "cosine",
            "learner.algorithm.correction_options": {"level": "token", "upper": 3.0},
            "evaluation.path": "data/test.parquet",
            "learner.algorithm.shaping.overlong_buffer": 256, "learner.algorithm.loss_options": {"dual_clip": 10.0},
        },
        "verl-ppo": {
            "run.dir": "runs/e", "learner.critic.model": "models/tiny", "learner.algorithm.kl.where": "reward",
            "learner.algorithm.kl.controller": "adaptive", "reward.args": {"factor": 2},
            "learner.algorithm.advantage_options": {"gamma": 1.0, "lam": 0.95},
            "reward.function": "my_score.py:score", "producers.engine_args": {"seed": 4},
        },
        "verl-fully-async": {
            "buffer.batch_groups": 32, "learner.algorithm.minibatches": 2, "sampling.max_new_tokens": 4096,
            "learner.ranks": 4, "learner.algorithm.loss": "gspo", "data.epochs": 2,
        },
        "trl-command": {
            "data.path": "some/rows", "producers.url": ["http://127.0.0.1:8001"], "learner.lora.rank": 32,
            "learner.lora.target_modules": ["q_proj", "v_proj"], "reward.function": "my_lib.rewards:score",
            "learner.algorithm.loss": "sapo", "learner.gradient_checkpointing": True,
        },
        "trl-config": {
            "buffer.batch_groups": 4, "learner.algorithm.loss": "cispo",
            "learner.algorithm.loss_options": {"clip_low": 1.0, "clip_high": 4.0},
        },
        "prime-rl-older": {
            "environment.name": "verifiers", "environment.args": {"id": "reverse-text", "min_length": 4},
            "buffer.batch_groups": 32, "producers.engine_args": {"tensor_parallel_size": 2}, "buffer.max_staleness": 2,
        },
        "openrlhf-dots": {
            "learner.algorithm.minibatches": 2, "learner.algorithm.correction": "icepop",
            "buffer.filters": ["zero_variance"],
            "learner.algorithm.clip_high": 0.27, "model.dtype": "bfloat16", "run.dir": "exp",
        },
        "areal-ppo": {
            "producers.count": 2, "producers.engine": "vllm", "learner.ranks": 2, "learner.algorithm.advantage": "gae",
            "learner.optim.lr": 1e-6, "trackers.use": ["wandb"],
        },
        "slime-grpo": {
            "learner.backend": "megatron", "evaluation.path": "data/aime.jsonl", "learner.steps": 3000,
            "learner.algorithm.kl.coeff": 0.01, "learner.gradient_checkpointing": True,
        },
        "slime-async": {"learner.algorithm.loss_options": {"clip_low": 3e-4, "clip_high": 4e-4}},
        "slime-ppo": {"learner.backend": "fsdp2", "evaluation.path": "data/a.jsonl, data/b.jsonl"},
    }  # fmt: skip
    for name, settings in wanted.items():
        assert {key: found[name].settings.get(key) for key in settings} == settings, name


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[learner]\ntensor_model_parallel_size = 2", "did you mean learner.parallel.tensor?"),
        ("[actor.lora]\nenabled = true", "actor.lora.enabled is learner.lora.rank"),
        ("[learner.lora]\nenabled = true", "did you mean learner.lora.rank?"),
        ("[weightsync]\nasync_weight_update = true", "is not a setting: new weights are sent while generation goes on"),
        ("[model]\nenable_vision = true", "is not a setting: rows are text"),
        ("[trainer]\nnnodes = 2", "trainer.nnodes is not needed: other hosts join with --connect"),
        ("[rollout]\nmax_head_offpolicyness = 2", "rollout.max_head_offpolicyness is buffer.max_staleness"),
    ],
)
def test_names_of_theirs_in_our_file_are_answered(text: str, answer: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(text)
    said = [error.message for error in caught.value.errors]
    assert any(answer in message for message in said), said


def test_a_setting_that_contradicts_others_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=fsdp2 algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 trainer.test_freq=5"
    )
    assert main(["init", "my.toml", "--from", "run.sh"]) == 2  # config.model
    said = capsys.readouterr().out
    assert "left out: learner.parallel.pipeline = 2: " in said and "left out: evaluation.every = 5: " in said
    assert "missing: run.sh names no model: put it at models/your-model, or change model.path" in said
    assert "missing: run.sh names no data: put it at data/train.parquet, or change data.path" in said


def test_arguments_that_the_engine_refuses_are_left_out() -> None:
    assert set(OURS) <= set(NO_ENGINE_ARGS)


@pytest.mark.parametrize(("mode", "wanted"), [("R3", True), ("R2", None), ("disabled", None)])
def test_routing_replay_of_verl_is_ours_where_it_is_the_same(tmp_path: Path, mode: str, wanted: bool | None) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        f"python -m verl.trainer.main_ppo actor_rollout_ref.actor.router_replay.mode={mode} data.train_batch_size=8 "
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    )
    found = translate(path)
    assert found.settings.get("learner.router_replay") is wanted
    left = f"actor_rollout_ref.actor.router_replay.mode = {mode!r}: only R3 is there: learner.router_replay"
    assert (left in found.notes) is (mode != "R3")


def translated(tmp_path: Path, text: str, name: str = "run.sh") -> Any:
    """What a file with this text comes to."""
    (tmp_path / name).write_text(text)
    return translate(tmp_path / name)


AREAL = "train_dataset: {batch_size: 8, path: data/train.parquet}\nactor:\n  path: models/m\n"


@pytest.mark.parametrize(
    ("text", "correction", "options", "noted"),
    [
        ("behav_imp_weight_cap: 3.0", "icepop", {"lower": 0.0, "upper": 3.0}, ()),
        ("behave_imp_weight_mode: token_mask", "icepop", {"lower": 0.0, "upper": 5.0}, ()),
        ("behave_imp_weight_cap: 3.0\n  behave_imp_weight_mode: token_truncate", "tis", {"upper": 3.0}, ()),
        ("behave_imp_weight_cap: 3.0\n  behave_imp_weight_mode: disabled", "none", None, ()),
        ("behave_imp_weight_cap: 3.0\n  behave_imp_weight_mode: sequence_mask", None, None, ("cap", "mode")),
        ("behave_imp_weight_cap: 3.0\n  recompute_logprob: false", "none", None, ("cap",)),
    ],
)
def test_caps_of_areal_leave_tokens_out_unless_they_truncate(
    tmp_path: Path, text: str, correction: str | None, options: Any, noted: tuple[str, ...]
) -> None:
    found = translated(tmp_path, f"{AREAL}  {text}\n", "run.yaml")
    assert found.settings.get("learner.algorithm.correction") == correction
    assert found.settings.get("learner.algorithm.correction_options") == options
    for name in ("cap", "mode"):
        assert any(f"behave_imp_weight_{name} = " in note for note in found.notes) == (name in noted), found.notes


@pytest.mark.parametrize(
    ("norm", "advantage"),
    [
        ("{mean_level: group, std_level: group}", "grpo"),
        ("{mean_level: group, std_level: null}", "dr_grpo"),
        ("{mean_level: group, std_level: null, mean_leave1out: true}", "rloo"),
        ("{mean_level: group, std_level: batch}", None),
        ("{mean_level: group}", None),
        ("{mean_level: group, std_level: group, mean_leave1out: true}", None),
    ],
)
def test_norms_of_areal_are_translated_if_they_are_the_same(tmp_path: Path, norm: str, advantage: str | None) -> None:
    found = translated(tmp_path, f"{AREAL}  reward_norm: {norm}\n", "run.yaml")
    assert found.settings.get("learner.algorithm.advantage") == advantage
    assert any("reward_norm.mean_level = " in note for note in found.notes) == (advantage is None)


@pytest.mark.parametrize(
    ("flags", "correction", "options"),
    [
        ("--algo.advantage.is_correction_type tis", "tis", {"floor": 0.5, "upper": 5.0}),
        ("--algo.advantage.is_correction_threshold 0.1 4.0", "tis", {"floor": 0.1, "upper": 4.0}),
        ("--algo.advantage.is_correction_threshold 4.0", "tis", {"floor": 0.0, "upper": 4.0}),
        ("--algo.advantage.is_correction_type icepop", "icepop", {"lower": 0.5, "upper": 5.0}),
        (
            "--algo.advantage.is_correction_type seq-mask-tis --algo.advantage.is_correction_threshold 0.5 4.0",
            "tis",
            {"upper": "off", "reject": ["seq_mean_k1"], "thresholds": [[0.25, 2.0]]},
        ),
        ("--algo.advantage.is_correction_type seq-mask-tis --algo.advantage.is_correction_threshold 4.0", None, None),
    ],
)
def test_corrections_of_openrlhf(tmp_path: Path, flags: str, correction: str | None, options: Any) -> None:
    found = translated(
        tmp_path,
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path models/m --rollout.batch_size 8 "
        f"--algo.advantage.is_correction_enable {flags}",
    )
    assert found.settings.get("learner.algorithm.correction") == correction
    assert found.settings.get("learner.algorithm.correction_options") == options
    assert any("is_correction_type" in note for note in found.notes) == (correction is None)


def test_rows_whose_mean_ratio_is_outside_of_the_bounds_are_left_out() -> None:
    bounds = [1 / 4.0, 1 / 0.5]  # of a mean ratio in [0.5, 4]: the estimator k1 is that of the inverse
    gaps = torch.tensor([0.6, 0.6, 1.5, 1.5, -0.8, -0.8])
    made = tis(
        gaps,
        torch.zeros(6),
        torch.ones(6, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1, 2, 2]),
        upper=None,
        reject=("seq_mean_k1",),
        thresholds=(bounds,),  # type: ignore[arg-type]  # a list, as TOML gives it
    )
    assert made.keep.tolist() == [True, True, False, False, False, False]
    assert torch.allclose(made.weights, torch.where(made.keep, gaps.exp(), 0.0))


CLIPS = {
    "verl-cispo": (
        "python3 -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.model.path=models/m "
        "actor_rollout_ref.actor.policy_loss.loss_mode=cispo actor_rollout_ref.actor.clip_ratio_low=10 "
        "actor_rollout_ref.actor.clip_ratio_high=0.2",
        {"clip_low": 10, "clip_high": 0.2},
    ),
    "verl-default": (
        "python3 -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.model.path=models/m "
        "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean",
        {"clip_low": 0.2, "clip_high": 0.2},
    ),
    "trl-cispo": (
        "trl grpo --model_name_or_path models/m --loss_type cispo --epsilon_high 5.0 --epsilon 0.3",
        {"clip_low": 1.0, "clip_high": 4.0},
    ),
    "trl-gspo": (
        "trl grpo --model_name_or_path models/m --importance_sampling_level sequence --epsilon 3e-4 --delta 2.0",
        {"clip_low": 3e-4, "clip_high": 3e-4},
    ),
    "openrlhf": (
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path models/m --rollout.batch_size 8 "
        "--actor.policy_loss_type gspo --actor.eps_clip_low_high 3e-4 4e-4 --actor.dual_clip 3",
        {"clip_low": 3e-4, "clip_high": 4e-4},
    ),
}


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_goes_where_the_loss_reads_it(name: str, tmp_path: Path) -> None:
    found = translated(tmp_path, CLIPS[name][0])
    assert found.settings["learner.algorithm.loss_options"] == CLIPS[name][1]
    assert not {"learner.algorithm.clip_low", "learner.algorithm.clip_high"} & set(found.settings)
    assert any("dual_clip = 3" in note for note in found.notes) == (name == "openrlhf")


def test_a_clip_of_a_loss_without_one_is_named(tmp_path: Path) -> None:
    found = translated(tmp_path, "trl grpo --model_name_or_path models/m --loss_type sapo --epsilon 0.1")
    assert "learner.algorithm.clip_low = 0.1: the loss sapo has no clip" in found.notes
    found = translated(tmp_path, "trl grpo --model_name_or_path models/m --loss_type dapo --epsilon 0.1")
    assert found.settings["learner.algorithm.clip_high"] == 0.1
