"""Checks `[trackers]`: packages, files with secrets, the port of Prometheus. Imports no tracker."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.sections.tracker import ONLINE
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.net.probe import bind_problem
from asyncrl.plugins import BUILT_IN

GROUP = "asyncrl.trackers"


def check_trackers(config: Config) -> Iterator[AsyncRLError]:
    """Everything that would end a tracker at its start; the run would continue without its curves."""
    trackers = config.trackers
    known = set(BUILT_IN[GROUP]) - {"tensorboard"} | {point.name for point in entry_points(group=GROUP)}
    for name in trackers.use:
        package = ONLINE.get(name, ("", ""))[0]
        if name not in known:
            what = f"{name!r} is not known: one of {', '.join(sorted(known))}"
            yield ConfigError("config.type", what, where="trackers.use")
        elif package and importlib.util.find_spec(package) is None:
            what = f"tracker {name!r} needs the package {package}, which this environment lacks"
            yield ConfigError("config.extra", what, where="trackers.use", remedy=f"pip install 'asyncrl[{name}]'")
    yield from _check_secrets(config)
    port = trackers.prometheus_port
    if port and (problem := bind_problem(f"tcp://127.0.0.1:{port}")):
        yield ConfigError(problem[0], problem[1], where=f"trackers.prometheus_port = {port}")


def _check_secrets(config: Config) -> Iterator[AsyncRLError]:
    for name, text in config.trackers.key_file.items():
        path, where = Path(text).expanduser(), f"trackers.key_file.{name}"
        try:
            secret, mode = path.read_text(encoding="utf-8").strip(), path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            yield ConfigError("config.type", f"{text}: {getattr(error, 'strerror', None) or error}", where=where)
            continue
        if not secret:
            yield ConfigError("config.type", f"{text} is empty", where=where)
        elif mode & 0o077:
            what = f"{text} holds a secret and others may read it"
            yield ConfigError("config.type", what, where=where, remedy=f"chmod 600 {text}")
