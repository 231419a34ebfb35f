"""Folders of tiny vision-language models with random weights, one per family: no download, no torchvision."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from asyncrl.images.forward import Seen, join_images, stray_placeholders
from asyncrl.images.model_inputs import ImageInputs
from learners.warm_start.tiny_model import SPECIAL_IDS
from learners.warm_start.tiny_vision import FAMILIES, image_processor, make_tiny_vision, make_vision_tokenizer

SIDE, PATCH = 48, 8  # pixels of a picture that no processor changes in size, and of a patch
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **SPECIAL_IDS,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def _qwen2_vl(folder: Path) -> tuple[Any, Any]:
    tokenizer = make_vision_tokenizer(folder)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = transformers.Qwen2VLConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": PATCH},
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        **SPECIAL_IDS,
    )
    return transformers.Qwen2VLForConditionalGeneration(config), image_processor()


def _internvl(folder: Path) -> tuple[Any, Any]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = ("<img>", "</img>", "<IMG_CONTEXT>")
    tokenizer = make_vision_tokenizer(folder, tokens=tokens, image="<IMG_CONTEXT>\n")  # as of InternVL3-1B-hf
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, "vocab_size": len(tokenizer)},
        vision_config=VISION,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=(SIDE // PATCH // 2) ** 2,  # 9 per tile
        **SPECIAL_IDS,
    )
    processor = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return transformers.InternVLForConditionalGeneration(config), processor


def _llava(folder: Path) -> tuple[Any, Any]:
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokenizer = make_vision_tokenizer(folder, tokens=("<image>",), image="<image>")
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT, "vocab_size": len(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(SIDE // PATCH) ** 2,  # 36
        **SPECIAL_IDS,
    )
    square = {"height": SIDE, "width": SIDE}
    processor = LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=square)
    return transformers.LlavaForConditionalGeneration(config), processor


def _gemma3(folder: Path) -> tuple[Any, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokens = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    tokenizer = make_vision_tokenizer(folder, tokens=tokens, image="".join(tokens))
    start, soft, end = tokenizer.convert_tokens_to_ids(list(tokens))
    config = transformers.Gemma3Config(
        text_config={**TEXT, "vocab_size": len(tokenizer), "head_dim": 16, "query_pre_attn_scalar": 16},
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        mm_tokens_per_image=(SIDE // PATCH // 2) ** 2,  # 9
        boi_token_index=start,
        image_token_index=soft,
        eoi_token_index=end,
        **SPECIAL_IDS,
    )
    processor = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.02)  # 0: it sees nothing
    return model, processor


_OTHERS: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "qwen2_vl": _qwen2_vl,
    "internvl": _internvl,
    "llava": _llava,
    "gemma3": _gemma3,
}
VISION_FAMILIES: tuple[str, ...] = (*FAMILIES, *_OTHERS)


def write_vision_folder(folder: Path, family: str, *, seed: int = 0) -> Path:
    """A complete folder of this family: weights, configuration, tokenizer, chat template, image processor."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family in _OTHERS:
            model, processor = _OTHERS[family](folder)
        else:
            model, processor = make_tiny_vision(family, make_vision_tokenizer(folder), seed=seed), image_processor()
    processor.save_pretrained(str(folder))
    model.generation_config = transformers.GenerationConfig(do_sample=True, **SPECIAL_IDS)
    model.save_pretrained(str(folder))
    return folder


@cache
def vision_folder(family: str) -> Path:
    """The folder of this family, written once per process."""
    return write_vision_folder(Path(mkdtemp(prefix=f"{family}-")), family)


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A picture of noise."""
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def plain_logprobs(model: Any, inputs: ImageInputs, ids: Any, images: Sequence[bytes], sampled: Any) -> Any:
    """Log-probs of the sampled tokens (bool `[T]`) by transformers' forward over the whole sequence, which finds
    positions and placeholders itself; placeholders that were sampled are plain tokens."""
    tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
    chosen = torch.from_numpy(np.asarray(sampled, bool))
    kinds = (tokens == inputs.token).int()
    kinds[:, chosen] = 0
    seen = Seen(join_images([inputs.pixels(one) for one in images], torch.device("cpu")), None, inputs.token)
    seen = seen._replace(stray=(tokens == inputs.token) & (kinds == 0))
    more = {**(seen.arguments or {}), **({"mm_token_type_ids": kinds} if images and inputs.mrope else {})}
    with stray_placeholders(model, seen), torch.no_grad():
        logits = model(input_ids=seen.mask(tokens), use_cache=False, **more).logits
    logs = logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return logs[chosen[1:]].numpy()
