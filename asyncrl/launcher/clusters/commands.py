"""The commands that a scheduler places, the same for all backends. Pure.

Words of a command are data: `shell` quotes each of them, so a path with a space or a quote stays one word. `Shell`
marks a word that the shell must expand.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from asyncrl.config import Config
from asyncrl.net.addresses import LOOPBACK

Files = dict[str, str]
ROLES = ("services", "producers", "rewards", "learner")
WORKER_KEYS = {"producers": "producer", "rewards": "reward"}  # role -> name of its key


class Site(NamedTuple):
    """Places of files on all hosts: the rendered folder, the working directory, the folder of the key files, and the
    programs of the environment that renders.
    """

    folder: str
    work: str
    keys: str
    programs: str


class Shell(str):
    """A word that the shell expands; it is quoted already."""


def cluster_config(config: Config, site: Site) -> Config:
    """The configuration of the jobs: services on every interface of their host, with keys."""
    network, sync, port = config.network, config.weightsync, config.cluster.port
    network = msgspec.structs.replace(
        network,
        key_file=f"{site.keys}/server.key",
        buffer=f"tcp://0.0.0.0:{port}" if network.buffer == "auto" else network.buffer,
        weightsync=f"tcp://0.0.0.0:{port + 1}" if network.weightsync == "auto" else network.weightsync,
    )
    return msgspec.structs.replace(config, network=network, weightsync=sync)


def launch(
    config: Config,
    role: str,
    *,
    config_path: str,
    connect: str = "",
    key: str = "",
    host: str = "",
    more: Sequence[str] = (),
) -> list[str]:
    """`asyncrl launch ROLE`. `host`: the address of its host, from which it sends weights to others."""
    words = ["python", "-m", "asyncrl", "launch", role, config_path, "--plain", "--job"]
    words += ["--connect", connect] if connect else []
    words += ["--key", key] if key else []
    if host and role in ("producers", "learner"):
        for setting in ("stream_host", "collective_host"):
            if getattr(config.weightsync, setting) in LOOPBACK:
                words += ["--set", Shell(f"weightsync.{setting}={host}")]
    return [*words, *more]


def shell(words: Sequence[str]) -> str:
    """One shell command, with a line break before each option."""
    texts = [str(word) if isinstance(word, Shell) else shlex.quote(word) for word in words]
    lines = [texts[0]]
    for before, text in itertools.pairwise(texts):
        lines.append(" \\\n    " + text if text.startswith("--") and not before.startswith("--") else " " + text)
    return "".join(lines)


def setup_lines(lines: Sequence[str]) -> list[str]:
    """`cluster.setup` in a script with `set -eo pipefail`: foreign scripts (module, conda) read unset variables."""
    return [*lines, "set -u"]


def environment(config: Config) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "ASYNCRL_CLUSTER": config.cluster_name}


def summary(config: Config) -> str:
    """One line about the jobs."""
    cluster = config.cluster
    workers = f"{cluster.producers} x producers ({config.producers.count} each)"
    return f"services, {workers}, rewards, learner on {cluster.learner_hosts} x {config.learner.ranks} ranks"
