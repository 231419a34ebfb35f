"""Routing replay by the hf engine and the learner's model: log-probs agree although routers disagree (R3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import VOCAB, model_of
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from asyncrl.engine import GenDelta, GenRequest, join_deltas
from asyncrl.errors import ConfigError
from asyncrl.runtime.routers import Routers
from learners.backends.base import extra_inputs, to_device
from learners.batch.micro_batches import MicroBatch, Sample, packed_row, padded_rows
from learners.models.policy_model import PolicyModel
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.loading import build_decoder, settle_attention

CPU = torch.device("cpu")
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")
PROMPTS = ([3, 4, 5, 6, 7], [9], [*range(10, 32)])


def decoder_of(model: PreTrainedModel, *, slots: int = 4) -> Decoder:
    settle_attention(model, device=CPU, where="m")
    built = build_decoder(
        model, slots=slots, max_prompt=24, max_new=40, recompute=True, where="m", routers=Routers(model)
    )
    return built.decoder


@contextmanager
def disturbed(decoder: Decoder, size: float) -> Iterator[None]:
    """The engine's routers choose by scores whose logarithms are off by noise of this size; weights stay exact."""
    routers: Any = decoder._routers
    choose, noise = routers.choose, torch.Generator().manual_seed(0)

    def noisy(layer: int, topk: Any, scores: torch.Tensor, *rest: Any, **options: Any) -> Any:
        def chosen(values: torch.Tensor, *given: Any, **named: Any) -> Any:
            logits = values.softmax(-1).log() if values.min() < 0 or values.sum(-1).max() > 1.01 else values.log()
            shaken = logits + size * torch.randn(logits.shape, generator=noise)
            places = topk(shaken, *given, **named).indices
            return torch.return_types.topk((values.gather(-1, places), places))

        is_router = scores.dim() == 2 and scores.shape[1] == routers.experts
        return choose(layer, chosen if is_router else topk, scores, *rest, **options)

    routers.choose = noisy
    try:
        yield
    finally:
        routers.choose = choose


def drive(decoder: Decoder, *, swap_at: int = -1) -> list[tuple[list[int], GenDelta]]:
    """Two samples of each prompt, with their prompts."""
    decoder.swap(1, lambda: None)
    for number, prompt in enumerate(PROMPTS):
        ids = np.asarray(prompt, np.int32)
        decoder.submit(GenRequest(f"{number}", ids, (0, 1), 7, 10 + 8 * number, experts=True))
    deltas: dict[tuple[str, int], list[GenDelta]] = {}
    for step in range(200):
        if step == swap_at:
            decoder.swap(2, lambda: None)
        for item in decoder.step():
            deltas.setdefault((item.id, item.index), []).append(item)
    assert decoder.idle and len(deltas) == 6
    return [(PROMPTS[int(key[0])], join_deltas(parts)) for key, parts in sorted(deltas.items())]


def rows(samples: list[tuple[list[int], GenDelta]], *, replay: bool, packing: bool = True) -> MicroBatch:
    made = [
        Sample(
            np.concatenate([np.asarray(prompt, np.int32), delta.token_ids]),
            len(prompt),
            delta.logprobs,
            np.ones(len(delta.token_ids), np.uint8),
            1.0,
            number,
            experts=delta.experts if replay else None,
        )
        for number, (prompt, delta) in enumerate(samples)
    ]
    return (packed_row if packing else padded_rows)(made)


def logprobs_of(policy: PolicyModel, micro: MicroBatch) -> torch.Tensor:
    t = to_device(micro, CPU)
    found = policy(t.input_ids, t.position_ids, t.positions, t.targets, **extra_inputs(t))
    assert isinstance(found, tuple)
    return found[0]


def policy_of(model: PreTrainedModel) -> PolicyModel:
    policy = PolicyModel(model)
    policy.routers = Routers(model)
    return policy


def undecided(kind: str) -> PreTrainedModel:
    """A model whose routers score experts alike, as trained ones do."""
    model = model_of(kind, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.mul_(0.1)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_agree_with_replay_and_only_with_it(kind: str) -> None:
    """The acceptance of R3: routers off by 1e-2, gaps below 1e-5 with replay and ten times larger without."""
    decoder = decoder_of(undecided(kind))
    with disturbed(decoder, 1e-2):
        samples = drive(decoder)
    policy = policy_of(undecided(kind))
    engine = torch.from_numpy(np.concatenate([delta.logprobs for _, delta in samples]))
    for packing in (True, False):
        with torch.no_grad():
            gaps = [
                float((logprobs_of(policy, rows(samples, replay=replay, packing=packing)) - engine).abs().max())
                for replay in (True, False)
            ]
        assert gaps[0] < 1e-5, gaps
        assert gaps[1] > 10 * gaps[0] and gaps[1] > 1e-4, gaps
    assert differing(policy, samples) > 0.05


def differing(policy: PolicyModel, samples: list[tuple[list[int], GenDelta]]) -> float:
    """The share of choices (token and layer) that differ from the learner's own."""
    assert policy.routers is not None
    policy.routers.give(None)
    apart, total = 0, 0
    for prompt, delta in samples:
        ids = torch.tensor([[*prompt, *delta.token_ids.tolist()]])
        with torch.no_grad(), policy.routers.recording() as found:
            policy.model(input_ids=ids, use_cache=False)
        assert delta.experts is not None and delta.experts.dtype == np.uint8
        own = np.sort(found[0][:-1].numpy(), -1)
        assert own.shape == delta.experts.shape
        apart += int((own != np.sort(delta.experts, -1)).any(-1).sum())
        total += own.shape[0] * own.shape[1]
    return apart / total


def test_undisturbed_choices_are_those_of_a_plain_forward_and_a_swap_forgets_them() -> None:
    decoder = decoder_of(model_of("qwen3_moe", seed=1), slots=2)
    samples = drive(decoder, swap_at=15)
    policy = policy_of(model_of("qwen3_moe", seed=1))
    mixed = [delta for _, delta in samples if len(delta.runs) > 1]
    assert mixed and all(delta.experts is None for delta in mixed)
    whole = [(prompt, delta) for prompt, delta in samples if len(delta.runs) == 1]
    assert {delta.runs[0][0] for _, delta in whole} == {1, 2}
    assert differing(policy, whole) == 0.0
    batch = rows(samples, replay=True)
    replayed = (batch.experts.reshape(batch.input_ids.size, -1) >= 0).all(1)
    lengths = [len(prompt) + len(delta.token_ids) for prompt, delta in samples]
    wanted = [[delta.experts is not None] * (n - 1) + [False] for (_, delta), n in zip(samples, lengths, strict=True)]
    assert sorted(map(sum, wanted)) and int(replayed.sum()) == sum(map(sum, wanted))


def test_a_request_without_experts_gets_none() -> None:
    decoder = decoder_of(model_of("qwen3_moe", seed=1))
    decoder.swap(1, lambda: None)
    decoder.submit(GenRequest("a", np.array([3, 4], np.int32), (0,), 7, 3))
    found = [item for _ in range(5) for item in decoder.step()]
    assert len(found) == 1 and found[0].experts is None


def test_a_recomputed_layer_replays_the_same_experts() -> None:
    """Gradients with activation checkpointing are those without it, and not those of the routers' own choices."""
    decoder = decoder_of(model_of("qwen3_moe", seed=1))
    with disturbed(decoder, 0.3):
        samples = drive(decoder)
    grads = {}
    for name, replay, checkpointing in (("plain", True, False), ("again", True, True), ("own", False, False)):
        model = model_of("qwen3_moe", seed=1).requires_grad_(True).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = policy_of(model)
        logprobs_of(policy, rows(samples, replay=replay)).sum().backward()
        grads[name] = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    assert torch.equal(grads["plain"], grads["again"])
    assert float((grads["plain"] - grads["own"]).norm() / grads["own"].norm()) > 0.01


def test_a_router_is_given_values_with_their_gradient() -> None:
    """The example of the module."""
    routers = Routers(model_of("mixtral", seed=1))
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 2, requires_grad=True)
    routers.give(torch.tensor([[1, 3] * routers.layers, [-1, -1] * routers.layers], dtype=torch.int16))
    found = routers.choose(0, torch.topk, scores, 2, dim=-1)
    assert found.indices.tolist() == [[1, 3], [1, 2]]
    assert found.values.tolist() == [pytest.approx([0.4, 0.2]), pytest.approx([0.4, 0.3])]
    found.values.sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[0, 1, 0, 1], [0, 1, 1, 0]]


def test_a_model_without_routers_is_refused() -> None:
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, **tiny))
    with pytest.raises(ConfigError, match="no routers of experts"):
        Routers(model)


def test_a_block_that_chooses_in_another_way_is_refused_at_its_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mixtral", seed=1)
    gate = type(model.model.layers[0].mlp.gate)

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        flat = hidden.reshape(-1, hidden.shape[-1])
        places = (flat @ self.weight.T).argsort(-1)[:, -2:]
        return flat @ self.weight.T, torch.ones(places.shape), places

    monkeypatch.setattr(gate, "forward", forward)
    Routers(model)
    with pytest.raises(ConfigError, match="layer 0 does not choose 2 of 4 experts by topk"):
        model(input_ids=torch.tensor([[3, 4]]))
