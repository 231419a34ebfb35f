"""Liger's kernels: refused where they cannot run, asked for without its losses, equal to plain layers on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl import config
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.runtime.device import Device
from learners.models import liger
from learners.models.policy_model import PolicyModel
from learners.warm_start.tiny_model import make_tiny_qwen3

HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
TOML = 'model.path = "m"\ndata.source = "a:b"\n[[reward]]\nfunction = "a:b"\n'


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Modules with Liger's names; what its function was called with."""
    asked: list[dict[str, Any]] = []
    top, inner, patches = (ModuleType(name) for name in ("liger_kernel", "transformers", "monkey_patch"))
    inner._apply_liger_kernel_to_instance = lambda **given: asked.append(given)  # type: ignore[attr-defined]
    inner.monkey_patch = patches  # type: ignore[attr-defined]
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", top)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    return asked


def of_kind(kind: str) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_type=kind))


def test_its_losses_are_never_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, model = stand_in(monkeypatch), of_kind("qwen3")
    liger.install(model, Device("cuda"))
    assert asked == [{"model": model, "cross_entropy": False, "fused_linear_cross_entropy": False}]


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    for device, kind, code in (("cpu", "qwen3", "config.conflict"), ("cuda", "unheard_of", "config.model")):
        with pytest.raises(ConfigError) as caught:
            liger.install(of_kind(kind), Device(device))
        assert caught.value.code == code and caught.value.where == "learner.liger"
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(ConfigError, match="liger") as caught:
        liger.install(of_kind("qwen3"), Device("cuda"))
    assert caught.value.code == "config.extra"


@pytest.mark.parametrize("split", ["tensor", "sequence", "expert"])
def test_split_rows_matrices_and_experts_are_refused(split: str) -> None:
    config.parse(TOML, overrides=["learner.ranks=2", "learner.liger=true"])
    with pytest.raises(ConfigErrors, match="liger"):
        config.parse(TOML, overrides=["learner.ranks=2", "learner.liger=true", f"learner.parallel.{split}=2"])


@pytest.mark.gpu
@pytest.mark.skipif(
    not (HAS_LIGER and torch.cuda.is_available()),
    reason="Liger's kernels are Triton's: needs a CUDA device and liger-kernel",
)
def test_fused_layers_equal_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs, entropies and gradients of a packed row, in float32."""
    from liger_kernel.transformers.rms_norm import LigerRMSNorm
    from transformers.models.qwen3 import modeling_qwen3 as modeling

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", modeling.apply_rotary_pos_emb)  # Liger's stays until the end

    def outcome(fused: bool) -> dict[str, torch.Tensor]:
        model = make_tiny_qwen3(64, layers=2).cuda()
        if fused:
            liger.install(model, Device.find("cuda"))
            assert model.model.norm.forward.__func__ is LigerRMSNorm.forward
        policy = PolicyModel(model)
        ids = torch.arange(40, device="cuda")[None] % 61 + 3
        places = torch.cat((torch.arange(25), torch.arange(15))).cuda()[None]
        asked = torch.arange(24, device="cuda")
        logprobs, entropy = policy(ids, places, asked, ids[0, 1:25])
        (logprobs.sum() + entropy.sum()).backward()
        grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        return {"logprobs": logprobs.detach(), "entropy": entropy.detach(), **grads}

    plain, fused = outcome(False), outcome(True)  # in this order, for the same reason
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, atol=1e-4, rtol=1e-3, msg=name)
