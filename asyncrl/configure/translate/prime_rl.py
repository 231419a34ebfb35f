"""prime-rl: batches counted in rollouts, and environments of the package verifiers."""

from __future__ import annotations

from typing import Any

from asyncrl.configure.translate.given import Given

ORCHESTRATOR = "orchestrator."


def take(given: Given) -> None:
    """Take what the table of names cannot translate."""
    rollouts, group = given.take("orchestrator.batch_size"), given.number("orchestrator.group_size", 1) or 1
    if isinstance(rollouts, int):
        given.settings["buffer.batch_groups"] = max(1, int(-(-rollouts // group)))
    args = given.take_table("inference.vllm.") | given.take_table("inference.parallel.")
    if "tp" in args:
        args["tensor_parallel_size"] = args.pop("tp")
    if "dp" in args:
        args["data_parallel_size"] = args.pop("dp")
    for name, key in (("model", "model.path"), ("seed", "run.seed")):
        value = args.pop(name, None)
        if value is not None:
            given.settings.setdefault(key, value)
    given.settings["producers.engine"] = "vllm"
    given.options("producers.engine_args", args)
    if given.take("wandb") or any(key.startswith("monitors.wandb.") for key in given.left):
        given.settings["trackers.use"] = ["wandb"]
    optimizer = given.take("trainer.optim.type")
    if optimizer in ("adamw", "muon"):
        given.settings["learner.optim.name"] = optimizer
    elif optimizer:
        given.note("trainer.optim.type", optimizer, "the optimizers here are adamw, adamw_8bit and muon")
    if any(key.startswith("trainer.model.ac.") for key in given.left):
        given.settings["learner.gradient_checkpointing"] = True
    if given.take("orchestrator.eval.skip_first_step") is False:
        given.settings["evaluation.at_start"] = True
    if given.take("orchestrator.train.filter_zero_advantages") is True:
        given.settings["buffer.filters"] = ["zero_variance"]
    _environments(given)


def _environments(given: Given) -> None:
    """The first environment; its data set is written to a file by its users."""
    found = given.take("orchestrator.train.source") or given.take("environment") or []
    found = [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict)]
    if not found:
        return
    name, args = environment_of(found[0])
    given.settings["environment.name"] = "verifiers"
    given.settings["environment.args"] = {"id": name, **args}
    given.settings["data.path"] = f"data/{name.replace('/', '-')}.parquet"
    given.settings.setdefault("reward.function", "builtin:exact")
    given.notes.append(
        f"orchestrator.train.source: write the rows of {name} to {given.settings['data.path']}: "
        f"`vf.load_environment({name!r}).get_dataset().to_parquet(FILE)`; its rubric gives the reward"
    )
    for one in found[1:]:
        what = "add a [[row_environment]] and its rows (docs/environments.md)"
        given.notes.append(f"orchestrator.train.source = {environment_of(one)[0]!r}: {what}")
    given.notes += [
        f"orchestrator.train.source.{key} = {one[key]!r}: see [environment] and docs/environments.md"
        for one in found
        for key in one
        if key not in ("id", "name", "args", "env", "taskset")
    ]
    held_out = given.take("orchestrator.eval.source") or []
    names = [environment_of(one)[0] for one in held_out if isinstance(one, dict)] if isinstance(held_out, list) else []
    if names:
        given.settings["evaluation.path"] = path = f"data/{names[0].replace('/', '-')}.parquet"
        given.notes.append(
            f"orchestrator.eval.source = {names}: write the rows of the first to {path}; they are played "
            f"in the environment {name}"
        )


def environment_of(one: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of an environment, in the older and the newer form.

    >>> environment_of({"id": "wordle", "args": {"seed": 1}})
    ('wordle', {'seed': 1})
    >>> environment_of({"name": "w", "env": {"taskset": {"id": "wordle"}}})
    ('wordle', {})
    """
    tasks = (one.get("env") or {}).get("taskset") or one.get("taskset") or {}
    name = one.get("id") or tasks.get("id") or one.get("name") or "environment"
    args = one.get("args") or {key: value for key, value in tasks.items() if key != "id"}
    return str(name), dict(args)
