"""The interpreter and the server of each producer: engines have their own environments.

Guarantees:
1. `producers.python` wins; else this interpreter, if it has the package of the engine and of the parser of tool calls;
   else `.venv-ENGINE` in the same folder as this environment (`make ENGINE` creates it); else an error;
2. `look` runs that interpreter at most once, within `LOOK_S`; it imports asyncrl there, and vLLM only to check
   `producers.engine_args`;
3. with several servers the producer number i uses the i-th, so each server gets its weights from one producer.

Example: `engine = "vllm"` under `/home/me/asyncrl/.venv/bin/python` without vLLM:
`/home/me/asyncrl/.venv-vllm/bin/python`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from asyncrl.config import Config, dump
from asyncrl.config.sections.environment import engine_parser
from asyncrl.config.sections.producers import SERVED
from asyncrl.errors import AsyncRLError, ConfigError, error_for

#: Engines whose package pins its own torch, and that package.
PACKAGES = {"vllm": "vllm"}
ENGINE_TOKEN = "ASYNCRL_ENGINE_TOKEN"  # variable with the API key of such a server
LOOK_S = 120.0
_LOOK = """
import importlib.metadata, importlib.util, json, platform, sys
engine, package, entry = sys.argv[1:4]
try:
    import asyncrl, asyncrl.plugins
    asyncrl.plugins.find("asyncrl.engines", engine)
except Exception as error:  # another environment: whatever its packages raise is the answer
    sys.exit(f"it cannot import asyncrl: {type(error).__name__}: {error}")
if importlib.util.find_spec(package) is None:
    sys.exit(f"it has no package {package}")
of = importlib.metadata.packages_distributions().get(package) or [package]
points = [point.name for point in importlib.metadata.entry_points(group=entry)] if entry else []
print(json.dumps({"package": f"{of[0]} {importlib.metadata.version(of[0])}", "asyncrl": asyncrl.__version__,
                  "python": platform.python_version(), "points": points}))
"""


def find_interpreter(config: Config, *, prefix: str = sys.prefix, has: Callable[[str], bool] | None = None) -> str:
    """The interpreter of the producers; empty for this one.

    Raises:
        ConfigError: `config.extra`: no environment has the package.
    """
    if config.producers.python:
        return config.producers.python
    engine = python_with(config.producers.engine, where="producers.engine", prefix=prefix, has=has)
    parsers = {engine_parser(name)[0] for one in config.environments for name in (one.parser, one.reasoning_parser)}
    for name in sorted(parsers - {""}):
        engine = engine or python_with(name, where="environment.parser", package=name, prefix=prefix, has=has)
    return engine


def python_with(
    engine: str,
    *,
    where: str,
    package: str = "",
    prefix: str = sys.prefix,
    has: Callable[[str], bool] | None = None,
) -> str:
    """An interpreter with the engine's package, or with this one; empty for this interpreter. `where`: the setting that
    an error names."""
    package = package or PACKAGES.get(engine, "")
    found = has or (lambda name: importlib.util.find_spec(name) is not None)
    if not package or found(package):
        return ""
    sibling = Path(prefix).parent / f".venv-{engine}" / "bin" / "python"
    if sibling.exists():
        return str(sibling)
    own = f", or set producers.python to an interpreter that has {package} and asyncrl" * (where == "producers.engine")
    raise ConfigError(
        "config.extra",
        f"engine {engine} needs the package {package}: this environment does not have it, and there is no {sibling}",
        where=where,
        remedy=f"`make {engine}` makes one{own}",
    )


def settle_interpreter(config: Config) -> Config:
    """The configuration with the interpreter of its producers."""
    python = find_interpreter(config)
    if python == config.producers.python:
        return config
    return msgspec.structs.replace(config, producers=msgspec.structs.replace(config.producers, python=python))


def own_url(config: Config, name: str) -> Config:
    """The configuration of one producer, with only its own server. The number at the end of its name selects it."""
    number, urls = name.rpartition("-")[2], config.producers.url
    if len(urls) < 2 or not number.isdigit():
        return config
    mine = (urls[int(number) % len(urls)],)
    return msgspec.structs.replace(config, producers=msgspec.structs.replace(config.producers, url=mine))


def url_problems(config: Config) -> list[AsyncRLError]:
    """Problems of `producers.url`."""
    producers = config.producers
    if producers.engine in ("hf", "dataset", *PACKAGES) and producers.url:
        return [ConfigError("config.conflict", f"engine {producers.engine} has no server", where="producers.url")]
    if producers.engine not in SERVED:
        return []
    if not producers.url:
        return [
            ConfigError(
                "config.missing",
                f"engine {producers.engine} needs the address of its server",
                where="producers.url",
                remedy="set it to http://host:port",
            )
        ]
    if len(producers.url) != producers.count:
        what = f"{len(producers.url)} servers for producers.count = {producers.count}: each producer has its own"
        return [ConfigError("config.conflict", what, where="producers.url")]
    return []


def look(config: Config, *, env: Mapping[str, str] | None = None) -> tuple[list[AsyncRLError], str, str]:
    """Errors, the content of the producers' environment (empty without a check), and its interpreter."""
    engine = config.producers.engine
    package = PACKAGES.get(engine, "")
    try:
        python = find_interpreter(config)
    except ConfigError as error:
        return [error], "", ""
    if not package:
        return [], "", python
    python = python or sys.executable
    entry = "vllm.general_plugins" if engine == "vllm" else ""
    code, out, err = _run([python, "-c", _LOOK, engine, package, entry], "", env)
    if code:
        return [_unfit(python, err or out or f"code {code}", engine)], "", ""
    says = json.loads(out.splitlines()[-1])
    words = f"{says['package']}, asyncrl {says['asyncrl']}, Python {says['python']}"
    errors: list[AsyncRLError] = []
    if entry and "asyncrl" not in says["points"]:
        errors.append(
            ConfigError(
                "config.extra",
                f"asyncrl is not installed in {python}, so vLLM's processes do not find it",
                where="producers.python",
                remedy="python -m pip install --no-deps -e . there (make vllm does)",
            )
        )
    if engine == "vllm" and config.producers.engine_args:
        errors += _argument_problems(config, python, env)
    return errors, words, python


def _unfit(python: str, said: str, engine: str) -> AsyncRLError:
    last = ([line for line in said.splitlines() if line.strip()] or ["it ended without a word"])[-1]
    remedy = f"`make {engine}` makes one that fits"
    return ConfigError("config.extra", f"{python}: {last}", where="producers.python", remedy=remedy)


def _argument_problems(config: Config, python: str, env: Mapping[str, str] | None) -> list[AsyncRLError]:
    code, out, err = _run([python, "-m", "producers.engines.vllm.args"], dump(config), env)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    if code:
        return [_unfit(python, err, config.producers.engine)]
    return [error_for(code, message, where=where) for code, message, where in found]


def _run(command: list[str], text: str, env: Mapping[str, str] | None) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            check=False,
            env=dict(env if env is not None else os.environ),
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {LOOK_S:g} s"
    except OSError as error:
        return 1, "", str(error.strerror)
    return done.returncode, done.stdout, done.stderr


def python_path() -> list[str]:
    """Python path of children: the launch folder (user's rewards), this checkout, the previous value."""
    root = Path(__file__).resolve().parents[2]
    places = [os.getcwd()] + ([] if root.name == "site-packages" else [str(root)])
    places += [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return list(dict.fromkeys(places))
