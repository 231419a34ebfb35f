"""`[model]`: the policy."""

from __future__ import annotations

from typing import Literal

from asyncrl.config.sections.base import Section


class ModelConfig(Section, frozen=True):
    """`[model]`: the policy, a folder in Hugging Face format."""

    path: str  # folder with config.json, weights and tokenizer, or a name on a hub
    hub: Literal["huggingface", "modelscope"] = "huggingface"  # of the names in model.path, data.path, evaluation.path
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # dtype of training compute and of generation
    trust_remote_code: bool = False  # run code that is part of the model folder, or of the critic's
    attn_implementation: str = "auto"  # auto: flash_attention_2 if installed, varlen on CUDA, sdpa per sequence
