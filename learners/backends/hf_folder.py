"""A trained module as a Hugging Face folder.

Called by `fsdp2` for the policy and by `companion` for the models beside it. Guarantees:
1. `model.safetensors` holds every parameter once, in `model.dtype`, in the names that transformers knows;
2. collective: every rank takes part, rank 0 alone holds whole tensors and writes;
3. it returns on every rank only after the folder is written.
It holds all weights in the memory of rank 0's host while it writes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from learners.backends.sharded import PLAIN, Sharded, View
from learners.gang import Gang

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def write_folder(
    sharded: Sharded, folder: Path, *, dtype: torch.dtype, gang: Gang, config: Any, tokenizer: Path,
    generation: Any = None, view: View = PLAIN,
) -> None:  # fmt: skip
    """`config.json`, `model.safetensors`, generation config, tokenizer files of the folder `tokenizer`. Collective."""
    from safetensors.torch import save_file

    whole = {}
    for name, tensor in sharded.whole(view=view):
        if gang.lead:
            whole[name] = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
    if gang.lead:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            if (tokenizer / name).exists():
                shutil.copyfile(tokenizer / name, folder / name)
    gang.barrier()  # bounded: the timeout of the group
