"""Gemma-2: soft caps of attention scores and logits, in the learner and in the hf engine, on caps that act."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learner_loop import gang
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from asyncrl import config as configuration
from asyncrl.config.capabilities import find_refusals
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.device import Device
from asyncrl.runtime.model_folder import model_json
from learners.backends.base import to_device
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.backends.fsdp2.loading import load_model
from learners.batch.micro_batches import Sample, packed_row, padded_rows
from learners.gang.gang import Gang
from learners.models import attention
from learners.models.policy_model import PolicyModel
from producers.engines.hf import loading as engine

assert gang  # a fixture

CPU = torch.device("cpu")
VOCABULARY, CAP, WINDOW, TEMPERATURE = 40, 5.0, 6, 0.9
LENGTHS = (9, 2, 23, 14)  # three are longer than the window


def make_model() -> Any:
    """Wide weights: scores and logits are far beyond the caps."""
    shape = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=CAP,
        final_logit_softcapping=CAP,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gemma2ForCausalLM._from_config(shape, attn_implementation="eager")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma2")
    make_model().save_pretrained(path)
    return path


def make_config(folder: Path, *settings: str) -> configuration.Config:
    text = f'model.path = "{folder}"\nmodel.dtype = "float32"\ndata.source = "a:b"\n[[reward]]\nfunction = "a:b"\n'
    return configuration.parse(text, overrides=(f"sampling.temperature={TEMPERATURE}", *settings))


def make_policy(folder: Path, *, chunk: int = 8) -> PolicyModel:
    """As the learner loads it."""
    model = load_model(make_config(folder, "learner.load=whole"), Device.find("cpu"))
    return PolicyModel(model, temperature=TEMPERATURE, chunk_tokens=chunk)


def samples() -> list[Sample]:
    made = []
    for number, length in enumerate(LENGTHS):
        tokens = np.random.default_rng(number).integers(3, VOCABULARY, length + 2).astype(np.int32)
        made.append(Sample(tokens, 2, np.zeros(length, "f4"), np.ones(length, "u1"), 0.0, number))
    return made


def plain_logs(model: Any, tokens: Any, prompt: int) -> Tensor:
    """Log-probs of the whole vocabulary `[T, V]` by transformers' own forward of one sequence."""
    ids = torch.tensor(np.asarray(tokens), dtype=torch.int64)[None]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, prompt - 1 : -1]
    return (logits.float() / TEMPERATURE).log_softmax(-1)


def pick(logs: Tensor, tokens: Any) -> Tensor:
    return logs.gather(-1, torch.tensor(np.asarray(tokens), dtype=torch.int64)[:, None])[:, 0]


def numbers(policy: PolicyModel, row: Any) -> tuple[Tensor, Tensor]:
    t = to_device(row, CPU)
    logprobs, entropy = policy(t.input_ids, t.position_ids, t.positions, t.targets)
    return logprobs, entropy  # type: ignore[return-value]


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.parametrize("layout", [packed_row, padded_rows])
def test_the_learner_computes_what_transformers_computes(folder: Path, layout: Any, chunk: int) -> None:
    policy, made = make_policy(folder, chunk=chunk), samples()
    assert policy.model.config._attn_implementation == "eager"
    logprobs, entropy = numbers(policy, layout(made))
    up = torch.linspace(-1, 1, logprobs.numel())
    ((logprobs * up).sum() + 0.3 * entropy.sum()).backward()
    plain = make_model()
    logs = torch.cat([plain_logs(plain, one.tokens, 2) for one in made])
    wanted = pick(logs, np.concatenate([one.tokens[2:] for one in made])), -(logs.exp() * logs).sum(-1)
    ((wanted[0] * up).sum() + 0.3 * wanted[1].sum()).backward()
    torch.testing.assert_close((logprobs, entropy), wanted, atol=1e-5, rtol=1e-5)
    grads = dict(policy.model.named_parameters())
    for name, parameter in plain.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(grads[name].grad, parameter.grad, atol=1e-5 * max(largest, 1), rtol=1e-4, msg=name)


def without_caps(policy: PolicyModel) -> Iterator[str]:
    """Leave out one cap after the other."""
    policy.cap = None
    yield "logits"
    policy.cap = CAP
    for layer in policy.model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    yield "scores"


def test_both_caps_act(folder: Path) -> None:
    policy, row = make_policy(folder), packed_row(samples())
    with torch.no_grad():
        capped = numbers(policy, row)[0]
        for name in without_caps(policy):
            assert float((numbers(policy, row)[0] - capped).abs().max()) > 0.1, name


def test_the_back_end_trains_it_and_its_check_finds_a_missing_cap(folder: Path, gang: Gang) -> None:
    backend = FSDP2Backend(make_config(folder), gang)
    backend.self_check()
    (found,) = backend.forward_logprobs([packed_row(samples())])
    plain = make_model()
    wanted = torch.cat([pick(plain_logs(plain, one.tokens, 2), one.tokens[2:]) for one in samples()])
    torch.testing.assert_close(found, wanted.detach(), atol=1e-5, rtol=1e-5)
    policy: Any = backend._policy
    policy.cap = None
    with pytest.raises(AsyncRLError, match="differ by"):
        backend.self_check()


@torch.inference_mode()
@pytest.mark.parametrize("way", engine.TRIED)
def test_the_engine_records_the_learners_log_probs(folder: Path, way: str) -> None:
    model: Any = engine.load_model(make_config(folder), device=CPU, max_len=40)
    assert model.config._attn_implementation == "eager"
    built = engine.build_decoder(model, slots=3, max_prompt=8, max_new=30, recompute=False, where="m", tried=(way,))
    built.decoder.swap(1, lambda: None)
    prompts = {"0": [3, 4, 5, 6, 7], "1": [9]}
    for name, prompt in prompts.items():
        built.decoder.submit(
            GenRequest(name, np.array(prompt, np.int32), (0, 1), 7, 24, temperature=TEMPERATURE, stop_ids=(2,))
        )
    done: list[GenDelta] = []
    for _ in range(200):
        done += built.decoder.step()
    assert len(done) == 4 and max(len(item.token_ids) for item in done) > WINDOW
    made, plain = [], make_model()
    for item in done:
        tokens = np.concatenate((prompts[item.id], item.token_ids)).astype(np.int32)
        start = len(prompts[item.id])
        wanted = pick(plain_logs(plain, tokens, start), item.token_ids)
        np.testing.assert_allclose(item.logprobs, wanted, atol=2e-5)
        made.append(Sample(tokens, start, item.logprobs, np.ones(len(item.token_ids), "u1"), 0.0))
    learner = numbers(make_policy(folder), packed_row(made))[0]
    np.testing.assert_allclose(np.concatenate([item.logprobs for item in done]), learner, atol=2e-5)


def test_kernels_without_a_cap_are_refused(folder: Path) -> None:
    model = model_json(folder)
    assert not list(find_refusals(make_config(folder, "learner.device=cpu"), model))
    for setting, said in (
        ("model.attn_implementation=sdpa", "attn_logit_softcapping = 5.0: backend 'fsdp2' needs a kernel that caps"),
        ("learner.parallel.sequence=2", "cannot split the attention of auto and eager"),
    ):
        (found,) = find_refusals(make_config(folder, "learner.device=cpu", "learner.ranks=2", setting), model)
        assert said in found.message and found.key == setting.partition("=")[0] and found.remedy
    with pytest.raises(ConfigError):
        load_model(make_config(folder, "model.attn_implementation=sdpa"), Device.find("cpu"))


def test_the_kernel_of_torch_is_not_asked_for_capped_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("it has no cap")

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    heads, places = torch.zeros(1, 2, 5, 4), torch.arange(5)[None]
    with pytest.raises(ValueError, match="does not support `softcap`"):
        attention.attend_varlen(torch.nn.Identity(), heads, heads, heads, None, position_ids=places, softcap=CAP)


def test_packed_rows_of_another_kernel_are_checked_under_eager() -> None:
    model = make_model()
    model.set_attn_implementation("flex_attention")
    with attention.plain(model):
        assert model.config._attn_implementation == "eager"
