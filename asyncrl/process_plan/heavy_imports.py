"""The modules behind the seconds of a role's start: torch, transformers, and what imports them.

A list that misses a module costs its import; one that names a module too much costs the same once. Engines and backends
with threads, servers or an own environment have none: their processes are executed.
"""

from __future__ import annotations

from pathlib import Path

from asyncrl.config import Config
from asyncrl.runtime.model_folder import model_json

LEARNER = (
    "transformers.models.auto.tokenization_auto",
    "buffers.client.learner",
    "weightsync.publisher.publisher",
    "learners.algorithms.losses",
    "learners.gang.watchdog",
    "learners.rank_zero",
    "learners.backends.fsdp2.backend",
    "learners.loop",
)
ENGINE = ("producers.engines.hf.engine", "producers.main")


def heavy_imports(role: str, config: Config) -> tuple[str, ...]:
    """Modules of this package and of libraries, none of a user; empty for a role without torch.

    >>> from asyncrl.config import parse
    >>> config = parse('[model]\\npath = "m"\\n[data]\\npath = "d"\\n[[reward]]\\nfunction = "x:y"')
    >>> heavy_imports("producer", config), heavy_imports("buffer", config)
    (('producers.engines.hf.engine', 'producers.main'), ())
    """
    alone = config.cluster.learner_hosts == 1  # torchrun itself executes the ranks of several hosts
    if role == "learner" and config.learner.backend == "fsdp2" and alone:
        gang = ("learners.gang.local_gang",) * (config.learner.ranks > 1)
        return (*LEARNER, *gang, *model_module(config))
    generates = role in ("producer", "evaluator") and config.producers.engine == "hf"
    return (*ENGINE, *model_module(config)) if generates else ()


def model_module(config: Config) -> tuple[str, ...]:
    """Where transformers has the model; empty without a folder, or for a model that brings code."""
    kind = str(model_json(Path(config.model.path)).get("model_type", ""))
    if not kind.isidentifier() or config.model.trust_remote_code:
        return ()
    return (f"transformers.models.{kind}.modeling_{kind}",)
