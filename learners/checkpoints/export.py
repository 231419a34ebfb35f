"""Exports a checkpoint as Hugging Face folders: policy, critic, process reward model.

Used by `asyncrl export`, or `python -m learners.checkpoints.export RUN ...`. The run may continue meanwhile: the files
are opened first, so a removed checkpoint can still be read.

Guarantees:
1. the run only gets the new folder. It must be new or empty, and is written under a hidden name, so an existing folder
   is complete;
2. a damaged checkpoint raises `learner.checkpoint`: every byte is compared with its manifest first;
3. the result equals the learner's own export at that step, in the requested dtype;
4. tensors are read one by one from the checkpoint, for any backend and layout: no model is built and no device is used.
   Peak memory is one file (`--max-shard-size`) and one tensor in float32, with fused experts one layer, without the
   kernel's page cache;
5. a checkpoint with other tensors than the model's (a plugin's backend, adapters) is loaded by its backend, which needs
   the memory of the training state and chooses the size of files.

Example: `asyncrl export runs/my --step 20` writes runs/my/export-step_000020, with `critic` below it.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.config import Config, load
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.plugins import find
from asyncrl.runs.export import DTYPES as DTYPE_NAMES
from asyncrl.runs.export import no_checkpoint, parse_size, refuse_target, size_text
from asyncrl.runtime.model_folder import load_config
from asyncrl.runtime.run_dir import RunDir
from learners.backends.hf_folder import SCORER, FolderWriter, build_skeleton
from learners.backends.megatron.checkpoint import Store
from learners.backends.megatron.mapping import Part
from learners.backends.safetensors_writer import MAX_BYTES
from learners.checkpoints import checkpoint
from learners.gang.gang import Gang
from weightsync.plan.buckets import full_box

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Say = Callable[[str], None]


def export(
    config: Config,
    *,
    step: int | None = None,
    out: Path | None = None,
    dtype: str = "auto",
    max_bytes: int = MAX_BYTES,
    say: Say = lambda _: None,
    gang: Gang | None = None,
) -> Path:
    """Write the folders of checkpoint `step` (None: the newest complete one) and return the path. `gang` is used,
    collectively, if only the backend can read the checkpoint; None: join one.

    Raises:
        ConfigError: `usage`: there is no such checkpoint, or the folder is not empty.
        AsyncRLError: `learner.checkpoint`: it is damaged; `disk.full`.
    """
    run = RunDir(config.run_dir)
    target = refuse_target(out) if out is not None else None
    source = _source(run, step, say)
    target = target or refuse_target(run.root / f"export-{source.name}")
    name = config.model.dtype if dtype == "auto" else dtype
    if not export_files(config, source, target, dtype=DTYPES[name], max_bytes=max_bytes, say=say):
        say("the checkpoint has other tensors than the model: its backend loads it, with optimizer states")
        _export_with_backend(config, source, target, name, gang)
    return target


def _source(run: RunDir, step: int | None, say: Say) -> Path:
    if step is None:
        found = checkpoint.newest(run.checkpoints, say=say)
        if found is None:
            raise no_checkpoint(run)
        return found[1]
    if step not in (known := checkpoint.steps_in(run.checkpoints)):
        raise ConfigError(
            "usage",
            f"no checkpoint of step {step}; there are: {', '.join(map(str, known)) or 'none'}",
            where=str(run.checkpoints),
            remedy="name one of these, or none for the newest",
        )
    folder = checkpoint.step_folder(run.checkpoints, step)
    if why := checkpoint.find_problem(folder):
        raise AsyncRLError("learner.checkpoint", why, where=str(folder))
    return folder


# ---------------------------------------------------------------- straight from the files


def export_files(
    config: Config,
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    max_bytes: int = MAX_BYTES,
    say: Say = lambda _: None,
) -> bool:
    """Write the folders from the files of the checkpoint `source`. Return False if they hold other tensors than the
    models. Only the first of several processes writes.
    """
    store = Store(source)
    try:
        models = _models(config, store)
        if models and int(os.environ.get("RANK", "0")) == 0:
            stream = partial(
                _stream,
                models,
                store,
                dtype=dtype,
                max_bytes=max_bytes,
                trust_remote_code=config.model.trust_remote_code,
                say=say,
            )
            _write_and_rename(target, stream)
    finally:
        store.close()
    return models is not None


class Model(msgspec.Struct, frozen=True):
    """One model of a checkpoint: its folder in the export, the prefix of its names, its config and the shapes of its
    parameters in model order.
    """

    folder: str
    kind: str
    config: Any
    shapes: dict[str, tuple[int, ...]]
    tokenizer: Path  # folder with the tokenizer


def _models(config: Config, store: Store) -> list[Model] | None:
    """Return the models that the checkpoint holds and the settings export; None if one differs from the expectation."""
    learner, path = config.learner, config.model.path
    policy = _model(config, path, "", "model", store, scorer=learner.mode == "reward_model")
    found = [policy]
    critic, process = learner.critic, learner.process_reward
    if store.names("critic/model") and critic.export:
        found.append(_model(config, critic.model or path, "critic", "critic/model", store, scorer=True))
    if store.names("process_reward/model") and process.export:
        found.append(_model(config, process.model or path, "process_reward", "process_reward/model", store))
    models = [model for model in found if model is not None]
    return models if len(models) == len(found) else None


def _model(config: Config, path: str, folder: str, kind: str, store: Store, *, scorer: bool = False) -> Model | None:
    more: dict[str, Any] = {"num_labels": 1} if scorer else {}
    try:
        hf = load_config(path, trust_remote_code=config.model.trust_remote_code, **more)
    except (OSError, ValueError) as error:
        raise ConfigError("config.model", f"{path}: {error}") from error
    if scorer:
        hf.architectures = [SCORER]
    skeleton = build_skeleton(hf, trust_remote_code=config.model.trust_remote_code)
    if skeleton is None:
        return None
    hf.architectures = [type(skeleton).__name__]
    shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
    if set(shapes) != store.names(kind):
        return None
    return Model(folder, kind, hf, shapes, Path(config.model.path))


def _stream(
    models: Sequence[Model],
    store: Store,
    folder: Path,
    *,
    dtype: torch.dtype,
    max_bytes: int,
    trust_remote_code: bool,
    say: Say,
) -> None:
    """Write every model of the checkpoint, tensor by tensor."""
    for model in models:
        place = folder / model.folder
        writer = FolderWriter(
            place,
            model.config,
            dtype=dtype,
            source=model.tokenizer,
            max_bytes=max_bytes,
            trust_remote_code=trust_remote_code,
        )
        for name, shape in model.shapes.items():
            writer.add(name, store.read(model.kind, Part(name, shape, full_box(shape), full_box(shape))))
        written = writer.close(_generation(model.config))
        said = f"{writer.files.elements / 1e6:,.1f} million parameters in {size_text(writer.files.bytes)}"
        say(f"{model.folder or 'policy'}: {said}, {len(written)} file{'s' if len(written) > 1 else ''}")


def _generation(config: Any) -> Any:
    """Return the default generation config of a language model."""
    from transformers import GenerationConfig

    return None if config.architectures[0].endswith(SCORER) else GenerationConfig.from_model_config(config)


def _write_and_rename(target: Path, write: Callable[[Path], None]) -> None:
    """Write under a hidden name, then rename to the target."""
    hidden = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        hidden.mkdir(parents=True)
        write(hidden)
        if target.exists():
            target.rmdir()  # known to be empty
        os.replace(hidden, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise AsyncRLError("disk.full", f"{error}", where=str(target)) from error
        raise ConfigError("usage", f"it cannot be written: {error}", where=str(target)) from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


# ---------------------------------------------------------------- by the backend


def _export_with_backend(config: Config, source: Path, target: Path, dtype: str, gang: Gang | None) -> None:
    """Load and export with the backend. Collective."""
    model = msgspec.structs.replace(config.model, dtype=dtype)
    own = msgspec.structs.replace(config, model=model)
    joined = gang or Gang.join(config, anywhere=True)
    backend = find("asyncrl.backends", config.learner.backend)(own, joined)
    backend.load(source)
    if joined.lead:
        _write_and_rename(target, backend.export_hf)
    else:
        backend.export_hf(target)  # rank 0 writes
    if gang is None:
        joined.leave()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--step", type=int, help="of a checkpoint that is kept; the newest without it")
    parser.add_argument("--out", type=Path, help="folder; RUN/export-step_N without it")
    parser.add_argument("--dtype", default="auto", choices=DTYPE_NAMES, help="of the weights; auto: model.dtype")
    parser.add_argument("--max-shard-size", default="5GB", help="largest file of weights, such as 5GB or 500MB")
    args = parser.parse_args(argv)
    try:
        run = RunDir(args.run).require()
        config = load(run.config)  # the folder may have moved
        config = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, dir=str(run.root)))
        lead = int(os.environ.get("RANK", "0")) == 0
        target = export(
            config,
            step=args.step,
            out=args.out,
            dtype=args.dtype,
            max_bytes=parse_size(args.max_shard_size),
            say=_say if lead else lambda _: None,
        )
        if lead:
            print(target)
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
