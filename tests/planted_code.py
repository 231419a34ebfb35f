"""Model folders whose own Python leaves a mark when it is imported: what may not run without `trust_remote_code`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

#: Files of a folder that transformers may import, with the class of each and the automatic classes that name it.
CLASSES = {
    "planted_config": ("transformers.LlamaConfig", {"AutoConfig"}),
    "planted_model": ("transformers.LlamaForCausalLM", {"AutoModelForCausalLM"}),
    "planted_scorer": ("transformers.LlamaForSequenceClassification", {"AutoModelForSequenceClassification"}),
    "planted_tokenizer": ("transformers.PreTrainedTokenizerFast", {"AutoTokenizer"}),
}


def plant(source: Path, folder: Path, *, foreign: bool = False) -> Path:
    """Copy a model folder as a Llama of its size with code of its own. `foreign`: of a kind that transformers does not
    know, so that only its code can read it.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(source, folder)
    tree = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "eos_token_id", "pad_token_id")  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{name: tree[name] for name in kept if name in tree})).save_pretrained(folder)
    tree = json.loads((folder / "config.json").read_text())
    named: dict[str, str] = {}
    for stem, (base, autos) in CLASSES.items():
        kind = "model_type = 'planted'\n" if foreign and stem == "planted_config" else "pass\n"
        if stem in ("planted_model", "planted_scorer"):
            kind = "from .planted_config import Planted as config_class\n"
        (folder / f"{stem}.py").write_text(
            f"import pathlib, transformers\n"
            f"pathlib.Path({str(marks_of(folder))!r}).mkdir(exist_ok=True)\n"
            f"pathlib.Path({str(marks_of(folder) / stem)!r}).touch()\n"
            f"class Planted({base}):\n    {kind}"
        )
        named |= dict.fromkeys(autos, f"{stem}.Planted")
    tokenizer = named.pop("AutoTokenizer")
    tree |= {"auto_map": named} | ({"model_type": "planted"} if foreign else {})
    (folder / "config.json").write_text(json.dumps(tree))
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own |= {"auto_map": {"AutoTokenizer": [None, tokenizer]}} | ({"tokenizer_class": "Planted"} if foreign else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    (folder / "custom_generate").mkdir()
    text = (folder / "planted_model.py").read_text().replace("planted_model", "custom_generate")
    (folder / "custom_generate/generate.py").write_text(text + "def generate(*args, **kwargs): ...\n")
    return folder


def marks_of(folder: Path) -> Path:
    """Beside the folder: exports of it keep their marks there too."""
    return folder.with_name(f"{folder.name}-marks")


def marks(folder: Path) -> set[str]:
    """Which of the folder's files were imported since the last call."""
    place = marks_of(folder)
    found = {path.name for path in place.iterdir()} if place.exists() else set()
    shutil.rmtree(place, ignore_errors=True)
    return found
