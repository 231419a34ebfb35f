"""A short run on the real vLLM engine: it learns from in-flight updates, every promise of the audit kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import warm
from e2e_run import ROOT
from exact_run import SETTINGS, assert_exact

from asyncrl.config import parse
from asyncrl.errors import ConfigError
from asyncrl.process_plan.interpreters import find_interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OWN = [f"producers.python={os.environ['VLLM_PYTHON']}"] if os.environ.get("VLLM_PYTHON") else []


def why_not() -> str:
    """Why vLLM cannot be used here."""
    if OWN:
        return ""
    text = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[producers]\nengine = "vllm"\n[[reward]]\nfunction = "a:b"\n'
    try:
        find_interpreter(parse(text))
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_run_on_vllm_is_exact(run: Any, figure: Callable[[str], None]) -> None:
    done = run.launch("producers.engine=vllm", "weightsync.timeout_s=120", *SETTINGS, *OWN, timeout=580)
    found = assert_exact(run, done)
    figure(f"vllm: {found.versions} versions, engine and learner at lag 0 differ by at most {found.largest:.1g} nats")


MIXTURE = """
import sys
from learners.warm_start.tiny_model import make_tokenizer
import torch, transformers
from transformers import GenerationConfig
tokenizer = make_tokenizer(sys.argv[1])
torch.manual_seed(0)
family = sys.argv[2]
more = {"Mixtral": {"num_local_experts": 8, "sliding_window": None},
        "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True}}[family]
config = getattr(transformers, family + "Config")(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, num_experts_per_tok=2, tie_word_embeddings=False,
    max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
)
model = getattr(transformers, family + "ForCausalLM")(config).float()
model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
model.save_pretrained(sys.argv[1])
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(
    ("family", "devices"), [("Qwen3Moe", "turns"), pytest.param("Mixtral", "auto", marks=pytest.mark.chaos)]
)
def test_a_mixture_of_experts_gets_its_weights_on_vllm(
    run: Any, family: str, devices: str, figure: Callable[[str], None]
) -> None:
    """Versions have the names of folders, experts one by one, and Mixtral's router: vLLM knows no others. Qwen3Moe's
    engine takes turns with the learner: on a CPU a sleeping vLLM keeps its memory, all else is the same.
    """
    folder = run.folder / "moe"
    warm.run([sys.executable, "-c", MIXTURE, str(folder), family], cwd=ROOT, check=True, timeout=120)
    settings = ["producers.engine=vllm", "weightsync.timeout_s=120", f"model.path={folder}", *SETTINGS, *OWN]
    settings.append(f"cluster.devices={devices}")
    found = assert_exact(run, run.launch(*settings, timeout=580))
    figure(f"vllm, {family}, 8 experts: engine and learner at lag 0 differ by at most {found.largest:.1g} nats")
