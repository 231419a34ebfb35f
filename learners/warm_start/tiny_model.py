"""A character tokenizer and a Qwen3 of about 0.6 million parameters, saved in the usual folder layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.demo.tasks import CHARACTERS

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, BOS, EOS)
"""Special tokens in the order of their ids: 0, 1, 2."""


def make_tokenizer(
    directory: str | Path, *, characters: str = CHARACTERS, words: Sequence[str] = (), chat_template: str = ""
) -> PreTrainedTokenizerFast:
    """Build a character tokenizer, save it under `directory` and return it.

    Each character is one token; no special tokens are added. `decode(encode(text)) == text` holds exactly, with the
    returned object and with ``tokenizers.Tokenizer.from_file(directory / "tokenizer.json")``.

    Args:
        directory: folder to write to; created if missing.
        characters: the alphabet, without repeats.
        words: strings that are one token each; if several match at a position, the first one is used.
        chat_template: Jinja template of chat messages; empty: the tokenizer has none.

    Returns:
        The tokenizer: padding on the left, ids 0, 1, 2 for pad, bos, eos, then the characters in order.

    Raises:
        ValueError: `characters` is empty or contains a character twice.
    """
    if not characters or len(set(characters)) != len(characters):
        raise ValueError("characters must be a non-empty string without repeats")
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters, *words))}
    inner = Tokenizer(WordLevel(vocabulary))
    inner.pre_tokenizer = Split(Regex("|".join([*map(re.escape, words), r"[\s\S]"])), behavior="isolated")
    inner.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    if chat_template:
        tokenizer.chat_template = chat_template
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(target))
    return tokenizer


class Sizes(TypedDict, total=False):
    """The settable sizes of a tiny model; `DEFAULTS` provides missing ones."""

    hidden_size: int  # model width
    layers: int  # decoder layers
    heads: int  # query heads
    kv_heads: int  # key-value heads; must divide `heads`
    head_dim: int  # width of a head
    mlp_size: int  # inner width of the gated MLP
    max_positions: int  # longest sequence in tokens
    rope_theta: float  # base of the rotary embedding
    initializer_range: float  # standard deviation of the initial weights


DEFAULTS: Sizes = {
    "hidden_size": 128,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "mlp_size": 384,
    "max_positions": 512,
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
}
SPECIAL_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_tiny_qwen3(vocab_size: int, *, seed: int = 0, **sizes: Unpack[Sizes]) -> Qwen3ForCausalLM:
    """Return a freshly initialized Qwen3, fp32, on the CPU, in training mode.

    The defaults give about 0.6 million parameters. The caller's random state does not change.

    Args:
        vocab_size: number of tokens; ids 0, 1, 2 are pad, bos, eos.
        seed: seed of the weights.
        sizes: see `Sizes`.

    Raises:
        TypeError: unknown size.
        ValueError: `kv_heads` does not divide `heads`, or the vocabulary has no room for a character.
    """
    if unknown := sizes.keys() - DEFAULTS.keys():
        raise TypeError(f"unknown size: {min(unknown)}")
    config = _tiny_config(vocab_size, {**DEFAULTS, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **SPECIAL_IDS
    )
    model.train()
    return model


def _tiny_config(vocab_size: int, sizes: Sizes) -> Qwen3Config:
    """Return the configuration of a model from all its sizes."""
    if sizes["heads"] % sizes["kv_heads"]:
        raise ValueError(f"kv_heads {sizes['kv_heads']} must divide heads {sizes['heads']}")
    if vocab_size <= len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size must exceed {len(SPECIAL_TOKENS)}, got {vocab_size}")
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["mlp_size"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        max_position_embeddings=sizes["max_positions"],
        initializer_range=sizes["initializer_range"],
        rope_parameters={"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        dtype="float32",
        **SPECIAL_IDS,
    )


def save_model(directory: str | Path, model: PreTrainedModel) -> None:
    """Write `config.json`, `model.safetensors` and `generation_config.json` to `directory`.

    Raises:
        OSError: the folder cannot be written.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(str(target), safe_serialization=True)


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
