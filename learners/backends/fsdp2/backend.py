"""Training with PyTorch's FSDP2: parameters, gradients and optimizer states sharded over the ranks.

Guarantees, beside those of `base`:
1. master weights and optimizer states are float32; compute runs in `model.dtype`; gradients are reduced in float32;
2. packed rows are compared with single sequences by the model's own forward at the start (`self_check`);
3. a gradient that is not finite changes nothing;
4. weights leave by layers or by parts of some MiB (`gathering`): one is whole at a time, two where they are lent.
Every rank reads its own part of the weights where their files allow it (`start_weights`), else the whole model on the
host before it is sharded: a host with R ranks then needs R copies of the weights in memory while it starts. Rows,
matrices or experts may be split over ranks (`learners.models.sequence_parallel`, `layout`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncrl.config import Config, OptimConfig
from asyncrl.config.mode import sends_adapters
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runtime.device import Device
from learners.backends import start_weights
from learners.backends.base import LossFunction, Snapshot, UpdateInfo, WeightSpec, to_device
from learners.backends.fsdp2 import mesh as layout
from learners.backends.fsdp2.companion import Companion
from learners.backends.fsdp2.critic import Critic, wants_critic
from learners.backends.fsdp2.gathering import Gathering, fits
from learners.backends.fsdp2.lora import FOLDER, Adapters, Leaving, Lora, check
from learners.backends.fsdp2.process_reward import ProcessRewardModel, wants_process_rewards
from learners.backends.fsdp2.reference import Reference
from learners.backends.fsdp2.sharded_module import PLAIN, Rests, Sharded, View
from learners.backends.hf_folder import write_folder
from learners.backends.optimizers import Optimizers, make_optimizer
from learners.backends.sharded_checkpoint import HostShard, about_of, load_shards, shard_of
from learners.batch.assembly import MicroBatch, Sample, packed_row, padded_rows
from learners.gang.gang import Gang
from learners.models import attention, liger
from learners.models import sequence_parallel as sequence
from learners.models.logprobs import PolicyModel, TokenNumbers
from learners.models.score_model import ScoreModel, load_scorer

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16), "float16": ("F16", torch.float16)}
PACKING_LIMIT = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}


class FSDP2Backend:
    def __init__(self, config: Config, gang: Gang) -> None:
        self._config = config
        self._gang = gang
        self._device = gang.device
        self._dtype = DTYPES[config.model.dtype][1]
        self._sent_name, self._sent_dtype = DTYPES[sent_dtype(config)]
        hf = load_model(config, gang.device, say=_print if gang.lead else str)
        self._lora = Lora(hf, decoder_layers(hf), config, gang) if config.learner.lora.rank else None
        self._view: View = PLAIN if self._lora is None else Leaving(self._lora, merged=True)
        self._policy = make_policy(hf, config)
        self._reference: Reference | None = None  # made when it is first asked for
        self._units, split = shard(self._policy, config, gang)
        optimizer = optimizer_of(self._policy, self._units, config.learner.optim, config, gang.device)
        self._sharded = Sharded(
            self._policy,
            self._units,
            optimizer,
            ranks=layout.data_mesh(gang).size(),
            split=split,
            rests=Rests.of(config, gang.device),
        )
        self._adapters = Adapters(self._lora, self._sharded, config, gang) if self._lora is not None else None
        self.adapters = self._adapters if sends_adapters(config) else None
        self.critic = Critic(config, gang) if wants_critic(config) else None
        self.process_reward = (
            ProcessRewardModel(config, gang, reference=self.reference_logprobs)
            if wants_process_rewards(config)
            else None
        )
        self._config_json = hf.config
        self._generation = getattr(hf, "generation_config", None)

    # ------------------------------------------------------------ forward and backward

    def _forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Any]:
        tensors = to_device(micro, self._device.torch_device)
        logprobs, entropy = self._policy(
            tensors.input_ids, tensors.position_ids, tensors.positions, tensors.targets, whole=False
        )
        return logprobs, entropy, tensors

    def _ready(self) -> None:
        self._policy.train()
        if self._lora is not None:
            self._lora.quiet()

    @torch.no_grad()
    def forward_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch."""
        self._ready()
        try:
            return [self._forward(piece)[0] for piece in micro]
        finally:
            self._sharded.reshard()

    @torch.no_grad()
    def forward_numbers(self, micro: Sequence[MicroBatch], *, squares: bool = False) -> list[TokenNumbers]:
        """Log-probs and entropies, and with `squares` sums of squares, `[N]` each, of each micro-batch."""
        self._ready()
        found = []
        try:
            for piece in micro:
                if squares:
                    t = to_device(piece, self._device.torch_device)
                    found.append(self._policy(t.input_ids, t.position_ids, t.positions, t.targets, squares=True))
                else:
                    found.append(TokenNumbers(*self._forward(piece)[:2], None))
        finally:
            self._sharded.reshard()
        return found

    def reference_logprobs(self, micro: Sequence[MicroBatch]) -> list[Tensor]:
        """Log-probs `[N]` of each micro-batch under the frozen start weights; those under adapters are at hand."""
        if self._lora is not None:
            with self._lora.off():
                return self.forward_logprobs(micro)
        if self._reference is None:
            self._reference = Reference(self._config, self._gang)
        return self._reference.logprobs(micro)

    def train(self, micro: Sequence[MicroBatch], loss: LossFunction) -> dict[str, float]:
        """Forward and backward; gradients add up."""
        return self._sharded.train(micro, self._forward, loss)

    def step(self, *, lr: float, max_norm: float) -> UpdateInfo:
        """Clip by the global norm and update."""
        return UpdateInfo(*self._sharded.step(lr=lr, max_norm=max_norm))

    def discard(self) -> float:
        """Forget the gradients; their global norm."""
        return self._sharded.discard()

    @torch.no_grad()
    def self_check(self) -> None:
        """Three toy sequences in one row (or padded rows) against each alone through the model's full logits."""
        vocabulary = int(self._config_json.vocab_size)
        samples = toys(vocabulary)
        together = packed_row(samples) if self._config.learner.packing else padded_rows(samples)
        rows = self.forward_logprobs([together])[0].float()
        singles = []
        with plainly(self._policy.model, self._config):
            for sample in samples:
                t = to_device(packed_row([sample]), self._device.torch_device)
                singles.append(self._policy(t.input_ids, t.position_ids, t.positions, t.targets, whole=True)[0].float())
        self._sharded.reshard()
        worst = float((rows - torch.cat(singles)).abs().max())
        if not worst <= PACKING_LIMIT[self._config.model.dtype]:
            name = type(self._policy.model).__name__
            raise AsyncRLError("learner.packing", f"log-probs of {name} differ by {worst:.3g}")
        for model in self._companions().values():
            model.self_check()

    # ------------------------------------------------------------ weights out

    def weight_specs(self) -> list[WeightSpec]:
        """Root unit first, then the layers, each in the order of its modules."""
        shapes = {name: tuple(p.shape) for name, p in self._policy.named_parameters()}
        return [
            WeightSpec(self._view.name(name), self._sent_name, shapes[name])
            for names in self._sharded.names
            for name in filter(self._view.name, names)
        ]

    def iter_hf_weights(self, settle: Callable[[], None] | None = None) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
        """Name and bytes as `weight_specs` says, on rank 0; the others take part and get nothing."""
        gathering = self._gathering()
        found = self._sharded.whole(settle, view=self._view) if gathering is None else gathering.run(settle)
        for name, tensor in found:
            if self._gang.lead:
                yield name, bytes_of(tensor, self._sent_dtype, lend=settle is not None)

    def _gathering(self) -> Gathering | None:
        """The way by parts to rank 0, where the layout allows it."""
        if self._gang.size == 1 or self._view is not PLAIN:
            return None
        self._sharded.reshard()
        named = [
            (self._view.name(name), self._policy.get_parameter(name)) for names in self._sharded.names for name in names
        ]
        if not fits([parameter for _, parameter in named], device=self._device.type):
            return None
        return Gathering(named, compute=self._dtype, sent=self._sent_dtype)

    def export_hf(self, folder: Path) -> None:
        """`config.json`, `model.safetensors`, generation config, tokenizer files; by rank 0. The models beside the
        policy likewise, in folders of their own below it; of adapters merged weights, and themselves below them."""
        write_folder(
            self._sharded.whole(view=self._view),
            folder,
            dtype=self._dtype,
            gang=self._gang,
            config=self._config_json,
            generation=self._generation,
            tokenizer=Path(self._config.model.path),
        )
        if self._adapters is not None:
            self._adapters.export(folder / FOLDER)
        for name, model in self._companions().items():
            if model.exported:
                model.export(folder / name)

    def _companions(self) -> dict[str, Companion]:
        """The models that train beside the policy, by the name of their folder in the export."""
        found = {"critic": self.critic, "process_reward": self.process_reward}
        return {name: model for name, model in found.items() if model is not None}

    # ------------------------------------------------------------ checkpoints

    def _state(self) -> dict[str, Tensor]:
        """Every tensor of the training state by name, those of the models beside the policy too."""
        state = self._sharded.state()
        for model in self._companions().values():
            state |= model.state()
        return state

    @property
    def _identity(self) -> str:
        return "" if self._lora is None else self._lora.identity

    def save(self, folder: Path) -> Path:
        """One safetensors file per rank with its boxes and its generator states."""
        return self._shard(copy=False).save(folder)

    def snapshot(self) -> Snapshot:
        """A copy on the host of what `save` would write now."""
        return self._shard(copy=True)

    def _shard(self, *, copy: bool) -> HostShard:
        self._device.synchronize()
        return shard_of(
            self._state(), rank=self._gang.rank, extra=self._device.rng_state(), copy=copy, about=self._identity
        )

    def load(self, folder: Path) -> None:
        """Boxes from the files of any number of ranks; generator states where the number is the same."""
        check(about_of(folder), self._identity)
        extra = load_shards(folder, self._state(), rank=self._gang.rank, ranks=self._gang.size)
        if extra:
            self._device.set_rng_state(extra)


# ---------------------------------------------------------------- building


def _print(text: str) -> None:
    print(text, flush=True)


def load_model(
    config: Config, device: Device, *, path: str = "", scorer: bool = False, say: Callable[[str], Any] = str
) -> Any:
    """The causal language model of `path` (else `model.path`) with float32 weights, on the host or (`learner.load`)
    yet to be read by `shard`, without a cache.

    `scorer`: its body with a scalar head, as in mode reward_model. `say` is told why it was read whole.
    """
    from transformers import AutoModelForCausalLM

    wanted = attention.chosen(config.model.attn_implementation, device, config.model.dtype)
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": wanted,
        "use_safetensors": True,
        "trust_remote_code": config.model.trust_remote_code,
        "local_files_only": True,
    }
    path, scorer = path or config.model.path, scorer or config.learner.mode == "reward_model"
    try:
        model = _in_parts(config, path, scorer=scorer, say=say, **options)
        if model is None and scorer:
            model = load_scorer(path, seed=config.run.seed, **options)
        elif model is None:
            model = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError("config.model", f"{path}: {error}") from error
    model.config.use_cache = False  # with a cache, packed rows are silently wrong
    if config.model.attn_implementation == attention.VARLEN_SETTING:
        attention.install(model, attention.VARLEN)
    elif config.model.attn_implementation == "auto" and wanted == "sdpa" and not config.learner.compile:
        attention.install(model)  # lengths of sequences are read from the device: compiled layers have the dense mask
    if config.learner.liger:
        liger.install(model, device)
    if config.learner.gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def _in_parts(config: Config, path: str, *, scorer: bool, say: Callable[[str], Any], **options: Any) -> Any | None:
    """The model without its weights, which `shard` reads; None where it must be, or shall be, read whole."""
    how = config.learner.load
    if how == "whole" or (config.learner.lora.rank and path == config.model.path):  # adapters go into a whole model
        return None
    try:
        return start_weights.described(path, scorer=scorer, seed=config.run.seed, **options)
    except start_weights.Unfit as why:
        if how == "parts":
            raise ConfigError("config.model", f"{path}: {why}", where="learner.load = 'parts'") from why
        say(f"learner: every rank reads the whole of {path}: {why}")
        return None


def make_policy(hf: Any, config: Config) -> PolicyModel | ScoreModel:
    """The root module: log-probs of a language model, or scores of a reward model."""
    if config.learner.mode == "reward_model":
        return ScoreModel(hf)
    return PolicyModel(hf, temperature=config.sampling.temperature, chunk_tokens=config.learner.logprob_chunk_tokens)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: the classes that the model says must not be split, else its longest list of modules."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in classes]
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def shard(policy: PolicyModel | ScoreModel, config: Config, gang: Gang) -> tuple[list[Any], layout.Split]:
    """Split as `[learner.parallel]` says, and `fully_shard` every decoder layer and the root; the units, root first."""
    mesh, device = layout.data_mesh(gang), gang.device
    dtype = DTYPES[config.model.dtype][1]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    if dtype == torch.float32:
        precision = MixedPrecisionPolicy()
    offload: OffloadPolicy = OffloadPolicy()
    if config.learner.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.pin_memory_ok)
    layers = decoder_layers(policy.model)
    if config.learner.compile:
        for layer in layers:
            layer.compile(dynamic=True)
    if gang.topology.sequence > 1:
        policy.split = sequence.install(policy.model, layers, gang)
    split = layout.split(policy.model, gang)
    layout.shard_experts(split, gang, mp_policy=precision, offload_policy=offload)
    for unit in (*layers, policy):
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
    start_weights.fill(policy.model, torch.device("cpu") if config.learner.cpu_offload else device.torch_device)
    if not config.learner.cpu_offload:
        policy.to(device.torch_device)
    return [policy, *layers], split


def sent_dtype(config: Config) -> str:
    """The dtype in which weights leave: `weightsync.dtype`, for `auto` that of the model."""
    return config.model.dtype if config.weightsync.dtype == "auto" else config.weightsync.dtype


def bytes_of(tensor: Tensor, dtype: torch.dtype, *, lend: bool) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor in a dtype, on the host: a copy, or with `lend` the very bytes where they are as wanted."""
    if lend and tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
        # Not tensor.numpy(): that pins the storage that it views, and FSDP could not free the whole layer.
        memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
        return np.frombuffer(memoryview(memory), dtype=np.uint8)
    own = tensor.to(device="cpu", dtype=dtype, copy=True).contiguous()
    return own.view(-1).view(torch.uint8).numpy()


def optimizer_of(
    module: nn.Module, units: Sequence[nn.Module], optim: OptimConfig, config: Config, device: Device
) -> Optimizers:
    """The optimizer of a sharded module: fused where the device can and the states are on it. `units`: root first."""
    fused = device.supports("fused_adamw") and not config.learner.cpu_offload
    return make_optimizer(module, units[1:], optim, fused=fused)


def plainly(model: Any, config: Config) -> AbstractContextManager[None]:
    """Single sequences of the check at the start: by a kernel that is not the one under test. Compiled layers stay as
    they are, since they would be compiled once more."""
    return nullcontext() if config.learner.compile else attention.plain(model)


def toys(vocabulary: int) -> list[Sample]:
    """Three sequences for the check at the start."""
    return [_toy(length, vocabulary) for length in (7, 12, 5)]


def _toy(length: int, vocabulary: int) -> Sample:
    tokens = (np.arange(3, 3 + length, dtype=np.int32) * 7 + length) % vocabulary
    ones = np.ones(length - 2)
    return Sample(tokens, 2, -ones.astype(np.float32), ones.astype(np.uint8), 0.0)
