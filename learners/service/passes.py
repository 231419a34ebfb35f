"""forward and forward_backward: datum by datum, so that neither batches nor other clients change a bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from learners.service.adapter_state import Model
from learners.service.base_model import BaseModel
from learners.service.losses import loss_settings, needed_inputs, token_losses
from learners.service.protocol import BadRequest, Datum, Pass, write_output


def run_pass(base: BaseModel, model: Model, work: Pass) -> bytes:
    """Execute the pass and return its encoded answer; a forward_backward adds to the model's gradients.

    The answer has `logprobs` of the targets, for cross_entropy also `elementwise_loss`, and the metric `loss:sum`.

    Raises:
        BadRequest: an input is missing or does not fit; no gradient has changed.
    """
    settings = loss_settings(work.loss_fn, work.config)
    if not work.data:
        raise BadRequest("there is no data")
    read = [_read(base, datum, work.loss_fn) for datum in work.data]
    if len({inputs["target_tokens"].shape[1:] for _, inputs in read}) > 1:
        raise BadRequest("the targets of all data must have the same trailing shape")
    kept = [] if work.forward_only else model.gradients()
    total, fields = 0.0, dict[str, list[np.ndarray]]()
    try:
        with base.activate(model.adapter), torch.set_grad_enabled(not work.forward_only):
            for tokens, inputs in read:
                logprobs = base.logprobs(tokens, inputs["target_tokens"])
                losses = token_losses(work.loss_fn, logprobs, inputs, settings)
                if not work.forward_only:
                    losses.sum().backward()  # type: ignore[no-untyped-call]
                total += float(losses.detach().sum())
                fields.setdefault("logprobs", []).append(logprobs.detach().cpu().numpy())
                if work.loss_fn == "cross_entropy":
                    fields.setdefault("elementwise_loss", []).append(losses.detach().cpu().numpy())
    except BaseException:
        if kept:
            model.restore_gradients(kept)
        raise
    return write_output(fields, {"loss:sum": total})


def _read(base: BaseModel, datum: Datum, loss_fn: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens `[n]`, targets `[n]` or `[n, k]`, and the other inputs, of the targets' shape."""
    tokens = np.frombuffer(datum.tokens, np.int32).astype(np.int64)
    base.check_tokens(tokens.tolist())
    needed = ("target_tokens", *needed_inputs(loss_fn))
    if missing := [name for name in needed if name not in datum.inputs]:
        raise BadRequest(f"{loss_fn} needs loss_fn_inputs[{missing[0]!r}]")
    if unknown := sorted(set(datum.inputs) - {*needed, *(("weights",) if loss_fn == "cross_entropy" else ())}):
        raise BadRequest(f"{loss_fn} has no loss_fn_inputs[{unknown[0]!r}]")
    inputs = {name: torch.from_numpy(one.values()).to(base.device) for name, one in datum.inputs.items()}
    targets = inputs["target_tokens"]
    if targets.dtype != torch.int64 or targets.dim() not in (1, 2) or len(targets) != len(tokens):
        raise BadRequest(f"target_tokens must be int64 of {len(tokens)} rows, as model_input: {list(targets.shape)}")
    if targets.numel() == 0 or int(targets.min()) < 0 or int(targets.max()) >= base.vocabulary:
        raise BadRequest(f"target_tokens must be ids below {base.vocabulary}, at least one")
    for name, one in inputs.items():
        if one.shape != targets.shape:
            raise BadRequest(f"{name} has shape {list(one.shape)}, target_tokens {list(targets.shape)}")
    return torch.from_numpy(tokens).to(base.device), inputs
