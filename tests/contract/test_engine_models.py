"""Which models the hf engine decodes, and how: the table of docs/engines.md, row by row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import CACHES, CASES, REFUSED, SLOTS, VOCAB, config_of, model_of
from transformers import PreTrainedModel

from asyncrl import config as configuration
from asyncrl.config.capabilities import refuse
from asyncrl.config.model_facts import CACHE_MODELS
from asyncrl.engine import GenDelta, GenRequest, join_deltas
from asyncrl.errors import ConfigError
from asyncrl.versions import expand
from producers.engines.hf.decoder import Decoder
from producers.engines.hf.loading import Built, build_decoder, load_model, refuse_unfit, settle_attention

CPU = torch.device("cpu")
HF = configuration.parse('model.path = "m"\ndata.source = "a:b"\n[[reward]]\nfunction = "a:b"\n')
DOC = Path(__file__).parents[2] / "docs" / "engines.md"
PROMPTS = [[3, 4, 5, 6, 7], [9], [*range(10, 32)], [30, 31]]
GAP = 1e-3  # recurrent layers add up more noise than attention: 4e-4 was seen, 1e-5 without them
BOTH_WAYS = ("qwen3", "mistral", "gemma2", "gemma3n_text", "llama4_text", "deepseek_v3", "qwen3_moe", "gpt_oss")
RUNNING = [kind for kind, case in CASES.items() if case.way != REFUSED]


def test_check_knows_the_models_that_decode_by_caches() -> None:
    assert {kind for kind, case in CASES.items() if case.way == CACHES} == set(CACHE_MODELS)


def build(model: PreTrainedModel, *, recompute: bool = False, tried: tuple[str, ...] = (SLOTS, CACHES)) -> Built:
    settle_attention(model, device=CPU, where="m")
    return build_decoder(model, slots=5, max_prompt=24, max_new=40, recompute=recompute, where="m", tried=tried)


def drive(decoder: Decoder, change: Any = None, *, at: int = 0) -> dict[tuple[str, int], GenDelta]:
    """Four groups of three samples in five rows; new weights after step `at`."""
    decoder.swap(1, lambda: None)
    for number, prompt in enumerate(PROMPTS):
        ids, new = np.asarray(prompt, dtype=np.int32), 8 + 6 * number
        decoder.submit(GenRequest(f"g{number}", ids, (0, 1, 2), 7, new, stop_ids=(2,), delta_tokens=6 * (number % 2)))
    deltas: dict[tuple[str, int], list[GenDelta]] = {}
    for step in range(500):
        if decoder.idle:
            break
        if change is not None and step == at:
            decoder.swap(2, change)
        for item in decoder.step():
            deltas.setdefault((item.id, item.index), []).append(item)
    assert decoder.idle and decoder.table.live == 0
    assert len(deltas) == 12
    return {key: join_deltas(parts) for key, parts in deltas.items()}


@torch.inference_mode()
def plain(model: PreTrainedModel, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
    ids = torch.tensor([*prompt, *tokens.tolist()])
    table = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float(), -1)
    return table.gather(1, ids[len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", RUNNING)
def test_log_probs_are_those_of_a_plain_forward_over_a_swap(kind: str) -> None:
    """Groups of unequal lengths, refilled rows, deltas, samples past every window, new weights under way."""
    model, old, new = (model_of(kind, seed=seed) for seed in (1, 1, 2))
    built = build(model, recompute=True)
    assert built.kind == CASES[kind].way, built.why

    def change() -> None:
        model.load_state_dict(new.state_dict())

    samples = drive(built.decoder, change, at=15)
    assert max(len(item.token_ids) for item in samples.values()) > 15
    mixed = 0
    for (name, _), item in samples.items():
        prompt, versions = PROMPTS[int(name[1])], expand(item.runs)
        for version, source in ((1, old), (2, new)):
            gap = np.abs(plain(source, prompt, item.token_ids) - item.logprobs)
            assert gap[versions == version].max(initial=0.0) < GAP
        mixed += len(item.runs) == 2
    assert mixed >= 1


@pytest.mark.parametrize("kind", BOTH_WAYS)
def test_tokens_are_the_same_with_transformers_own_caches(kind: str) -> None:
    ways = [drive(build(model_of(kind, seed=1), tried=(way,)).decoder) for way in (SLOTS, CACHES)]
    for key, item in ways[0].items():
        assert item.token_ids.tolist() == ways[1][key].token_ids.tolist()
        assert np.abs(item.logprobs - ways[1][key].logprobs).max() < GAP


@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if case.way == REFUSED])
def test_the_others_are_refused_with_a_reason(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse(HF, config_of(kind).to_dict(), role="producer")
        build(model_of(kind, seed=1))
    assert caught.value.code == "config.model" and caught.value.remedy
    said = {
        "t5": "encoder-decoder: engine 'hf' serves decoders alone",
        "gemma3": "vision inputs, attended to in both directions: engine 'hf' has no inputs for it",
        "rwkv": "no cache by one of the names",
        "recurrent_gemma": "makes no cache",
    }
    assert said[kind] in caught.value.message


def test_a_model_without_positions_enough_is_refused() -> None:
    refuse_unfit(config_of("llama"), max_len=256, where="m")
    with pytest.raises(ConfigError, match="max_position_embeddings = 256, below prompt"):
        refuse_unfit(config_of("llama"), max_len=257, where="m")


def test_stretched_positions_are_seen_by_type_of_layer_too() -> None:
    shape = config_of("gemma3_text")
    plain = {"rope_type": "default", "rope_theta": 1e4}
    shape.rope_parameters = {"full_attention": plain, "sliding_attention": plain}
    with pytest.raises(ConfigError, match="below prompt"):
        refuse_unfit(shape, max_len=300, where="m")
    shape.rope_parameters = {
        "full_attention": plain | {"rope_type": "linear", "factor": 8.0},
        "sliding_attention": plain,
    }
    refuse_unfit(shape, max_len=300, where="m")


def test_the_self_check_gives_its_room_back() -> None:
    held: Any = build(model_of("mistral", seed=1)).decoder.memory
    assert held.store.length == 0


def test_memory_that_runs_out_is_not_taken_for_a_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3", seed=1)
    settle_attention(model, device=CPU, where="m")

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("of the device")

    monkeypatch.setattr(model.model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        build_decoder(model, slots=2, max_prompt=4, max_new=4, recompute=False, where="m")


def test_the_table_of_the_documentation_is_this_one() -> None:
    """Rows `| type | way | what |`."""
    found = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", DOC.read_text(), flags=re.MULTILINE))
    assert found == {kind: case.way for kind, case in CASES.items()}, "\n".join(
        f"| `{kind}` | {case.way} | {case.what} |" for kind, case in CASES.items()
    )


# ---------------------------------------------------------------- the self-check


def test_caches_serve_where_slots_give_wrong_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    from producers.engines.hf import slot_cache as slot_memory

    monkeypatch.setattr(slot_memory.SlotMemory, "_mask", _late_mask)
    built = build(model_of("qwen3", seed=1))
    assert built.kind == CACHES and "differ" in built.why


def _late_mask(_self: Any, places: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Steps are blind to their newest token; prefills are right."""
    return places <= positions if positions.shape[2] > 1 else places < positions.clamp(min=1)


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "llama4_text"])
def test_a_window_that_is_forgotten_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 2 and 5 tokens would not show it."""
    from producers.engines.hf import slot_cache as slot_memory

    monkeypatch.setattr(slot_memory.Sight, "mask", lambda self, places, positions: places <= positions)
    with pytest.raises(ConfigError, match="differ"):
        build(model_of(kind, seed=1), tried=(SLOTS,))


def test_a_cache_that_does_not_bear_to_be_cut_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reorder_cache that keeps the first rows, not the chosen ones: only samples that end early show it."""
    from transformers.cache_utils import LinearAttentionLayer

    right = LinearAttentionLayer.reorder_cache

    def first(self: Any, rows: torch.Tensor) -> None:
        right(self, torch.arange(len(rows)) if bool(rows.any()) else rows)

    monkeypatch.setattr(LinearAttentionLayer, "reorder_cache", first)
    with pytest.raises(ConfigError, match="caches: log-probs"):
        build(model_of("lfm2", seed=1))


def test_both_reasons_stand_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    from producers.engines.hf import self_check as selfcheck

    monkeypatch.setattr(selfcheck, "_gap", lambda *_: float("nan"))
    with pytest.raises(ConfigError) as caught:
        build(model_of("qwen3", seed=1))
    assert caught.value.code == "config.model"
    assert "slots: log-probs" in caught.value.message and "caches: log-probs" in caught.value.message


def test_a_model_is_loaded_with_the_attention_it_has(tmp_path: Path) -> None:
    from asyncrl.config import parse

    for kind, wanted in (("qwen3", "sdpa"), ("gpt_oss", "eager"), ("gemma2", "eager")):
        model_of(kind, seed=0).save_pretrained(tmp_path / kind)
        config = parse(f"""
[model]
path = "{tmp_path / kind}"
dtype = "float32"
[data]
path = "unused.jsonl"
[[reward]]
function = "unused:unused"
""")
        model: Any = load_model(config, device=CPU, max_len=64)
        assert model.config._attn_implementation == wanted
        assert int(model.get_input_embeddings().weight.shape[0]) == VOCAB
