"""Prompts with images for vLLM, which expands their placeholders itself."""

from __future__ import annotations

from typing import Any

from asyncrl.engine import GenRequest
from asyncrl.images.decoding import open_image
from asyncrl.images.digests import image_digest
from asyncrl.images.model_inputs import ImageInputs

MOST_IMAGES = 16  # of a prompt; vLLM plans its memory for them


def engine_arguments(inputs: ImageInputs | None) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` for a vision-language model: its processor needs the tokenizer."""
    if inputs is None:
        return {"skip_tokenizer_init": True}
    found: dict[str, Any] = {"limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0}}
    return {**found, "mm_processor_kwargs": inputs.options} if inputs.options else found


def image_prompt(inputs: ImageInputs, request: GenRequest, label: str) -> dict[str, Any]:
    """The fields of a `TokensPrompt`. `label`: of the weights; features of an image are kept for them alone.

    Raises:
        ValueError: the placeholders are not those of the images.
    """
    return {
        "prompt_token_ids": inputs.collapse(request.prompt_ids, request.images).tolist(),
        "multi_modal_data": {"image": [open_image(image) for image in request.images]},
        "multi_modal_uuids": {"image": [f"{image_digest(image)}-{label}" for image in request.images]},
        "cache_salt": label,
    }
