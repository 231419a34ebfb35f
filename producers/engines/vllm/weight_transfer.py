"""vLLM's end of an update, inside its worker processes: the weight transfer backend `asyncrl`.

vLLM creates it (`WeightTransferConfig(backend="asyncrl")`, registered by `plugin`). `HeldWeights` adds calls to its
worker. Guarantees:
1. the tensors of the update come from one mapped file, or from a process group (rank 0 sends bucket after bucket as
   uint8; with transport `direct` that is the learner), and go into `load_weights` inside vLLM's layerwise reload, under
   their Hugging Face names: each worker of a tensor-parallel engine takes its own shards;
2. digests are taken, bucket by bucket, of the memory that `load_weights` reads; nothing can change it in between: the
   file is the producer's, or a slot that the producer has locked. Of a file, which all workers of a replica map, worker
   r of n takes those of buckets r, r + n and so on; of a group, whose bytes come to each worker apart, every worker
   takes all. `asyncrl_held` returns them;
3. tensors that vLLM keeps until a layer is complete stay valid until the update is finished.
The layers are without memory between start and finish: the engine must be paused (`producers.engines.vllm.engine`).
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncrl.wire import Instruction, Tensor
from producers.engines.vllm.plugin import register
from producers.engines.vllm.samplers import record_full_softmax
from weightsync.copy_digest import digest_all
from weightsync.plan.buckets import bucket_starts, group_by_bucket
from weightsync.plan.digest import new_digest
from weightsync.plan.sum_digest import hexdigest
from weightsync.transports.device_digest import sum_tensors

register()  # as a worker extension this module is imported before the backend is looked up

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass
class StagedInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The source of updates. `group` empty: files; else this process group, in which rank 0 sends and worker r of the
    engine has rank `rank_offset + r`."""

    group: str = ""
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 0
    backend: str = "gloo"
    timeout_s: float = 60.0


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A version: `tensors` are (name, dtype, shape, bucket, offset, nbytes) in plan order; `path` is its file, empty
    if it comes through the group, or by transport `direct`: then `instruction` is that of the producer (msgpack, hex).
    `like`: a digest of its kind (`weightsync.plan.digest.new_digest`)."""

    tensors: list[Any]
    bucket_bytes: list[int]
    path: str = ""
    instruction: str = ""
    like: str = ""

    def plan_tensors(self) -> list[Tensor]:
        return [Tensor(name, dtype, tuple(shape), *place) for name, dtype, shape, *place in self.tensors]


@dataclass
class _Arrived:
    """Results of the current update."""

    started: float = 0.0
    digests: dict[str, str] = field(default_factory=dict)  # by number of the bucket
    shares: int = 1  # workers that share the buckets
    error: str = ""  # why a version did not come by `direct`
    seconds: dict[str, float] = field(default_factory=dict)
    mapping: mmap.mmap | None = None  # layers may hold views until they are complete


class StagedWeightTransfer(WeightTransferEngine):  # type: ignore[misc]
    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrived = _Arrived()
        self._tied: list[Any] = []  # output layers that share an embedding's weight
        self._group: Any = None
        self._timeout_s = 60.0
        self._groups: Any = None  # of transport `direct`, once it was used

    @property
    def held(self) -> dict[str, Any]:
        """Digests of this worker's buckets of the last update, the number of workers that share them, why it did not
        come (empty: it came), and times."""
        arrived = self._arrived
        found = {"digests": arrived.digests, "shares": arrived.shares, "error": arrived.error}
        return found | {"seconds": dict(arrived.seconds)}

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Join the process group, if there is one."""
        self.shutdown()
        if not init_info.group:
            return
        from producers.engines.process_group import join

        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._timeout_s = init_info.timeout_s
        self._group = join(
            init_info.group,
            rank=rank,
            size=init_info.world_size,
            backend=init_info.backend,
            host=init_info.master_address,
            port=init_info.master_port,
            timeout=timedelta(seconds=init_info.timeout_s),
            device=self.device,
        )

    def start_weight_update(self) -> None:
        """Layerwise reload begins: the layers are without memory from here on."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._arrived = _Arrived(started=time.perf_counter())
        places, heads = self._find_heads()
        self._tied = [head for head in heads if head.weight.data_ptr() in places]
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        """Load every bucket and record the digests of this worker's."""
        groups = group_by_bucket(update_info.plan_tensors(), len(update_info.bucket_bytes))
        began = time.perf_counter()
        if update_info.instruction:
            self._receive_direct(update_info, groups)
            self._arrived.seconds["load"] = time.perf_counter() - began
            return
        arrived, parallel = self._arrived, self.parallel_config
        arrived.shares = parallel.world_size if update_info.path else 1
        for number, group in enumerate(groups):
            memory = self._bucket(update_info, number)
            parts = {tensor.name: memory[tensor.offset : tensor.offset + tensor.nbytes] for tensor in group}
            if number % arrived.shares == parallel.rank % arrived.shares:
                bytes_ = [part.cpu().numpy() for part in parts.values()]
                arrived.digests[str(number)] = digest_like(update_info.like, bytes_)
            self._load([(tensor.name, _view(parts[tensor.name], tensor)) for tensor in group])
        self._arrived.seconds["load"] = time.perf_counter() - began

    def _receive_direct(self, update: StagedUpdateInfo, groups: list[list[Tensor]]) -> None:
        """Load the buckets of transport `direct`, each worker for itself. `held` reports an error: it must not end the
        engine, which gets the version another way."""
        from weightsync.transports.base import TransportError
        from weightsync.transports.collective_inbox import CollectiveInbox
        from weightsync.transports.kept_groups import Groups

        self._groups = self._groups or Groups()
        instruction = msgspec.msgpack.decode(bytes.fromhex(update.instruction), type=Instruction)
        parallel = self.parallel_config
        process = parallel.data_parallel_index * parallel.world_size + parallel.rank
        processes = parallel.data_parallel_size * parallel.world_size
        device = "" if instruction.address.startswith("gloo:") else str(self.device)
        inbox = CollectiveInbox(instruction, device=device, groups=self._groups, process=(process, processes))
        try:
            inbox.open()
            for number, (memory, group) in enumerate(zip(inbox.tensors(), groups, strict=True)):
                self._take_direct(number, memory.clone(), group)  # layers keep it until they are complete
        except TransportError as error:
            self._arrived.error = error.message
        finally:
            inbox.close()

    def _take_direct(self, number: int, memory: torch.Tensor, group: list[Tensor]) -> None:
        parts = {tensor.name: memory[tensor.offset : tensor.offset + tensor.nbytes] for tensor in group}
        first, second = sum_tensors(parts.values(), memory.device).tolist()
        self._arrived.digests[str(number)] = hexdigest((first, second))
        self._load([(tensor.name, _view(parts[tensor.name], tensor)) for tensor in group])

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with disable_mtp_completeness_check():
            self.model.load_weights(tensors)

    def _bucket(self, update: StagedUpdateInfo, number: int) -> torch.Tensor:
        """The bytes of one bucket, uint8, in host memory."""
        if not update.path:
            return self._receive_bucket(update.bucket_bytes[number])
        starts, size = bucket_starts(update.bucket_bytes)
        if self._arrived.mapping is None:
            self._arrived.mapping = _map_file(update.path, size)
        return torch.frombuffer(
            self._arrived.mapping, dtype=torch.uint8, count=update.bucket_bytes[number], offset=starts[number]
        )

    def _receive_bucket(self, size: int) -> torch.Tensor:
        if self._group is None:
            raise RuntimeError("the update comes through a group, but there is none")
        received: torch.Tensor = self._group.receive(size, timeout=timedelta(seconds=self._timeout_s))
        return received

    def finish_weight_update(self) -> None:
        """Layerwise reload ends: the layers hold the new weights."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        began = time.perf_counter()
        finalize_layerwise_reload(self.model, self.model_config)
        self._renew_tied_head()
        self._pack_experts()
        self._arrived.mapping = None
        self._arrived.seconds["finish"] = time.perf_counter() - began
        self._arrived.seconds["all"] = time.perf_counter() - self._arrived.started

    def _renew_tied_head(self) -> None:
        """Process a tied output layer again: layerwise reload processes only the embedding, and the output layer would
        keep its copy of the old weight (packed on a CPU: old logits under a new label)."""
        places, _ = self._find_heads()
        for head in self._tied:
            if head.weight.data_ptr() not in places:
                raise RuntimeError("the output layer is tied to the embedding, but no longer shares its weight")
            head.quant_method.process_weights_after_loading(head)

    def _pack_experts(self) -> None:
        """Pack the experts of every layer again: on a CPU vLLM does so at the first load alone, and would read the
        plain matrices of a later one as packed ones."""
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        if self.device.type != "cpu":
            return
        for layer in self.model.modules():
            if isinstance(layer, RoutedExperts) and (kernel := getattr(layer.quant_method, "moe_kernel", None)):
                kernel.fused_experts.process_weights_after_loading(layer)

    def _find_heads(self) -> tuple[set[int], list[Any]]:
        """Addresses of the embeddings' weights, and the output layers. The configuration does not say which are tied:
        of a vision-language model its text part may have no `tie_word_embeddings`."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        layers = [layer for layer in self.model.modules() if isinstance(layer, VocabParallelEmbedding)]
        heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
        return {layer.weight.data_ptr() for layer in layers if not isinstance(layer, ParallelLMHead)}, heads

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class HeldWeights:
    """Additional calls of a worker for `collective_rpc` (`worker_extension_cls`)."""

    weight_transfer_engine: Any
    model_runner: Any
    device: torch.device

    def asyncrl_held(self) -> dict[str, Any]:
        """`StagedWeightTransfer.held` of this worker."""
        held: dict[str, Any] = self.weight_transfer_engine.held
        return held

    def asyncrl_full_softmax(self) -> bool:
        """Make this worker's sampler record log-probs of the full softmax after temperature; False if it cannot."""
        return record_full_softmax(getattr(self.model_runner, "sampler", None))

    def asyncrl_model(self) -> dict[str, Any]:
        """Scalar fields of the model's configuration; its dtype and the device of this worker."""
        config = self.model_runner.model_config
        shape = {key: value for key, value in config.hf_text_config.to_dict().items() if isinstance(value, (int, str))}
        return {"shape": shape, "dtype": str(config.dtype).removeprefix("torch."), "device": self.device.type}

    def asyncrl_token(self, path: str) -> str:
        """The text of a small file, empty if this worker cannot read it."""
        try:
            with open(path, encoding="ascii") as file:
                return file.read(100)
        except (OSError, ValueError):
            return ""


def digest_like(like: str, tensors: list[Any]) -> str:
    """The digest of a bucket with these bytes, of the kind of another one."""
    if not like:
        return digest_all(tensors)
    digest = new_digest(like)
    for tensor in tensors:
        digest.update(tensor)
    return digest.hexdigest()


def _map_file(path: str, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _view(memory: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """The tensor over its bytes; a copy if they are not aligned for its dtype."""
    dtype = DTYPES[tensor.dtype]
    if memory.data_ptr() % dtype.itemsize:
        memory = memory.clone()
    return memory.view(dtype).view(tensor.shape)
