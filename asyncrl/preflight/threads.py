"""CPU threads of engines and of the learner's ranks, where `producers.threads` or `learner.threads` is 0.

Guarantees:
1. an explicit number is kept;
2. the engines and ranks of a run that compute on a CPU share the cores of the host evenly: all of them may be busy at
   once. Those that another command starts count too; where roles have hosts of their own, set the numbers;
3. a process on an accelerator, or a client of an engine's server, has one thread;
4. so has a small model: its products are too short for a second thread to pay.

Example: a model of 0.5 billion parameters, a producer and a rank on a laptop of 8 cores: four threads each. On 2 cores,
or with the demo's model of less than a million parameters, one each.
"""

from __future__ import annotations

import msgspec

from asyncrl.config import Config
from asyncrl.config.mode import present_roles
from asyncrl.config.sections.producers import SERVED
from asyncrl.preflight.machine import look_at_machine
from asyncrl.preflight.model_shape import model_shape
from asyncrl.process_plan.plan import ENGINES, TARGETS, process_names
from asyncrl.runtime.model_folder import model_json

LARGE = 50_000_000  # parameters


def choose_threads(config: Config) -> Config:
    """`config` with numbers of threads for this machine."""
    if config.producers.threads and config.learner.threads:
        return config
    here = look_at_machine(config.run_dir)
    cores = here.cores if is_large(config.model.path) else 1
    return set_threads(config, cores=cores, accelerator=bool(here.accelerator))


def is_large(model: str) -> bool:
    """Whether the model of this folder has `LARGE` parameters; False if its shape is unknown."""
    shape = model_shape(model_json(model))
    return shape is not None and shape.parameters >= LARGE


def set_threads(config: Config, *, cores: int, accelerator: bool) -> Config:
    """`choose_threads` for a host with these cores, with or without an accelerator."""
    busy = {
        role: config.learner.ranks if role == "learner" else len(process_names(role, config))
        for role in present_roles(TARGETS["all"], config)
        if _computes(role, config, accelerator=accelerator)
    }
    each = max(1, cores // max(1, sum(busy.values()) * (1 + len(config.run.other_policies))))
    generating = each if ENGINES & busy.keys() else 1
    training = each if "learner" in busy else 1
    return msgspec.structs.replace(
        config,
        producers=msgspec.structs.replace(config.producers, threads=config.producers.threads or generating),
        learner=msgspec.structs.replace(config.learner, threads=config.learner.threads or training),
    )


def _computes(role: str, config: Config, *, accelerator: bool) -> bool:
    """Whether the processes of a role compute on the host's CPU."""
    if role not in {*ENGINES, "learner"} or (role in ENGINES and config.producers.engine in (*SERVED, "dataset")):
        return False
    device = config.learner.device if role == "learner" else config.producers.device
    return device == "cpu" or (device == "auto" and not accelerator)
