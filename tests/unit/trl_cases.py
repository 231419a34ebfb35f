"""Losses and gradients of preference methods by TRL's own code, on random batches.

Run with a Python that has TRL (`make trl`); it needs nothing of this repository:

    .venv-trl/bin/python tests/unit/trl_cases.py > tests/unit/trl_cases.json
    .venv-trl/bin/python tests/unit/trl_cases.py 1 2 3     # other seeds

The trainers are TRL's classes with the settings of the loss alone; in place of a model they get log-probs. `chosen`,
`rejected`, `policy` and the references are sums over the tokens of an answer, spread evenly over `lengths` tokens.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

PAIRS = 5
LONGEST = 9
#: (name, settings of ours, trainer, settings of TRL's)
PAIR_CASES = [
    ("sigmoid", {}, "dpo", {}),
    ("smoothed", {"label_smoothing": 0.1}, "cpo", {"loss_type": "sigmoid", "label_smoothing": 0.1}),
    ("robust", {"loss": "robust", "label_smoothing": 0.2}, "dpo", {"label_smoothing": 0.2}),
    ("hinge", {"loss": "hinge"}, "dpo", {}),
    ("ipo", {"loss": "ipo", "length_average": True}, "dpo", {}),
    ("ipo_sums", {"loss": "ipo"}, "cpo", {"loss_type": "ipo"}),
    ("simpo", {"loss": "simpo", "beta": 2.0, "gamma": 1.0}, "cpo", {"loss_type": "simpo", "simpo_gamma": 1.0}),
    (
        "simpo_smoothed",
        {"loss": "simpo", "beta": 2.0, "gamma": 0.5, "label_smoothing": 0.1},
        "cpo",
        {"loss_type": "simpo", "simpo_gamma": 0.5, "label_smoothing": 0.1},
    ),
    ("orpo", {"loss": "orpo", "beta": 0.2}, "orpo", {}),
    ("sppo_hard", {"loss": "sppo_hard"}, "dpo", {}),
]


class Batch(NamedTuple):
    """Answers `[2P]`, the chosen ones first: sums of log-probs, those of the reference, tokens."""

    sums: Tensor
    reference: Tensor
    lengths: Tensor


def drawn(generator: torch.Generator, lengths: Tensor) -> Tensor:
    """Sums of log-probs of answers of these lengths, f8."""
    means = -torch.rand(lengths.shape, generator=generator, dtype=torch.float64) * 3 - 0.05
    return means * lengths


def accelerator() -> Any:
    """One process."""
    return SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)


def trainer(kind: type, **fields: Any) -> Any:
    """A trainer of TRL without a model and data."""
    made = kind.__new__(kind)
    common: dict[str, Any] = {
        "accelerator": accelerator(),
        "model": SimpleNamespace(training=True),
        "ref_model": None,
        "args": SimpleNamespace(gradient_checkpointing_kwargs=None),
        "precompute_ref_logps": True,
        "aux_loss_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    for name, value in (common | fields).items():
        made.__dict__[name] = value
    return made


def rows(sums: Tensor, lengths: Tensor) -> tuple[dict[str, Tensor], Any]:
    """TRL's inputs for answers behind a prompt of one token, and what its fused head would give for them."""
    places = torch.arange(LONGEST + 1)[None, :]
    mask = ((places >= 1) & (places <= lengths[:, None])).long()
    spread = (sums / lengths)[:, None] * mask[:, 1:]
    outputs = SimpleNamespace(
        log_probs=spread,
        entropy=torch.zeros_like(spread),
        mean_logits=torch.zeros_like(spread),
        is_top1=torch.zeros_like(spread, dtype=torch.bool),
    )
    return {
        "input_ids": torch.ones_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
    }, outputs


def dpo(name: str, beta: float, settings: dict[str, Any], batch: Batch) -> Tensor:
    from trl.trainer.dpo_trainer import DPOTrainer

    made = trainer(
        DPOTrainer,
        loss_types=[name.removesuffix("_sums")],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=settings.get("label_smoothing", 0.0),
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
    )
    inputs, outputs = rows(batch.sums, batch.lengths)
    ref_chosen, ref_rejected = batch.reference.chunk(2)
    inputs |= {"ref_chosen_logps": ref_chosen, "ref_rejected_logps": ref_rejected}
    return DPOTrainer._compute_loss(made, lambda **_: outputs, inputs, False)


def cpo(name: str, beta: float, settings: dict[str, Any], batch: Batch) -> Tensor:
    """SimPO on mean log-probs; the other losses on log-ratios: with them CPO's code is that of DPO."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    made = trainer(
        CPOTrainer,
        beta=beta,
        alpha=0.0,
        loss_type=settings["loss_type"],
        simpo_gamma=settings.get("simpo_gamma", 0.0),
        label_smoothing=settings.get("label_smoothing", 0.0),
    )
    sums, reference, lengths = batch
    given = sums / lengths if settings["loss_type"] == "simpo" else sums - reference
    return CPOTrainer.cpo_loss(made, *given.chunk(2))[0].mean()


def orpo(name: str, beta: float, settings: dict[str, Any], batch: Batch) -> Tensor:
    """With the likelihood of the answer alone, as in the paper."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    made = trainer(ORPOTrainer, beta=beta)
    chosen, rejected = (batch.sums / batch.lengths).chunk(2)
    logits = torch.zeros(1)
    made.concatenated_forward = lambda *_: (chosen, rejected, logits, logits, -chosen.mean())
    return ORPOTrainer.get_batch_loss_metrics(made, None, {})[0]


TRAINERS = {"dpo": dpo, "cpo": cpo, "orpo": orpo}


def pair_case(seed: int, name: str, ours: dict[str, Any], way: str, settings: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=generator)
    sums, reference = (drawn(generator, lengths) for _ in range(2))
    sums.requires_grad_()
    beta = ours.get("beta", 0.1)
    loss = TRAINERS[way](name, beta, settings, Batch(sums, reference, lengths))
    (gradient,) = torch.autograd.grad(loss, sums)
    return {
        "name": f"{name}-{seed}",
        "settings": ours,
        "inputs": {"policy": sums.tolist(), "reference": reference.tolist(), "lengths": lengths.tolist()},
        "expected": {"loss": float(loss.detach()), "gradient": gradient.tolist()},
    }


def kto_case(seed: int, name: str, weights: dict[str, float]) -> dict[str, Any]:
    """`kl_policy` and `kl_reference`: of the same prompts with the answers of other rows."""
    from trl.trainer.kto_trainer import KTOTrainer

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=generator)
    policy, reference, kl_reference, shift = (drawn(generator, lengths) for _ in range(4))
    kl_policy = kl_reference + (0.1 if name.startswith("kto_clamped") else -0.1) * shift
    labels = torch.rand(2 * PAIRS, generator=generator) < 0.5
    labels[:2] = torch.tensor([True, False])
    policy.requires_grad_()
    made = trainer(
        KTOTrainer,
        calculate_KL=True,
        loss_type="kto",
        beta=0.1,
        desirable_weight=weights.get("desirable_weight", 1.0),
        undesirable_weight=weights.get("undesirable_weight", 1.0),
    )
    inputs, outputs = rows(policy, lengths)
    others, other_outputs = rows(kl_policy, lengths)
    inputs |= {f"KL_{key}": value + 0 for key, value in others.items()}
    inputs |= {"label": labels, "ref_logps": reference, "ref_KL_logps": kl_reference}

    def model(**given: Any) -> Any:
        return other_outputs if given["input_ids"] is inputs["KL_input_ids"] else outputs

    loss = KTOTrainer._compute_loss(made, model, inputs, False)
    (gradient,) = torch.autograd.grad(loss, policy)
    given = {"policy": policy, "reference": reference, "kl_policy": kl_policy, "kl_reference": kl_reference}
    return {
        "name": f"{name}-{seed}",
        "settings": weights,
        "inputs": {key: value.tolist() for key, value in given.items()} | {"labels": labels.tolist()},
        "expected": {
            "loss": float(loss.detach()),
            "gradient": gradient.tolist(),
            "kl": made._metrics["train"]["kl"][0],
        },
    }


def cases(seed: int) -> list[dict[str, Any]]:
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    return [
        *(pair_case(seed, *case) for case in PAIR_CASES),
        kto_case(seed, "kto", {}),
        kto_case(seed, "kto_weighted", weights),
        kto_case(seed, "kto_clamped", {}),
    ]


def main() -> None:
    import trl

    seeds = [int(word) for word in sys.argv[1:]] or [0]
    lines = [json.dumps(case) for seed in seeds for case in cases(seed)]
    print(f'{{"trl": "{trl.__version__}", "cases": [\n' + ",\n".join(lines) + "\n]}")


if __name__ == "__main__":
    main()
