"""A model's own dropout is off in the learner: two passes of one policy give the same log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bare_config import BARE
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config import parse
from asyncrl.runtime.device import Device
from learners.backends.fsdp2.loading import load_model

SMALL = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.3}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"resid_pdrop": 0.3, "attn_pdrop": 0.3},
    "opt": {"ffn_dim": 16, "word_embed_proj_dim": 16, "layerdrop": 0.3},
    "qwen3": {"attention_dropout": 0.3, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("load", ["whole", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_passes_are_the_same(kind: str, load: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **KINDS[kind]))
    model.save_pretrained(tmp_path)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model.eval()(ids).logits
        assert not torch.equal(model.train()(ids).logits, wanted)
    config = parse(BARE, overrides=[f"model.path={tmp_path}", "model.dtype=float32", f"learner.load={load}"])
    loaded = load_model(config, Device("cpu"))
    if load == "whole":
        with torch.no_grad():
            assert torch.equal(loaded.train()(ids).logits, wanted)
    assert not any(module.p for module in loaded.modules() if isinstance(module, torch.nn.Dropout))
    assert all(getattr(loaded.config, name) == value for name, value in KINDS[kind].items()), "its config.json stays"
