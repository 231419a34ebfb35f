"""Tiny vision-language models of every supported family, with random weights, and images for them."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from asyncrl.config.capabilities import VISION_MODELS
from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tokenizer

CHARACTERS = "abcdefghijklmnopqrstuvwxyz 0123456789?=.,"
WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
FIRST = len(SPECIAL_TOKENS) + len(CHARACTERS)
IMAGE = FIRST + 2
_IDS = {
    "vision_start_token_id": FIRST,
    "vision_end_token_id": FIRST + 1,
    "image_token_id": IMAGE,
    "video_token_id": FIRST + 3,
}
_SHARED = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
_KINDS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, {"embed_dim": 32, "hidden_size": 64}, {}),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "window_size": 32}
        | {"fullatt_block_indexes": [1]},
        {},
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "num_position_embeddings": 64}
        | {"deepstack_visual_indexes": [0, 1]},
        {"mrope_interleaved": True},
    ),
}


@cache
def vision_folder(kind: str) -> Path:
    """A folder with a model of this family, of about 0.2 million parameters."""
    assert set(_KINDS) == set(VISION_MODELS)
    folder = Path(mkdtemp(prefix=f"{kind}-"))
    make_tokenizer(folder, characters=CHARACTERS, words=WORDS, chat_template=TEMPLATE)
    make_config, make_model, vision, rope = _KINDS[kind]
    text = {
        "vocab_size": FIRST + len(WORDS), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], **rope},
    }  # fmt: skip
    torch.manual_seed(0)
    config = make_config(text_config=text, vision_config=_SHARED | vision, tie_word_embeddings=True, **_IDS)
    make_model(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    size = {"shortest_edge": 256, "longest_edge": 16384}
    Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    return folder


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Noise."""
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()
