"""The parts of a training service: its log, its losses, and a trainer that can end at any point."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.cli import main
from asyncrl.config import Config, parse
from learners.service import passes, trainer
from learners.service.adapter_state import Model
from learners.service.base_model import BaseModel
from learners.service.losses import loss_settings, token_losses
from learners.service.messages import AdamParams, AdapterForm, ServicePaths
from learners.service.protocol import _CLASSES, Array, BadRequest, Datum, Pass, read_pass
from learners.service.request_log import FAILED, JSON, PENDING, PROTO, Conflict, RequestLog
from learners.service.trainer import Trainer
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

SESSION = "s-0123456789abcdef"
MODEL = f"{SESSION}:train:0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(path)
    save_model(path, make_tiny_qwen3(len(tokenizer), layers=2, hidden_size=64))
    return path


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Config:
    return parse(
        f'[run]\ndir = "{tmp_path}/run"\n[model]\npath = "{folder}"\ndtype = "float32"\n[service]\nport = 8000\n'
    )


@pytest.fixture
def paths(config: Config) -> ServicePaths:
    paths = ServicePaths(config.run_dir)
    paths.folder.mkdir(parents=True)
    return paths


def datum(tokens: list[int], **more: list[float]) -> Datum:
    targets = Array("int64", [len(tokens) - 1], np.asarray(tokens[1:], np.int64).tobytes())
    floats = {name: Array("float32", [len(x)], np.asarray(x, np.float32).tobytes()) for name, x in more.items()}
    return Datum(np.asarray(tokens[:-1], np.int32).tobytes(), {"target_tokens": targets, **floats})


def add_pass(log: RequestLog, seq: int, *data: Datum, queue: str = MODEL, loss: str = "cross_entropy") -> str:
    work = Pass(queue, seq, list(data), loss, {}, False)
    return log.add(queue, seq, "forward_backward", msgspec.msgpack.encode(work))


def add(log: RequestLog, seq: int, kind: str, queue: str = MODEL, **fields: Any) -> str:
    return log.add(queue, seq, kind, json.dumps({"model_id": queue, "seq_id": seq, **fields}).encode())


def create(log: RequestLog, queue: str = MODEL, *, seed: int = 1) -> str:
    form = {"rank": 4, "seed": seed}
    body = {"session_id": SESSION, "model_seq_id": 0, "base_model": "x", "lora_config": form}
    return log.add(queue, 0, "create_model", json.dumps(body).encode())


def run_all(config: Config) -> list[str]:
    """Run a new trainer until nothing can run. Returns the ids of answered requests, in order."""
    said: list[str] = []
    Trainer(config, ServicePaths(config.run_dir), said.append).run(lambda seconds: seconds == 0)
    return said[1:]


# ---------------------------------------------------------------- the log


def test_log_is_idempotent_and_refuses_another_body_also_after_a_restart(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log")
    assert log.add("q", 1, "optim_step", b"a") == log.add("q", 1, "optim_step", b"a") == "q:1"
    log.answer(log.pending()[0], JSON, b"{}")
    log.close()
    log = RequestLog(tmp_path / "log")
    assert log.add("q", 1, "optim_step", b"a") == "q:1"
    assert log.pending() == [] and log.find_answer("q:1") == (JSON, b"{}")
    for kind, body in (("optim_step", b"b"), ("save_weights", b"a")):
        with pytest.raises(Conflict, match="request 1 of q is a optim_step"):
            log.add("q", 1, kind, body)
    assert log.find_answer("q:2") is None and log.find_answer("q") is None


def test_a_repeat_of_a_cleared_request_executes_nothing(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log")
    log.add("q", 1, "forward_backward", b"a")
    log.answer(log.pending()[0], PROTO, b"x")
    log.clear_bodies("q", 0, 2)
    assert log.add("q", 1, "forward_backward", b"a") == "q:1" and log.pending() == []


# ---------------------------------------------------------------- bodies and losses


def test_pass_is_read_from_protocol_buffers() -> None:
    tensor = _CLASSES["Tensor"](dense=np.arange(3, dtype=np.int64).tobytes(), dtype=2, shape=[3])
    text = _CLASSES["Chunk"](encoded_text=_CLASSES["Text"](tokens=np.arange(3, dtype=np.int32).tobytes()))
    entry = _CLASSES["Input"](key="target_tokens", value=tensor)
    message = _CLASSES["Pass"](model_id="m", seq_id=2, loss_fn="ppo")
    message.data.append(_CLASSES["Datum"](model_input=[text], loss_fn_inputs=[entry]))
    message.config.append(_CLASSES["Setting"](key="beta", value=_CLASSES["Value"](number=0.5)))
    read = read_pass(message.SerializeToString())
    assert (read.model_id, read.seq_id, read.loss_fn, read.config, read.forward_only) == (
        "m",
        2,
        "ppo",
        {"beta": 0.5},
        False,
    )
    assert read.data[0].inputs["target_tokens"].values().tolist() == [0, 1, 2]
    message.data[0].model_input[0].image.data = b"x"
    with pytest.raises(BadRequest, match="images"):
        read_pass(message.SerializeToString())
    with pytest.raises(BadRequest, match="no forward_backward"):
        read_pass(b"\xff")


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_losses_and_their_gradients(name: str) -> None:
    p = torch.tensor([-1.0, -2.0, -0.5, -3.0], requires_grad=True)
    q, a = torch.tensor([-1.5, -1.0, -0.5, -3.1]), torch.tensor([2.0, -1.0, 0.5, 1.0])
    r = (p - q).exp()
    expected = {
        "cross_entropy": -(p * a).sum(),
        "importance_sampling": -(r * a).sum(),
        "ppo": -torch.min(r * a, r.clamp(0.8, 1.2) * a).sum(),
        "cispo": -(r.clamp(0.0, 4.0).detach() * a * p).sum(),
        "dro": -(p * a - 0.025 * (p - q) ** 2).sum(),
    }[name]
    inputs = {"weights": a} if name == "cross_entropy" else {"logprobs": q, "advantages": a}
    found = token_losses(name, p, inputs, loss_settings(name, {})).sum()
    assert float(found.detach()) == pytest.approx(float(expected.detach()))
    (wanted,), (given,) = torch.autograd.grad(expected, p, retain_graph=True), torch.autograd.grad(found, p)
    torch.testing.assert_close(given, wanted)


def test_unknown_losses_and_settings_are_refused() -> None:
    for name, config in (("gspo", {}), ("ppo", {"beta": 1.0})):
        with pytest.raises(BadRequest):
            loss_settings(name, config)


# ---------------------------------------------------------------- model


def test_adapters_equal_merged_weights_and_the_base_keeps_its_bits(config: Config) -> None:
    base, ids = BaseModel(config), torch.tensor([3, 4, 5, 6])
    plain = base.hf(input_ids=ids[None]).logits[0].log_softmax(-1)
    adapter = base.make_adapter(AdapterForm(4, 1))
    for _, b in adapter.pairs.values():
        b.data.normal_(0, 0.05)
    with base.activate(adapter), torch.no_grad():
        found = base.logprobs(ids, ids.roll(-1))
    assert torch.equal(base.hf(input_ids=ids[None]).logits[0].log_softmax(-1), plain)
    assert "lm_head" in adapter.pairs and len(adapter.pairs) == 15
    for name, (a, b) in adapter.pairs.items():
        module = base.hf.get_submodule(name)
        module.weight = torch.nn.Parameter(module.weight + adapter.scaling * (b @ a))  # its own, if it was tied
    merged = base.hf(input_ids=ids[None]).logits[0].log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]
    torch.testing.assert_close(found, merged, atol=1e-4, rtol=1e-4)


def test_saved_weights_are_those_that_peft_loads(config: Config, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = BaseModel(config)
    model = Model(base.make_adapter(AdapterForm(4, seed=1)))
    for _, b in model.adapter.pairs.values():
        torch.nn.init.normal_(b.data, generator=torch.Generator().manual_seed(3))
    model.export(tmp_path / "saved", base=str(folder), request="r", with_optimizer=False, overwrite=False)
    tokens = torch.tensor([3, 4, 5, 6, 7])
    with base.activate(model.adapter), torch.no_grad():
        expected = base.logprobs(tokens[:-1], tokens[1:])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "saved")).eval()
    with torch.no_grad():
        logits = loaded(input_ids=tokens[None, :-1]).logits[0]
    found = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert (base.logprobs(tokens[:-1], tokens[1:]) - expected).abs().max() > 0.01, "the adapter does something"


def test_gradients_that_are_not_finite_change_nothing(config: Config) -> None:
    model = Model(BaseModel(config).make_adapter(AdapterForm(2, 1)))
    before = [one.detach().clone() for one in model.adapter.parameters()]
    for wrong in (float("nan"), float("inf")):
        model.adapter.parameters()[0].grad.view(-1)[0] = wrong  # type: ignore[union-attr]
        assert not math.isfinite(model.step(AdamParams(1e-2)))
        assert all(torch.equal(one, old) for one, old in zip(model.adapter.parameters(), before, strict=True))
        assert not any(one.any() for one in model.gradients())


def test_a_failed_pass_leaves_the_gradients(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    base = BaseModel(config)
    model = Model(base.make_adapter(AdapterForm(2, 1)))
    work = Pass(MODEL, 1, [datum([3, 4, 5]), datum([5, 6, 7])], "cross_entropy", {}, False)
    passes.run_pass(base, model, work)
    before, calls = model.gradients(), [0]

    def fail_second(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("out of memory")
        return token_losses(*args)

    monkeypatch.setattr(passes, "token_losses", fail_second)
    with pytest.raises(RuntimeError):
        passes.run_pass(base, model, work)
    assert all(map(torch.equal, before, model.gradients())) and any(one.any() for one in before)


# ---------------------------------------------------------------- trainer


def add_training(log: RequestLog, queue: str = MODEL, *, seed: int = 1) -> None:
    """Two steps, the second of two passes, and saved weights: numbers 0 to 6."""
    create(log, queue, seed=seed)
    add_pass(log, 1, datum([3, 4, 5, 6]), queue=queue)
    add(log, 2, "optim_step", queue, adam_params=msgspec.to_builtins(AdamParams(1e-2)))
    add_pass(log, 3, datum([3, 4, 5, 6]), queue=queue)
    add_pass(log, 4, datum([4, 6, 8], weights=[1.0, 0.5]), datum([9, 8, 7]), queue=queue)
    add(log, 5, "optim_step", queue, adam_params=msgspec.to_builtins(AdamParams(1e-2, grad_clip_norm=1.0)))
    add(log, 6, "save_weights", queue, path="end")


def results(config: Config, queue: str = MODEL) -> tuple[list[Any], dict[str, torch.Tensor]]:
    paths = ServicePaths(config.run_dir)
    log = RequestLog(paths.log)
    folder = paths.folder / "weights" / queue / "weights" / "end"
    tensors = load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")
    return [log.find_answer(f"{queue}:{seq}") for seq in range(1, 6)], tensors


class Killed(BaseException):
    """As SIGKILL: nothing of the process goes on."""


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], dict[str, torch.Tensor]]:
    run = tmp_path_factory.mktemp("alone")
    config = parse(f'[run]\ndir = "{run}"\n[model]\npath = "{folder}"\ndtype = "float32"\n[service]\nport = 8000\n')
    ServicePaths(run).folder.mkdir()
    add_training(RequestLog(ServicePaths(run).log))
    run_all(config)
    return results(config)


@pytest.mark.parametrize("point", ["begin", "save_state", "stored", "answer", "export"])
def test_steps_are_applied_once_wherever_the_trainer_ends(
    config: Config, paths: ServicePaths, undisturbed: Any, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at its first, second, ... visit of a point, once for each visit; `stored`: behind a written state."""
    add_training(RequestLog(paths.log))
    where: dict[str, tuple[type, str]] = {
        "begin": (RequestLog, "begin"),
        "save_state": (Model, "save_state"),
        "stored": (Model, "save_state"),
        "answer": (RequestLog, "answer"),
        "export": (Model, "export"),
    }
    kind, name = where[point]
    real: Callable[..., Any] = getattr(kind, name)
    seen = set[str]()

    def kill_once(self: Any, *args: Any, **more: Any) -> Any:
        key = str(args[1] if name == "save_state" else getattr(args[0], "id", args[0]))
        is_new = key not in seen
        seen.add(key)
        if is_new and point != "stored":
            raise Killed
        result = real(self, *args, **more)
        if is_new:
            raise Killed
        return result

    monkeypatch.setattr(kind, name, kill_once)
    kills = 0
    for _ in range(20):
        try:
            run_all(config)
            break
        except Killed:
            kills += 1
    assert kills == {"begin": 7, "answer": 7, "export": 1}.get(point, 3)
    answers, tensors = results(config)
    expected_answers, expected = undisturbed
    assert answers == expected_answers and all(form in (JSON, PROTO) for form, _ in answers)
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_old_answers_are_removed_as_long_as_it_runs(
    config: Config, paths: ServicePaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "CLEAR_S", 0.0)
    looks, removed = iter([True, True, False]), list[int]()
    monkeypatch.setattr(RequestLog, "clear_old_answers", lambda _: removed.append(1))
    Trainer(config, paths, str).run(lambda _: next(looks))
    assert len(removed) == 3


def test_models_do_not_change_each_other_and_take_turns(
    config: Config, paths: ServicePaths, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter is held at a time, so that every turn reads a model again."""
    log, other = RequestLog(paths.log), f"{SESSION}:train:1"
    add_training(log)
    add_training(log, other, seed=2)
    small = msgspec.structs.replace(config, service=msgspec.structs.replace(config.service, max_models=1))
    order = [one.rpartition(":")[0] for one in run_all(small)]
    assert order[:8] == [MODEL, other] * 4 and len(order) == 14
    answers, tensors = results(config)
    assert answers == undisturbed[0] and all(torch.equal(one, undisturbed[1][name]) for name, one in tensors.items())
    assert any(not torch.equal(one, tensors[name]) for name, one in results(config, other)[1].items())


def test_a_gap_waits_and_then_fails(config: Config, paths: ServicePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(paths.log)
    create(log)
    add(log, 2, "optim_step", adam_params={})
    assert run_all(config) == [f"{MODEL}:0"]
    add_pass(log, 1, datum([3, 4, 5]))
    assert run_all(config) == [f"{MODEL}:1", f"{MODEL}:2"]
    add(log, 4, "optim_step", adam_params={})
    monkeypatch.setattr(trainer, "GAP_S", -1.0)
    run_all(config)
    form, answer = log.find_answer(f"{MODEL}:4") or (PENDING, b"")
    assert form == FAILED and b"request 3 did not come" in (answer or b"")


def test_errors_are_answers_and_change_nothing(config: Config, paths: ServicePaths) -> None:
    log = RequestLog(paths.log)
    create(log)
    add_pass(log, 1, datum([3, 4, 5]), loss="ppo")
    add_pass(log, 2, datum([3, 4, 5], mask=[1.0, 1.0]))
    add_pass(log, 3, datum([3, 4, 1000]))
    add(log, 4, "optim_step", optimizer_params={"type": "dimuon"})
    add(log, 5, "load_weights", path=f"tinker://{MODEL}/weights/none", optimizer=True)
    add(log, 6, "optim_step", adam_params={})
    run_all(config)
    said = [log.find_answer(f"{MODEL}:{seq}") or (PENDING, b"") for seq in range(1, 7)]
    assert [form for form, _ in said] == [FAILED] * 5 + [JSON]
    texts = [
        b"needs loss_fn_inputs['logprobs']",
        b"no loss_fn_inputs['mask']",
        b"ids below",
        b"Adam alone",
        b"no weights",
    ]
    assert all(text in (answer or b"") for text, (_, answer) in zip(texts, said, strict=False))
    assert json.loads(said[5][1] or b"")["metrics"] == {"grad_norm": 0.0}


def test_saved_weights_sample_alike_and_load_with_their_optimizer(config: Config, paths: ServicePaths) -> None:
    log = RequestLog(paths.log)
    add_training(log)
    add(log, 7, "save_weights_for_sampler", sampling_session_seq_id=0)
    run_all(config)
    sampler = f"{SESSION}:sample:0"
    log.add_sampler(f"{SESSION}:sample:1", f"tinker://{MODEL}/weights/end")
    log.add_sampler(f"{SESSION}:sample:2", "")
    chunk = {"type": "encoded_text", "tokens": [3, 4, 5]}
    for queue, seed in ((sampler, 3), (f"{SESSION}:sample:1", 3), (f"{SESSION}:sample:2", 3)):
        body = {"prompt": {"chunks": [chunk]}, "num_samples": 2, "sampling_session_id": queue, "seq_id": 0}
        body["sampling_params"] = {"max_tokens": 6, "seed": seed, "stop": []}
        log.add(queue, 0, "sample", json.dumps(body).encode())
    body = {"path": f"tinker://{MODEL}/weights/end", "optimizer": True, "session_id": SESSION, "model_seq_id": 1}
    loaded = f"{SESSION}:train:1"
    log.add(loaded, 0, "load_weights", json.dumps(body).encode())
    add(log, 1, "save_weights", loaded, path="end")
    run_all(config)
    first, second, plain = (log.find_answer(f"{SESSION}:sample:{number}:0") for number in range(3))
    assert first is not None and first[0] == PROTO and first == second != plain
    message = _CLASSES["Samples"].FromString(first[1] or b"")
    assert [len(one.tokens) for one in message.sequences] == [24, 24]
    assert message.sequences[0].tokens != message.sequences[1].tokens
    tensors = results(config, loaded)[1]
    assert all(torch.equal(one, tensors[name]) for name, one in results(config)[1].items())


# ---------------------------------------------------------------- command line


def test_a_service_file_needs_no_data_and_starts_no_run(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "service.toml"
    file.write_text(f'[run]\ndir = "{tmp_path}/run"\n[model]\npath = "{folder}"\n[service]\nport = 8000\n')
    assert main(["check", str(file)]) == 0
    assert main(["launch", "all", str(file)]) == 2
    assert main(["check", str(file), "--set", "model.path=/none"]) == 2
    assert main(["serve", str(file), "--set", "service.port=0"]) == 2
    assert not (tmp_path / "run").exists()


def test_a_check_names_the_packages_that_a_service_lacks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.toml"
    file.write_text(f'[run]\ndir = "{tmp_path}/run"\n[model]\npath = "{folder}"\n[service]\nport = 8000\n')
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "google" else find(name, *more))
    assert main(["check", str(file)]) == 2
    said = capsys.readouterr()
    assert "needs protobuf" in said.out + said.err and "pip install 'asyncrl[service]'" in said.out + said.err
