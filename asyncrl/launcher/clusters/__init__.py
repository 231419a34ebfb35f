"""`asyncrl launch all CONFIG --backend slurm|k8s|ray --render DIR`: the jobs of a run as readable files.

All backends place the same commands, `asyncrl launch services|producers|rewards|learner`: a role that starts anywhere
with the address of the buffer and a key joins the run. Guarantees:
1. nothing is started, and nothing outside of DIR is written;
2. the same configuration gives the same files; other files in DIR are not touched;
3. the files hold no secrets: keys are files with mode 0600, or secrets of the cluster;
4. the scheduler stops a job with SIGTERM and `cluster.grace_s`: the learner writes a checkpoint; the same jobs resume
   the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from asyncrl.config import Config, dump, load
from asyncrl.config.sections.producers import devices_each
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.launcher.clusters.commands import Files, Site
from asyncrl.net.addresses import is_exposed
from asyncrl.preflight.memory import estimate, format_bytes
from asyncrl.runtime.model_folder import model_json

CONFIG_NAME = "config.toml"
#: Mistakes about files on the pods' volume, which may not be mounted here. Each role checks again when it
#: starts; a mistake ends its Job at once.
OF_THE_VOLUME = frozenset(
    f"config.{what}" for what in ("model", "tokenizer", "data", "reward", "environment", "template", "filter", "file")
)


def _renderer(backend: str) -> Callable[[Config, Site], Files]:
    if backend == "slurm":
        from asyncrl.launcher.clusters.slurm import render
    elif backend == "k8s":
        from asyncrl.launcher.clusters.kubernetes import render
    elif backend == "ray":
        from asyncrl.launcher.clusters.ray import render
    else:
        raise ConfigError("usage", f"backend {backend!r} is none of slurm, k8s, ray")
    return render


def render(config: Config, site: Site, *, backend: str) -> Files:
    """The files by name; names that end in .sh or .sbatch are programs. Pure."""
    return {CONFIG_NAME: dump(config), **_renderer(backend)(config, site)}


def render_command(paths: Sequence[Path], overrides: Sequence[str], *, backend: str, folder: Path) -> int:
    """Check the configuration and write the files."""
    from asyncrl.launcher.clusters.commands import cluster_config
    from asyncrl.launcher.launch import absolute
    from asyncrl.preflight import check as checks
    from asyncrl.preflight.files import settle_steps

    given = settle_steps(load(paths, overrides))
    if given.evaluation.separate:
        what = "jobs for evaluators are not rendered: start them with `asyncrl launch evaluators`"
        raise ConfigError("config.conflict", what, where="evaluation.lane")
    if given.cluster.devices == "turns":
        what = "cluster.devices = 'turns' is for roles of one host, and jobs have devices of their own"
        raise ConfigError("config.conflict", what, where="cluster.devices", remedy="use asyncrl launch all")
    given = given if backend == "k8s" else absolute(given)  # pods start in a folder of the volume
    # ports and stores belong to other hosts: only the rest can be checked here
    checked = checks.check(given, ("producer", "reward", "learner"), joining=True)
    # Keys may be created later.
    errors = [error for error in checked.errors if error.where.partition(" ")[0] != "network.key_file"]
    errors += [*unmet_addresses(given, backend=backend), *missing_devices(given)]
    if backend == "k8s":
        errors = [*(error for error in errors if error.code not in OF_THE_VOLUME), *not_on_volume(given)]
    if errors:
        raise ConfigErrors(errors)
    target = folder.resolve()
    site = Site(
        folder=str(target),
        work=given.cluster.folder or str(Path.cwd()),
        keys=str(target / "keys"),
        programs=str(Path(sys.executable).parent),
    )
    config = cluster_config(given, site)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in render(config, site, backend=backend).items():
        path = target / name
        path.write_text(text)
        path.chmod(0o755 if path.suffix in (".sh", ".sbatch", ".py") else 0o644)
        print(path)
    for note in memory_notes(given, model_json(given.model.path)):
        print(f"note: {note}")
    print(f"next: {_next(backend, folder)}")
    return 0


def memory_notes(config: Config, model: Mapping[str, Any]) -> Iterator[str]:
    """Jobs whose processes need more host memory than `cluster.memory`, by the estimate of `asyncrl check`; nothing
    without the model's config.json.
    """
    cluster = config.cluster
    unit = cluster.memory[-1] if cluster.memory[-1] in "KMGT" else "M"
    limit = float(cluster.memory.rstrip("KMGT")) * 1024 ** " KMGT".index(unit)
    jobs = (
        ("learner", "a host of the learner", cluster.learner_gpus),
        ("producer", "a job of producers", cluster.producer_gpus),
        ("reward", "the job of reward workers", cluster.reward_gpus),
    )
    for role, job, devices in jobs:
        found = estimate(config, model, (role,), accelerator=bool(devices))
        need = sum(one.count * one.total_bytes for one in found if one.place == "host")
        if need > limit:
            yield f"{job} needs about {format_bytes(need)} of host memory; cluster.memory = {cluster.memory!r}"


def unmet_addresses(config: Config, *, backend: str) -> Iterator[ConfigError]:
    """Addresses of services that the jobs on other hosts do not connect to.

    All jobs get the buffer's address with `cluster.port`. They take the port of weight sync from its own setting, and a
    Service of Kubernetes forwards the port after the buffer's alone.
    """
    first = config.cluster.port
    for key, port in (("buffer", first), ("weightsync", first + 1)):
        address = getattr(config.network, key)
        if address == "auto" or (key == "weightsync" and config.producers.engine == "dataset"):
            continue
        own = address.rpartition(":")[2]
        fixed = key == "buffer" or backend == "k8s"
        if not is_exposed(address) or (own != str(port) if fixed else own in ("0", str(first))):
            want = f"port {port}" if fixed else f"a fixed port, not {first}, which is the buffer's"
            yield ConfigError(
                "config.conflict",
                f"with cluster.port = {first} the jobs would not meet there: they need {want}, on an address that "
                "other hosts reach",
                where=f"network.{key} = {address!r}",
                remedy=f"set network.{key} = 'tcp://0.0.0.0:{port}'",
            )


def missing_devices(config: Config) -> Iterator[ConfigError]:
    """A producer job with fewer accelerators than its engines use."""
    count, given = config.producers.count, config.cluster.producer_gpus
    each = devices_each(config.producers.engine, config.producers.engine_args)
    if given and given < count * each:
        what = f"cluster.producer_gpus = {given}, and {count} producers use {each} each (producers.engine_args)"
        remedy = f"set cluster.producer_gpus = {count * each}"
        yield ConfigError("config.conflict", what, where="cluster.producer_gpus", remedy=remedy)


def not_on_volume(config: Config) -> list[ConfigError]:
    """Absolute paths of the run, the model and the prompts that are not on the pods' volume."""
    volume = config.cluster.claim_path
    paths = {"run.dir": config.run.dir, "model.path": config.model.path}
    paths |= {
        f"trackers.{key}": getattr(config.trackers, key) for key in ("prometheus_key_file", "prometheus_cert_file")
    }
    rows = {"data.path": config.data.path, "evaluation.path": config.evaluation.path}
    places = [*paths.items(), *((key, path.strip()) for key, given in rows.items() for path in given.split(","))]
    return [
        ConfigError(
            "config.conflict",
            "pods have no such place: only what lies on the volume is theirs",
            where=f"{key} = {path!r}",
            remedy=f"a path below cluster.claim_path ({volume}), or one relative to "
            f"cluster.folder ({config.cluster.folder or volume})",
        )
        for key, path in places
        if os.path.isabs(path) and not PurePosixPath(path).is_relative_to(volume)
    ]


def _next(backend: str, folder: Path) -> str:
    runner = {"slurm": "submit.sh", "k8s": "apply.sh", "ray": "driver.py"}[backend]
    return f"{'python ' if backend == 'ray' else ''}{os.path.join(folder, runner)}"
