"""A model of a client: adapter, gradients, optimizer, and the number of the last request that its state has.

Guarantees:
1. the state is one file, replaced as a whole with each change of the weights (`optim_step`, `load_weights`); it holds
   the number and the answer of that request, so a request is never applied twice;
2. gradients since then are not stored: they are computed again from the logged requests, with the same bits;
3. saved weights are a folder that appears as a whole: peft's adapter, and for training its optimizer.

Adam is AdamW (arXiv 1711.05101) by torch, with the hyperparameters of each request.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from asyncrl.runtime.run_dir import read_object, write_atomic
from learners.service.base_model import ALPHA, Adapter, BaseModel
from learners.service.messages import AdamParams, AdapterForm
from learners.service.protocol import BadRequest
from weightsync.encoding.adapter import PREFIX

STATE = "state.safetensors"
_ADAPTER, _OPTIMIZER, _FORM = "adapter_model.safetensors", "optimizer.safetensors", "service.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # of torch's AdamW


class Model:
    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.applied = 0  # number of the last request in the stored state
        self.answer = b""  # of request `applied`
        self._names = adapter.tensors()
        self._adam = torch.optim.AdamW(adapter.parameters())
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for one in self.adapter.parameters():
            one.grad = torch.zeros_like(one)

    def gradients(self) -> list[Tensor]:
        """Copies of the gradients."""
        return [one.grad.clone() for one in self.adapter.parameters() if one.grad is not None]

    def restore_gradients(self, kept: list[Tensor]) -> None:
        for one, gradient in zip(self.adapter.parameters(), kept, strict=True):
            one.grad = gradient

    def step(self, params: AdamParams) -> float:
        """Apply the gradients and clear them. Returns their norm before clipping; if it is not finite, nothing was
        applied.
        """
        limit = params.grad_clip_norm if params.grad_clip_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), limit)
        self._adam.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        if torch.isfinite(norm):
            self._adam.step()
        self.clear_gradients()
        return float(norm)

    # ------------------------------------------------------------ files

    def _moments(self) -> dict[str, Tensor]:
        state = self._adam.state
        return {
            f"{name}.{key}": state[one][key] for name, one in self._names.items() for key in _MOMENTS if state.get(one)
        }

    def _set_moments(self, tensors: dict[str, Tensor]) -> None:
        for name, one in self._names.items() if tensors else ():
            found = {key: tensors[f"{name}.{key}"] for key in _MOMENTS}
            self._adam.state[one] = {
                key: value.clone() if key == "step" else value.to(one.device, copy=True) for key, value in found.items()
            }

    def save_state(self, folder: Path, applied: int, answer: bytes) -> None:
        """Replace the stored state by this one, as that after request `applied`."""
        folder.mkdir(parents=True, exist_ok=True)
        form = msgspec.json.encode(self.adapter.form).decode()
        about = {"form": form, "applied": str(applied), "answer": answer.decode()}
        write_atomic(folder / STATE, save(_flat({**self._names, **self._moments()}), metadata=about))
        self.applied, self.answer = applied, answer

    @staticmethod
    def load_state(folder: Path, base: BaseModel) -> Model:
        tensors, about = _read(folder / STATE)
        form = msgspec.json.decode(about["form"], type=AdapterForm)
        halves = {name: one for name, one in tensors.items() if not name.endswith(_MOMENTS)}
        model = Model(base.make_adapter(form, halves))
        model._set_moments({name: one for name, one in tensors.items() if name not in halves})
        model.applied = int(about["applied"])
        model.answer = about["answer"].encode()
        return model

    def export(self, folder: Path, *, base: str, request: str, with_optimizer: bool, overwrite: bool) -> None:
        """Save the weights as a folder. Nothing happens if this request has done so before.

        Raises:
            BadRequest: the name is taken.
        """
        if folder.exists():
            if read_object(folder / _FORM).get("request") == request:
                return
            if not overwrite:
                raise BadRequest(f"weights {folder.name!r} of this model exist; save them with overwrite = True")
        temporary = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        weights = {f"{PREFIX}{name}": one for name, one in self._names.items()}
        write_atomic(temporary / _ADAPTER, save(_flat(weights), metadata={"format": "pt"}))
        if with_optimizer:
            write_atomic(temporary / _OPTIMIZER, save(_flat(self._moments())))
        about = {"request": request, "form": msgspec.to_builtins(self.adapter.form)}
        write_atomic(temporary / "adapter_config.json", json.dumps(self._peft_config(base)).encode())
        write_atomic(temporary / _FORM, json.dumps(about).encode())
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)

    def _peft_config(self, base: str) -> dict[str, Any]:
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.adapter.form.rank,
            "lora_alpha": int(ALPHA),
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
            "target_modules": sorted({name.rpartition(".")[2] for name in self.adapter.pairs}),
        }


def load_weights(folder: Path, base: BaseModel, *, with_optimizer: bool) -> Model:
    """A model with saved weights, with or without their optimizer.

    Raises:
        BadRequest: there are none, or they have no optimizer.
    """
    form = read_object(folder / _FORM).get("form")
    if form is None:
        raise BadRequest(f"there are no weights {folder.parent.name}/{folder.name} of that model")
    if with_optimizer and not (folder / _OPTIMIZER).exists():
        raise BadRequest("these weights were saved for sampling: they have no optimizer")
    tensors, _ = _read(folder / _ADAPTER)
    halves = {name.removeprefix(PREFIX): one for name, one in tensors.items()}
    model = Model(base.make_adapter(msgspec.convert(form, AdapterForm), halves))
    if with_optimizer:
        model._set_moments(_read(folder / _OPTIMIZER)[0])
    return model


def _flat(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.detach().cpu().contiguous() for name, one in tensors.items()}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
