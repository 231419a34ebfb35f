"""AdamW with moments in 8 bits on two ranks, in plain FSDP2 and with split matrices: steps, a checkpoint, a resumption.

`ranks` runs `run_all` on two ranks, `test_eight_bit_ranks.py` on one. Without torchao there are no results.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import aside  # noqa: F401 - where torchao is
import backend_contract as contract
import ranks

from learners.backends.sharded_checkpoint import local_parts
from learners.gang.gang import Gang
from learners.step.update import train_step
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
EIGHT = "learner.optim.name=adamw_8bit"
LAYOUTS = {"shard": "learner.ranks=2", "tensor": "learner.ranks=2;learner.parallel.tensor=2"}


def run_all(model: Path, gang: Gang, out: Path) -> dict[str, Any]:
    """Results by layout; on one rank those of AdamW with 8 and with 32 bits."""
    if not HAS_TORCHAO:
        return {}
    wide = out / "wide"
    if gang.lead:
        vocabulary = len(make_tokenizer(wide))
        save_model(wide, make_tiny_qwen3(vocabulary, hidden_size=128, layers=1, head_dim=32, mlp_size=128))
    gang.barrier()
    if gang.size == 1:
        return {"eight": steps(wide, gang, EIGHT, out / "checkpoint"), "plain": steps(wide, gang, "", out / "other")}
    found = {}
    for name, layout in LAYOUTS.items():
        found[name] = steps(wide, ranks.in_layout(gang, layout), f"{layout};{EIGHT}", out / name / "checkpoint")
    return found


def steps(model: Path, gang: Gang, extra: str, folder: Path) -> dict[str, Any]:
    """Metrics and weights of three steps, the third once more from a checkpoint, and how many moments have 8 bits."""
    config = contract.make_config(model, extra=extra)
    found = contract.resume(model, gang, folder, extra)
    backend: Any = contract.make_backend(config, gang)
    backend.load(folder)
    share = contract.cut(14, 3, config, gang)
    metrics = train_step(share, backend=backend, gang=gang, config=config.learner, step=3).metrics
    narrow = sum("#codes" in local_parts(value) for value in backend._state().values())
    return found | {"metrics": [metrics], "weights": contract.digest(backend)[0], "narrow": narrow}


def load(model: Path, gang: Gang, checkpoint: Path, extra: str) -> dict[str, Any]:
    """The third step from a checkpoint of another layout or of the other AdamW."""
    return contract.continued(model, gang, checkpoint, extra)
