"""Training with PyTorch's FSDP2: parameters, gradients and optimizer states sharded over the ranks.

Called by `learners.loop` through `asyncrl.plugins`. Guarantees, beside those of `base`:
1. master weights and optimizer states are float32; compute runs in `model.dtype`; gradients are reduced in float32;
2. packed rows are compared with single sequences by the model's own forward at the start (`self_check`);
3. a gradient that is not finite changes nothing;
4. weights leave layer by layer: at most one layer is whole at a time.
Every rank reads the model folder on the host before it is sharded: a host with R ranks needs R copies of the weights
in memory while it starts. It does not do tensor, context or expert parallelism.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncrl.config import Config
from asyncrl.device import Device
from asyncrl.errors import AsyncRLError, ConfigError
from learners.backends.base import LossFunction, UpdateInfo, WeightSpec, to_device
from learners.backends.shards import load_shards, save_shard
from learners.batch import MicroBatch, Sample, packed_row, padded_rows
from learners.gang import Gang
from learners.logprobs import PolicyModel

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
PACKING_LIMIT = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
_OWN = "model."  # what PolicyModel puts before the names of Hugging Face
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


class FSDP2Backend:
    """See `learners.backends.base.Backend`."""

    def __init__(self, config: Config, gang: Gang) -> None:
        self._config = config
        self._gang = gang
        self._device = gang.device
        self._dtype_name, self._dtype = DTYPES[config.model.dtype]
        hf = load_model(config, gang.device)
        self._policy = PolicyModel(
            hf, temperature=config.sampling.temperature, chunk_tokens=config.learner.logprob_chunk_tokens
        )
        self._units = shard(self._policy, config, gang.device)
        self._names = _names_of_units(self._policy, self._units)
        self._optimizer = _optimizer(self._policy, config, gang.device)
        self._config_json = hf.config
        self._generation = getattr(hf, "generation_config", None)

    # ------------------------------------------------------------ forward and backward

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Any]:
        tensors = to_device(micro, self._device.torch_device)
        logprobs, entropy = self._policy(
            tensors.input_ids, tensors.position_ids, tensors.positions, tensors.targets, whole=False
        )
        return logprobs, entropy, tensors

    @torch.no_grad()
    def forward_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch."""
        self._policy.train()
        try:
            return [self._forward(piece)[0] for piece in micro]
        finally:
            self._reshard()

    def _reshard(self) -> None:
        """Give whole weights back. FSDP leaves the root whole after a forward without a backward: its parameters are
        then other objects than those of the optimizer, and what is loaded into them is lost."""
        for unit in self._units:
            unit.reshard()

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Forward and backward; FSDP averages gradients over ranks, so each share is multiplied by their number."""
        self._policy.train()
        root: Any = self._policy
        sums: dict[str, Tensor] = {}
        for number, piece in enumerate(micro):
            root.set_requires_gradient_sync(number == len(micro) - 1)
            logprobs, entropy, tensors = self._forward(piece)
            value, parts = loss(logprobs, entropy, tensors, number)
            (value * self._gang.size).backward()  # type: ignore[no-untyped-call]
            for name, part in (("loss", value.detach()), *parts.items()):
                join = torch.maximum if name.endswith("_max") else torch.add
                sums[name] = join(sums[name], part) if name in sums else part
        return {name: float(value) for name, value in sums.items()}  # here, so that the device is waited for once

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        """Clip by the global norm and update with AdamW."""
        value = self._clip(max_norm)
        skipped = not np.isfinite(value)
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return UpdateInfo(value, skipped)

    def discard(self) -> float:
        """Forget the gradients; their global norm."""
        norm = self._clip(float("inf"))
        self._optimizer.zero_grad(set_to_none=True)
        self._reshard()
        return norm

    def _clip(self, max_norm: float) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    @torch.no_grad()
    def self_check(self) -> None:
        """Three toy sequences in one row (or padded rows) against each alone through the model's full logits."""
        vocabulary = int(self._config_json.vocab_size)
        samples = [_toy(length, vocabulary) for length in (7, 12, 5)]
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        rows = self.forward_logprobs([together])[0].float()
        singles = []
        for sample in samples:
            t = to_device(packed_row([sample]), self._device.torch_device)
            singles.append(self._policy(t.input_ids, t.position_ids, t.positions, t.targets, whole=True)[0].float())
        self._reshard()
        worst = float((rows - torch.cat(singles)).abs().max())
        if not worst <= PACKING_LIMIT[self._config.model.dtype]:
            name = type(self._policy.model).__name__
            raise AsyncRLError("learner.packing", f"log-probs of {name} differ by {worst:.3g}")

    # ------------------------------------------------------------ weights out

    def weight_specs(self) -> list[WeightSpec]:
        """Root unit first, then the layers, each in the order of its modules."""
        shapes = {name: tuple(p.shape) for name, p in self._policy.named_parameters()}
        return [
            WeightSpec(name.removeprefix(_OWN), self._dtype_name, shapes[name])
            for names in self._names for name in names
        ]  # fmt: skip

    @torch.no_grad()
    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, in compute precision; valid until the next one is asked for. Collective."""
        for unit, names in zip(self._units, self._names, strict=True):
            unit.unshard()
            try:
                for name in names:
                    yield name.removeprefix(_OWN), self._policy.get_parameter(name).detach()
            finally:
                unit.reshard()

    def iter_hf_weights(self) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Name and bytes in `model.dtype`, on rank 0; the others take part and get nothing."""
        for name, tensor in self._whole():
            if self._gang.lead:
                # Always a copy: numpy pins the storage that it views, and FSDP could not free the whole layer.
                own = tensor.to(device="cpu", dtype=self._dtype, copy=True).contiguous()
                yield name, own.view(-1).view(torch.uint8).numpy()

    def export_hf(self, folder: Path) -> None:
        """`config.json`, `model.safetensors`, generation config, tokenizer files; by rank 0."""
        from safetensors.torch import save_file

        whole = {}
        for name, tensor in self._whole():
            if self._gang.lead:
                whole[name] = tensor.to(device="cpu", dtype=self._dtype, copy=True).contiguous()
        if self._gang.lead:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
            self._config_json.save_pretrained(folder)
            if self._generation is not None:
                self._generation.save_pretrained(folder)
            source = Path(self._config.model.path)
            for name in TOKENIZER_FILES:
                if (source / name).exists():
                    shutil.copyfile(source / name, folder / name)
        self._gang.barrier()  # bounded: the timeout of the group

    # ------------------------------------------------------------ checkpoints

    def _state(self) -> dict[str, Tensor]:
        """Every tensor of the training state by name: this rank's parameters, their moments and step counts."""
        self._reshard()
        state: dict[str, Tensor] = {}
        for name, parameter in self._policy.named_parameters():
            state[f"model/{name.removeprefix(_OWN)}"] = parameter.data
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{key}/{name.removeprefix(_OWN)}"] = value
        return state

    def save(self, folder: Path) -> Path:
        """One safetensors file per rank with its slabs and its generator states."""
        self._device.synchronize()
        return save_shard(folder, self._state(), rank=self._gang.rank, extra=self._device.rng_state())

    def load(self, folder: Path) -> None:
        """Slabs from the files of any number of ranks; generator states where the number is the same."""
        self._prime_optimizer()
        extra = load_shards(folder, self._state(), rank=self._gang.rank, ranks=self._gang.size)
        if extra:
            self._device.set_rng_state(extra)

    def _prime_optimizer(self) -> None:
        """Make AdamW's states, so that there is something to load into, without changing a weight."""
        self._reshard()
        for parameter in self._policy.parameters():
            if parameter.requires_grad and not self._optimizer.state.get(parameter):
                self._optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=_step_device(self._optimizer, parameter)),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


# ---------------------------------------------------------------- building


def load_model(config: Config, device: Device) -> Any:
    """The causal language model of `model.path` with float32 weights, on the host, without a cache."""
    from transformers import AutoModelForCausalLM

    wanted = config.model.attn_implementation
    if wanted == "auto":
        wanted = "flash_attention_2" if device.supports("flash_attention") and _has_flash() else "sdpa"
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation=wanted, use_safetensors=True,
            trust_remote_code=config.model.trust_remote_code, local_files_only=True,
        )  # fmt: skip
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError("config.model", f"{config.model.path}: {error}") from error
    model.config.use_cache = False  # with a cache, packed rows are silently wrong
    if config.learner.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _has_flash() -> bool:
    import importlib.util

    return importlib.util.find_spec("flash_attn") is not None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the classes that the model says must not be split, else its longest list of modules."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in classes]
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def shard(policy: PolicyModel, config: Config, device: Device) -> list[Any]:
    """`fully_shard` every decoder layer and the root; the units, root first."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = DTYPES[config.model.dtype][1]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    offload: OffloadPolicy = OffloadPolicy()
    if config.learner.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.pin_memory_ok)
    layers = decoder_layers(policy.model)
    for unit in (*layers, policy):
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if not config.learner.cpu_offload:
        policy.to(device.torch_device)
    return [policy, *layers]


def _names_of_units(policy: PolicyModel, units: Sequence[nn.Module]) -> list[list[str]]:
    """The parameter names that each unit owns itself; a tied parameter once."""
    owner: dict[int, int] = {}
    for number, unit in enumerate(units):  # the root comes first, so that a layer's claim overrides it
        for parameter in unit.parameters():
            owner[id(parameter)] = number
    names: list[list[str]] = [[] for _ in units]
    for name, parameter in policy.named_parameters():
        names[owner[id(parameter)]].append(name)
    return names


def _optimizer(policy: nn.Module, config: Config, device: Device) -> torch.optim.AdamW:
    optim = config.learner.optim
    on_host = config.learner.cpu_offload
    return torch.optim.AdamW(
        policy.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
        weight_decay=optim.weight_decay, fused=(device.supports("fused_adamw") and not on_host) or None,
    )  # fmt: skip


def _step_device(optimizer: torch.optim.Optimizer, parameter: Tensor) -> torch.device:
    """Where AdamW keeps its step count: fused kernels want it beside the parameter."""
    return parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")


def _toy(length: int, vocabulary: int) -> Sample:
    tokens = (np.arange(3, 3 + length, dtype=np.int32) * 7 + length) % vocabulary
    ones = np.ones(length - 2)
    return Sample(tokens, 2, -ones.astype(np.float32), ones.astype(np.uint8), 0.0)
