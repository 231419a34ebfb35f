"""A model folder that everything but the weights of can be read: a tokenizer of bytes, the config.json of a tiny Llama.

It is made without torch; for tests that load no model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_folder(folder: Path, *, end: bool = True, template: str = "", **config: Any) -> Path:
    """`end`: with an end of sequence; `template`: for chat messages; `config`: further fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= ({"eos_token": END} if end else {}) | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(fields | config))
    (folder / "model.safetensors").write_text("{}")
    return folder
