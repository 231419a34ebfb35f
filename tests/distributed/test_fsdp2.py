"""FSDP2 against plain torch, and what is its own; the rest is in `test_backend_contract.py`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import backend_contract as cases
import critic_cases
import numpy as np
import pytest
import torch

from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.models import attention
from learners.step.update import train_step

pytestmark = pytest.mark.timeout(600)  # the first one waits for the launch of all case modules


def test_one_rank_equals_plain_torch(model: Path, gang: Gang) -> None:
    """Loss, gradient norm and weights of the first step, from full logits of single sequences and torch's AdamW."""
    from transformers import AutoModelForCausalLM

    config = cases.make_config(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    every = cases.samples(14, 1)
    tokens = sum(int(sample.mask.sum()) for sample in every)
    loss = torch.zeros(())
    for sample in every:
        ids = torch.tensor(sample.tokens, dtype=torch.long)
        logs = policy(input_ids=ids[None]).logits[0, sample.prompt_tokens - 1 : -1].log_softmax(-1)
        current = logs.gather(-1, ids[sample.prompt_tokens :, None]).squeeze(-1)
        mask = torch.tensor(sample.mask).bool()
        weight = (current.detach() - torch.tensor(sample.behaviour)).exp().clamp(max=2.0)
        entropy = -(logs.exp() * logs).sum(-1)
        ratio = (current - current.detach()).exp()
        loss = loss + ((-sample.advantage * ratio * weight - 0.01 * entropy) * mask).sum() / tokens
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.05)
    optimizer.step()
    backend = FSDP2Backend(config, gang)
    share = cases.cut(14, 1, config, gang)
    metrics = train_step(share, backend=backend, gang=gang, config=config.learner, step=1).metrics
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert float(norm) > 0.05  # clipping was at work
    wanted = dict(policy.named_parameters())
    exported = dict(backend.iter_hf_weights())
    assert exported.keys() == wanted.keys()  # Hugging Face names, the tied head once
    for name, data in exported.items():
        got = torch.from_numpy(data.view(np.float32)).view(wanted[name].shape)
        torch.testing.assert_close(got, wanted[name].detach(), atol=1e-5, rtol=0)


def test_a_separate_forward_gives_the_proximal_log_probs_of_the_training_forward(model: Path, gang: Gang) -> None:
    """With one mini-batch no forward is spent on proximal log-probs: they equal the current ones, detached."""
    config = cases.make_config(model)
    backend = FSDP2Backend(config, gang)
    (part,) = cases.cut(14, 1, config, gang)
    before = backend.forward_logprobs(part.micro)
    seen = []

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, micro: Any, number: int) -> Any:
        seen.append(logprobs.detach())
        return logprobs.sum() * 0, {}

    backend.train(part.micro, loss)
    assert len(before) == len(seen) == len(part.micro)
    for left, right in zip(before, seen, strict=True):
        assert torch.equal(left, right)


def test_wrong_packing_is_refused_at_the_start(model: Path, gang: Gang) -> None:
    from asyncrl.errors import AsyncRLError

    backend = FSDP2Backend(cases.make_config(model), gang)
    inner = backend._policy.model.base_model
    forward = inner.forward
    inner.forward = lambda **given: forward(**{**given, "position_ids": None})  # sequences see each other
    with pytest.raises(AsyncRLError) as caught:
        backend.self_check()
    assert caught.value.code == "learner.packing"


def test_a_kernel_that_is_wrong_alike_for_rows_and_sequences_is_refused(
    model: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not causal gives a packed row and its sequences alone the same wrong log-probs."""
    from asyncrl.errors import AsyncRLError

    backend = FSDP2Backend(cases.make_config(model), gang)
    inner = attention.attend
    with monkeypatch.context() as patch:
        patch.setattr(attention, "attend", lambda *given, **more: inner(*given, **{**more, "is_causal": False}))
        attention.install(backend._policy.model)
        with pytest.raises(AsyncRLError) as caught:
            backend.self_check()
    assert caught.value.code == "learner.packing"
    attention.install(backend._policy.model)
    backend.self_check()


def test_the_reference_waits_on_the_host(model: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is a CPU nothing moves: what is asked for is seen, and that log-probs are the same."""
    wanted = FSDP2Backend(cases.make_config(model), gang)
    config = cases.make_config(model, extra="learner.reference_offload=true")
    backend, moves = FSDP2Backend(config, gang), []
    (part,) = cases.cut(14, 1, config, gang)
    (first, *_), (again, *_) = (one.reference_logprobs(part.micro) for one in (wanted, backend))
    policy = backend._reference._policy  # type: ignore[union-attr]
    move, forward = policy.to, policy.forward
    monkeypatch.setattr(policy, "to", lambda place: moves.append(str(place)) or move(place))
    monkeypatch.setattr(policy, "forward", lambda *given, **more: moves.append("pass") or forward(*given, **more))
    monkeypatch.setattr(type(gang.device), "empty_cache", lambda self: moves.append("emptied"))
    third = backend.reference_logprobs(part.micro)[0]
    assert moves == ["cpu", *["pass"] * len(part.micro), "cpu", "emptied"]
    assert torch.equal(first, again) and torch.equal(first, third)


def spied(sharded: Any, name: str, moves: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note what is done with a model and its optimizer, in order."""
    root, optimizer = sharded.root, sharded.optimizer
    ways = (
        ("weights", root, "to"),
        ("pass", root, "forward"),
        ("states", optimizer, "move"),
        ("step", optimizer, "step"),
    )
    for what, owner, attribute in ways:
        call = getattr(owner, attribute)

        def noted(*given: Any, call: Any = call, what: str = what, **more: Any) -> Any:
            moves.append(f"{name} {what}" if what in ("pass", "step") else f"{name} {what} {given[0]}")
            return call(*given, **more)

        monkeypatch.setattr(owner, attribute, noted)


def test_what_is_idle_waits_on_the_host(model: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is a CPU nothing moves: what is asked for is seen, and that all bits are the same."""
    digests, seen = [], []
    for idle in ("false", "true"):
        moves: list[str] = []
        config = critic_cases.make_config(model, f"learner.offload_idle = {idle}")
        backend = FSDP2Backend(config, gang)
        assert backend.critic is not None
        spied(backend._sharded, "policy", moves, monkeypatch)
        spied(backend.critic._sharded, "critic", moves, monkeypatch)
        buried: dict[int, str] = {}
        trial = critic_cases.make_trial(config, backend, gang, buried)
        critic_cases.train(trial, gang, critic_cases.make_batch(1, groups=4))
        digests.append(critic_cases.digest(backend))
        assert not buried
        seen.append([one for one, _ in itertools.groupby(moves)])
    assert digests[0] == digests[1]
    assert not [one for one in seen[0] if "weights" in one or "states" in one]
    # The values of all samples before the first update; then each model's gradients and update.
    assert seen[1][:3] == ["critic weights cpu", "critic pass", "critic weights cpu"]
    for name in ("policy", "critic"):
        at = seen[1].index(f"{name} step")
        assert seen[1][at - 1] == seen[1][at + 1] == f"{name} states cpu"
        assert f"{name} pass" in seen[1][:at]
    assert seen[1][-1] == "critic weights cpu"


def test_half_precision_has_wide_masters(model: Path, gang: Gang) -> None:
    backend = FSDP2Backend(cases.make_config(model, extra="model.dtype=bfloat16"), gang)
    assert {p.dtype for p in backend._policy.parameters()} == {torch.float32}


def test_every_layer_is_compiled_where_asked(model: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler makes of them takes minutes: only that they are handed to it."""
    asked: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: asked.append(type(self).__name__))
    FSDP2Backend(cases.make_config(model, extra="learner.compile=true"), gang)
    assert asked == ["Qwen3DecoderLayer"] * 2
    FSDP2Backend(cases.make_config(model), gang)
    assert len(asked) == 2
