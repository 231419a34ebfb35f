"""`asyncrl.Config`: the settings of a run as an object, with the same checks as the TOML file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from asyncrl.config import load
from asyncrl.configure.proposal import find_files, proposed_settings
from asyncrl.errors import AsyncRLError, ConfigError, ConfigErrors
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.rows import portable_row
from asyncrl.preflight.check import check_files
from asyncrl.preflight.machine import look_at_machine
from asyncrl.process_plan.plan import TARGETS
from asyncrl.python_api.function_source import write_functions
from asyncrl.runtime.run_dir import RunDir, launchers, write_atomic

#: A reward: a function, or one of the texts that `[[reward]] function` takes.
Reward = Callable[..., Any] | str
#: Rows: a path, a list of dicts, a pandas or pyarrow table, a `datasets.Dataset`, or a function that gives rows.
Data = str | Path | Iterable[Mapping[str, Any]] | Any
FILE = "python.toml"


class Config:
    """Settings of a run by dotted key: what a TOML file holds.

    `Config.build(...)` chooses numbers that fit this machine, `Config.open(path)` reads a file, `config["buffer.
    max_staleness"] = 8` changes one setting, `check()` returns every mistake, `save(path)` writes the file.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.settings[key] = value

    def __repr__(self) -> str:
        return f"asyncrl.Config({self.settings!r})"

    @classmethod
    def open(cls, path: str | Path) -> Config:
        """The settings of a TOML file, resolved. Raises ConfigErrors with every mistake."""
        return cls(flatten(msgspec.to_builtins(load(Path(path)))))

    @classmethod
    def build(
        cls,
        model: str | Path,
        data: Data,
        rewards: Sequence[Reward],
        *,
        dir: str | Path,  # noqa: A002, RUF100 - the name of the setting
        evaluation: Data | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Config:
        """Settings that fit this machine. Rows and functions that other processes cannot reach are written into `dir`.

        `settings`: further ones by dotted key; they win, and may be functions.

        Raises:
            ConfigError: `config.data`, `config.reward`: data or a function that cannot be used.
            ConfigErrors: names on a hub that cannot be looked up: numbers that fit them are not known.
            AsyncRLError: `service.duplicate`: the run of `dir` is running, and its processes read these files.
        """
        root = Path(dir).expanduser().resolve()
        refuse_running(RunDir(root))
        if not rewards:
            raise ConfigError("config.reward", "there is no reward", where="rewards", remedy="give at least one")
        rows = "" if callable(data) else write_rows(data, root / "data" / "train.jsonl")
        given = {"model": str(model), "data": rows, "reward": "", "preset": "grpo_decoupled", "name": root.name}
        located = find_files(given, hub=str((settings or {}).get("model.hub", "")))
        if located.errors:
            raise ConfigErrors(located.errors)
        adapters = bool((settings or {}).get("learner.lora.rank"))
        made = proposed_settings(located.answers, look_at_machine(root), adapters=adapters)
        made |= {"model.path": given["model"], "data.path": rows}
        del made["reward.function"]
        if callable(data):
            del made["data.path"]
            made["data.source"] = data
        if evaluation is not None:
            made["evaluation.path"] = write_rows(evaluation, root / "data" / "evaluation.jsonl")
        made |= {"run.dir": str(root), "buffer.store": "sqlite", "log.archive": True, **(settings or {})}
        return cls(name_functions({**made, "reward": [{"function": one} for one in rewards]}, root / "code"))

    def check(self) -> list[AsyncRLError]:
        """Every mistake, as `asyncrl check` finds them; empty if the run can start."""
        with tempfile.TemporaryDirectory() as folder:
            return check_files(self.save(Path(folder) / FILE))[1].errors

    def text(self) -> str:
        """The TOML."""
        return tomli_w.dumps(nest(self.settings))

    def save(self, path: str | Path) -> Path:
        """Write the TOML; its path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target.resolve(), self.text().encode())
        return target

    def require(self) -> Config:
        """Raise ConfigErrors with every mistake, if there is one."""
        if errors := self.check():
            raise ConfigErrors(errors)
        return self


def refuse_running(files: RunDir) -> None:
    """Raise `service.duplicate` if a launcher of the run lives on this host. Further producers and reward workers may
    wait until the run goes on.
    """
    for target, pid in launchers(files):
        if {"buffer", "learner"} & {*TARGETS.get(target, ())}:
            raise AsyncRLError("service.duplicate", f"the launcher of {target} runs (pid {pid})", where=str(files.root))


def name_functions(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with the place of each function instead of the function; those of this process are written into
    the folder (`write_functions`).
    """
    found: list[Callable[..., Any]] = []

    def collect(value: Any) -> None:
        if isinstance(value, Mapping | list | tuple):
            for one in value.values() if isinstance(value, Mapping) else value:
                collect(one)
        elif callable(value):
            found.append(value)

    collect(settings)
    places = iter(write_functions(folder, found))

    def place_of(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: place_of(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [place_of(one) for one in value]
        return next(places) if callable(value) else value

    return {key: place_of(value) for key, value in settings.items()}


def write_rows(data: Data, path: Path) -> str:
    """A path of rows that other processes read: the given one, or `path`, to which the rows are written.

    Raises:
        ConfigError: `config.data`, for an object that holds no rows, or rows that JSON cannot hold.
    """
    if isinstance(data, str | Path):
        return str(data)
    rows: Any = data
    if hasattr(rows, "iterrows"):
        rows = rows.to_dict("records")  # pandas
    elif hasattr(rows, "to_pylist"):
        rows = rows.to_pylist()  # pyarrow
    try:
        lines = [msgspec.json.encode(portable_row(dict(row))) for row in rows]
    except (TypeError, ValueError, ImageProblem) as error:
        kind = type(data).__name__
        raise ConfigError(
            "config.data", f"a {kind} gives no rows: {error}", where="data", remedy="pass a list of dicts, or a path"
        ) from None
    if not lines:
        raise ConfigError("config.data", "there are no rows", where="data", remedy="pass at least one")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, b"\n".join(lines) + b"\n")
    return str(path)


def nest(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted keys.

    >>> nest({"run.name": "a", "learner.optim.lr": 1e-4})
    {'run': {'name': 'a'}, 'learner': {'optim': {'lr': 0.0001}}}
    """
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of a tree; tables of options and lists stay values.

    >>> flatten({"run": {"name": "a"}, "learner": {"optim": {"lr": 0.1}}})
    {'run.name': 'a', 'learner.optim.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and not key.endswith(("_options", "_args")) and key != "args":
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
