"""Vision-language models of about 0.6 million parameters, saved in the usual folder layout.

Two families, made from their configurations with random weights: Qwen2.5-VL (windows in the vision tower) and Qwen3-VL
(deepstack, interleaved M-RoPE). A picture of 48 x 48 pixels becomes 9 tokens. Neither torchvision nor a download is
needed; the folder's image processor is loaded with `AutoImageProcessor.from_pretrained(folder, backend="pil")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from asyncrl.demo.calculator import CHARACTERS
from learners.warm_start.tiny_model import SPECIAL_IDS, make_tokenizer

Family = Literal["qwen2_5_vl", "qwen3_vl"]
FAMILIES: tuple[Family, ...] = ("qwen2_5_vl", "qwen3_vl")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ROLES = ("system", "user", "assistant", "tool")
PATCH, MERGE, FRAMES = 8, 2, 2  # pixels per patch side, patches per token side, frames per patch
MAX_SIDE = 16  # patches: the largest picture has 128 x 128 pixels, or 64 tokens
TEMPLATE = (
    "{% for message in messages %}<bos>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def make_vision_tokenizer(
    directory: str | Path, *, tokens: Sequence[str] = VISION_TOKENS, image: str = IMAGE
) -> PreTrainedTokenizerFast:
    """Build and save a character tokenizer with a chat template that takes content parts.

    Args:
        directory: folder to write to; created if missing.
        tokens: special tokens of images, in the order of their ids after all others.
        image: what the template writes for an image.
    """
    template = TEMPLATE.replace("IMAGE", image)
    tokenizer = make_tokenizer(directory, characters=CHARACTERS, words=ROLES, chat_template=template)
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens)})
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def image_processor() -> Any:
    """Return the image processor of both families; it keeps the sizes of pictures from 16 x 16 to 128 x 128 pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": (PATCH * MAX_SIDE) ** 2}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=FRAMES, size=size)


def make_tiny_vision(family: Family, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> PreTrainedModel:
    """Return a freshly initialized model, fp32, on the CPU, in training mode.

    The caller's random state does not change.

    Args:
        family: see `FAMILIES`.
        tokenizer: of `make_vision_tokenizer`; gives the size of the vocabulary and the ids of the tokens of images.
        seed: seed of the weights.

    Raises:
        ValueError: unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    build = _qwen2_5_vl if family == "qwen2_5_vl" else _qwen3_vl
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(_shared(tokenizer))
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **SPECIAL_IDS
    )
    model.train()
    return model


def _shared(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return what both configurations have in common."""
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "dtype": "float32",
        **SPECIAL_IDS,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
    }
    return {
        "text_config": text,
        "vision_config": vision,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **SPECIAL_IDS,
    }


def _qwen2_5_vl(shared: dict[str, Any]) -> PreTrainedModel:
    shared["text_config"]["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    shared["vision_config"] |= {"window_size": 2 * PATCH * MERGE, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**shared))


def _qwen3_vl(shared: dict[str, Any]) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    shared["text_config"] |= {"head_dim": 32, "rope_parameters": rope}
    shared["vision_config"] |= {"num_position_embeddings": MAX_SIDE**2, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**shared))
