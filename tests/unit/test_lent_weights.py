"""Weights on their way out of FSDP: lent without a copy, given back once they are copied, cast where that is set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl import config as configuration
from learners.backends.fsdp2.backend import FSDP2Backend
from learners.gang.gang import Gang
from learners.warm_start.tiny_model import make_tiny_qwen3, make_tokenizer, save_model
from weightsync.plan.buckets import TensorSpec, plan_buckets
from weightsync.plan.digest import digest_tensors
from weightsync.staging import Staging


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        made = Gang.join(configuration.parse('model.path="m"\ndata.source="a:b"\n[[reward]]\nfunction="a:b"'))
        yield made
        made.leave()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer(folder)
    save_model(folder, make_tiny_qwen3(len(tokenizer), hidden_size=32, layers=3, head_dim=8, mlp_size=48))
    return folder


def backend_of(model_dir: Path, gang: Gang, *, dtype: str, sent: str = "auto") -> FSDP2Backend:
    text = f'model.path="{model_dir}"\nmodel.dtype="{dtype}"\nweightsync.dtype="{sent}"\ndata.source="a:b"\n'
    return FSDP2Backend(configuration.parse(text + '[[reward]]\nfunction="a:b"'), gang)


class Units:
    """Which units are whole, by the calls that the backend makes."""

    def __init__(self, backend: Any, patch: pytest.MonkeyPatch) -> None:
        self.whole: list[int] = []
        self.most = 0
        for number, unit in enumerate(backend._sharded.units):
            self._wrap(number, unit, patch)

    def _wrap(self, number: int, unit: Any, patch: pytest.MonkeyPatch) -> None:
        unshard, reshard = unit.unshard, unit.reshard

        def gather() -> None:
            unshard()
            self.whole.append(number)
            self.most = max(self.most, len(self.whole))

        def free() -> None:
            reshard()
            self.whole.remove(number)

        patch.setattr(unit, "unshard", gather)
        patch.setattr(unit, "reshard", free)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lent_bytes_are_the_copied_ones_and_storage_is_freed(
    model_dir: Path, gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    backend = backend_of(model_dir, gang, dtype=dtype)
    copied = {name: data.tobytes() for name, data in backend.iter_hf_weights()}
    units = Units(backend, monkeypatch)
    staging = Staging(tmp_path, folders=[tmp_path])
    plan = plan_buckets([TensorSpec(*spec) for spec in backend.weight_specs()], bucket_bytes=20_000)
    lent, storages = [], []

    def watched() -> Iterator[tuple[str, np.ndarray]]:
        for name, data in backend.iter_hf_weights(staging.settle):
            parameter = backend._policy.get_parameter(next(n for n in _names(backend) if n.endswith(name)))
            storages.append(parameter.untyped_storage())
            lent.append(data.ctypes.data == parameter.data_ptr())
            yield name, data

    _, digests = staging.fill(plan, watched())
    assert digests == digest_tensors(plan.tensors, copied.__getitem__)[0]
    assert all(lent) and len(lent) == len(copied), "no copy on the way"
    assert units.whole == [] and units.most == 2
    assert all(storage.size() == 0 for storage in storages), "FSDP freed every layer"
    staging.close()


def _names(backend: Any) -> list[str]:
    return [name for names in backend._sharded.names for name in names]


def test_without_settle_one_unit_is_whole_at_a_time(
    model_dir: Path, gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(model_dir, gang, dtype="float32")
    units = Units(backend, monkeypatch)
    kept = dict(backend.iter_hf_weights())
    assert units.most == 1 and units.whole == []
    weights = backend.iter_hf_weights(lambda: None)
    next(weights)
    weights.close()
    assert units.whole == [], "who stops in the middle leaves nothing gathered"
    for name, data in backend.iter_hf_weights():
        assert np.array_equal(kept[name], data), "copies stay"


def test_weights_are_cast_on_the_way_out(model_dir: Path, gang: Gang) -> None:
    backend = backend_of(model_dir, gang, dtype="float32", sent="bfloat16")
    assert {spec.dtype for spec in backend.weight_specs()} == {"BF16"}
    exact = backend_of(model_dir, gang, dtype="float32")
    full = {name: torch.from_numpy(data.copy()).view(torch.float32) for name, data in exact.iter_hf_weights()}
    settled: list[int] = []
    for name, data in backend.iter_hf_weights(lambda: settled.append(1)):
        assert torch.equal(torch.from_numpy(data.copy()).view(torch.bfloat16), full[name].to(torch.bfloat16)), name
    assert len(settled) >= len(backend._sharded.units)
