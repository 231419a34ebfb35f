"""Exports: files of bounded size, names as `save_pretrained` writes them, whole folders from a run's checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_learner_loop import gang, make_config, make_learner, model_dir
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncrl import cli
from asyncrl.config import dump
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runs.export import export_command, parse_size
from asyncrl.runtime.run_dir import RunDir
from learners.backends.hf_folder import FolderWriter, Pieces, build_skeleton
from learners.backends.safetensors_writer import INDEX, ShardFiles
from learners.checkpoints import export as exporter
from learners.checkpoints.export import export
from learners.gang.gang import Gang

assert gang and model_dir  # fixtures

ROOT = Path(__file__).parents[2]
TEMPLATE = "{{ messages[0].content }}"


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return found


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("sizes", "limit", "files"),
    [
        ([3, 3, 5], 5, 3),
        ([3, 3, 5], 6, 2),
        ([3, 3, 5], 11, 1),
        ([9, 1, 1], 4, 2),
        ([1], 1, 1),
        ([], 1, 1),
        ([0, 2], 2, 1),
    ],
)
def test_files_are_as_large_as_they_may_be(tmp_path: Path, sizes: list[int], limit: int, files: int) -> None:
    given = {f"t{place}": torch.full((size, 256), float(place)) for place, size in enumerate(sizes)}
    writer = ShardFiles(tmp_path, max_bytes=limit * 1024)
    most = 0
    for name, tensor in given.items():
        writer.add(name, tensor)
        most = max(most, writer._held_bytes)
    assert most <= max([limit, *sizes]) * 1024  # one file, or a tensor that is larger than one
    written = writer.close()
    assert len(written) == files == len(list(tmp_path.glob("*.safetensors")))
    found = tensors_in(tmp_path)
    assert found.keys() == given.keys() and all(found[name].equal(given[name]) for name in given)
    if files == 1:
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(sizes) * 1024
        for name, place in index["weight_map"].items():
            with safe_open(tmp_path / place, framework="pt") as file:
                assert name in file.keys()  # noqa: SIM118


def test_an_earlier_export_leaves_nothing_behind(tmp_path: Path) -> None:
    for count in (3, 1, 2):
        writer = ShardFiles(tmp_path, max_bytes=16)
        for place in range(count):
            writer.add(f"t{place}", torch.full((4,), float(count)))
        writer.close()
        (tmp_path / "notes.txt").touch()
        assert len(tensors_in(tmp_path)) == count and (tmp_path / INDEX).exists() is (count > 1)
        assert not list(tmp_path.glob(".*")) and (tmp_path / "notes.txt").exists()


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    given = {str(kind): torch.ones(2, 3).to(kind) for kind in (torch.bfloat16, torch.float64, torch.int64, torch.bool)}
    given |= {"number": torch.tensor(3, dtype=torch.int32), "none": torch.zeros(0, 4), "turned": torch.rand(3, 2).T}
    writer = ShardFiles(tmp_path)
    for name, tensor in given.items():
        writer.add(name, tensor)
    with pytest.raises(AsyncRLError, match="twice"):
        writer.add("none", given["none"])
    writer.close()
    found = tensors_in(tmp_path)
    assert all(found[name].equal(given[name]) and found[name].dtype == given[name].dtype for name in given)


# ---------------------------------------------------------------- names

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", EXPERTS),
        ("mixtral", {"num_local_experts": 4}),
        ("deepseek_v3", LATENT),
    ],
)
def test_names_are_those_of_save_pretrained(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(TINY | more)))
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.uniform_()  # of DeepSeek's router: stored with the weights, not a parameter
    model.save_pretrained(tmp_path / "wanted")
    writer = FolderWriter(
        tmp_path / "got",
        AutoConfig.from_pretrained(tmp_path / "wanted"),
        dtype=torch.float32,
        source=tmp_path / "wanted",
        max_bytes=20_000,
        trust_remote_code=False,
    )
    for name, parameter in model.named_parameters():
        writer.add(name, parameter.detach())
    assert len(writer.close()) > 3
    wanted, got = tensors_in(tmp_path / "wanted"), tensors_in(tmp_path / "got")
    assert got.keys() == wanted.keys() and all(got[name].equal(wanted[name]) for name in wanted)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "got").state_dict()
    assert all(back[name].equal(tensor) for name, tensor in model.state_dict().items())


def test_tensors_that_are_written_as_one_wait_for_each_other() -> None:
    config = AutoConfig.for_model("hrm_text", **(TINY | {"num_key_value_heads": 4}))
    model = AutoModelForCausalLM.from_config(config)
    pieces, got = Pieces(build_skeleton(config, trust_remote_code=False)), dict[str, torch.Tensor]()
    for name, parameter in model.named_parameters():
        got |= pieces.add(name, parameter.detach())
    got |= pieces.close()
    joined = [name for name in got if name.endswith("mlp.gate_up_proj.weight")]
    assert joined and not [name for name in got if name.endswith("mlp.gate_proj.weight")]
    assert sum(tensor.numel() for tensor in got.values()) == sum(one.numel() for one in model.parameters())


def test_buffers_and_code_are_those_of_the_start_folder(tmp_path: Path) -> None:
    """A critic starts from another folder than the policy, whose tokenizer it has."""
    start, policy = tmp_path / "critic", tmp_path / "policy"
    for folder, bias in ((start, 3.0), (policy, 5.0)):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **TINY, **LATENT))
        model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(bias)
        model.save_pretrained(folder)
        (folder / "modeling.py").write_text(f"# {folder.name}")
        (folder / "tokenizer.json").write_text(folder.name)
    config = AutoConfig.from_pretrained(start)
    config.auto_map = {"AutoModel": "modeling.Model"}
    options: dict[str, Any] = {"dtype": torch.float32, "max_bytes": 1 << 30, "trust_remote_code": False}
    writer = FolderWriter(tmp_path / "out", config, source=policy, **options)
    for name, parameter in AutoModelForCausalLM.from_pretrained(start).named_parameters():
        writer.add(name, parameter.detach())
    writer.close()
    found = tensors_in(tmp_path / "out")
    assert {float(value.mean()) for name, value in found.items() if name.endswith("correction_bias")} == {3.0, 0.0}
    assert (tmp_path / "out" / "modeling.py").read_text() == "# critic"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "policy"


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def made(gang: Gang, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two steps with a checkpoint, and the configuration of its model."""
    start = tmp_path_factory.mktemp("start") / "model"
    shutil.copytree(model_dir, start)
    (start / "chat_template.jinja").write_text(TEMPLATE)
    config = make_config(start, tmp_path_factory.mktemp("runs") / "run", steps=2)
    learner, _, backend, services = make_learner(config, gang)
    RunDir(config.run_dir).config.write_text(dump(config))
    learner.run()
    services.close()
    return config, backend


def test_an_export_in_files_is_the_model_that_was_trained(made: Any, tmp_path: Path) -> None:
    config, backend = made
    said: list[str] = []
    folder = export(config, out=tmp_path / "out", dtype="bfloat16", max_bytes=10_000, say=said.append)
    files = list(folder.glob("model-*.safetensors"))
    assert len(files) > 3 and (folder / INDEX).exists() and not (folder / "model.safetensors").exists()
    assert (
        said == [f"policy: 0.0 million parameters in {said[0].split(' in ')[1]}"] and f"{len(files)} files" in said[0]
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.use_cache and model.config.tie_word_embeddings
    state, trained = model.state_dict(), 0
    for name, data in backend.iter_hf_weights():
        assert state[name].equal(
            torch.frombuffer(bytearray(data), dtype=torch.float32).view(state[name].shape).bfloat16()
        )
        trained += 1
    assert trained == len(tensors_in(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == TEMPLATE and model.generation_config.eos_token_id == 2
    ids = torch.tensor([[3, 4, 5]])
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 6)


def test_it_is_what_the_learner_writes_and_what_its_backend_would(
    made: Any, gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = made
    final, said = RunDir(config.run_dir).export, list[str]()
    streamed = export(config, out=tmp_path / "streamed", step=2)
    monkeypatch.setattr(exporter, "export_files", lambda *_, **__: False)  # as for a checkpoint in other names
    loaded = export(config, out=tmp_path / "loaded", gang=gang, say=said.append)
    assert "its backend loads it" in said[0]
    names = sorted(path.name for path in final.iterdir())
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= set(names)
    for folder in (streamed, loaded):
        assert sorted(path.name for path in folder.iterdir()) == names
        for name in names:
            assert (folder / name).read_bytes() == (final / name).read_bytes(), name


def test_what_cannot_be_exported_is_said(made: Any, tmp_path: Path) -> None:
    config, _ = made
    run = RunDir(config.run_dir)
    with pytest.raises(ConfigError, match="no checkpoint of step 7; there are: 2"):
        export(config, step=7)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for target in (tmp_path / "full", tmp_path / "full" / "mine"):
        with pytest.raises(ConfigError, match="not empty"):
            export(config, out=target)
    (tmp_path / "empty").mkdir()
    assert export(config, out=tmp_path / "empty") == tmp_path / "empty"
    bad = tmp_path / "bad"
    shutil.copytree(run.root, bad)
    shard = bad / "checkpoints" / "step_000002" / "shard_00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    for step in (2, None):
        with pytest.raises(AsyncRLError, match="size or digest differs") as refused:
            export(make_config(Path(config.model.path), bad), step=step, out=tmp_path / "none")
        assert refused.value.code == "learner.checkpoint"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_full_disk_leaves_no_half_of_a_folder(
    made: Any, gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, loaded: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if loaded:  # by the backend, as for adapters
        monkeypatch.setattr(exporter, "export_files", lambda *_, **__: False)
    monkeypatch.setattr("learners.backends.safetensors_writer.os.fsync", full)
    with pytest.raises(AsyncRLError) as refused:
        export(made[0], out=tmp_path / "out", gang=gang)
    assert refused.value.code == "disk.full" and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the command


def test_the_command_refuses_before_anything_starts(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(RunDir(made[0].run_dir).root)

    def refused(*words: str) -> str:
        assert cli.main(["export", *words]) == 2
        return capsys.readouterr().err

    assert "run.missing" in refused(str(tmp_path))
    assert "is not a size" in refused(run, "--max-shard-size", "5 apples")
    assert "not empty" in refused(run, "--out", run)
    fresh = RunDir(tmp_path / "fresh").create()
    fresh.config.write_text(dump(make_config(tmp_path, fresh.root)))
    assert "the run has no checkpoint" in refused(str(fresh.root))
    with pytest.raises(SystemExit):
        cli.main(["export", run, "--dtype", "int4"])


@pytest.mark.parametrize("text", ["0", "-1GB", "GB", "5 XB", "", "1e9"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_the_command_becomes_the_exporter(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    become: list[Any] = []
    run = tmp_path / "moved"
    shutil.copytree(RunDir(made[0].run_dir).root, run)

    def replace(program: str, words: list[str], env: Any) -> None:
        become.extend((program, words, env))

    export_command(run, step=2, out=tmp_path / "out", dtype="float16", max_shard_size="20KB", replace=replace)
    export_command(run, step=None, out=None, dtype="auto", max_shard_size="5GB", replace=replace)
    assert become[0] == sys.executable and become[1][1:3] == ["-m", "learners.checkpoints.export"]
    assert str(ROOT) in become[2]["PYTHONPATH"].split(os.pathsep)
    assert exporter.main(become[1][3:]) == 0
    done = capsys.readouterr()
    assert done.out == f"{tmp_path / 'out'}\n" and "policy: " in done.err
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "out").values()} == {torch.float16}
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert exporter.main(become[1][3:]) == 2 and "not empty" in capsys.readouterr().err
    assert exporter.main(become[4][3:]) == 0 and (run / "export-step_000002" / "model.safetensors").exists()
