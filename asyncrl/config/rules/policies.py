"""Rules of runs with other policies (`[policies]`), and of several such runs next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.config.mode import streams
from asyncrl.config.rules import Conflict, conflict
from asyncrl.config.sections.environment import AGENT
from asyncrl.config.tree import Config


def problems(config: Config) -> Iterator[Conflict]:
    if not config.run.other_policies:
        return
    if streams(config):
        yield conflict("learner.mode", f"learner.mode = {config.learner.mode!r}: rows of data meet no other policy")
    if config.producers.checkpoint_tokens:
        what = "turns that are replayed would meet other answers of the other policies"
        yield conflict("producers.checkpoint_tokens", f"with [policies]: {what}; set producers.checkpoint_tokens = 0")
    if config.cluster.devices == "turns":
        what = "the engines of other policies do not take turns"
        yield conflict("cluster.devices", f"cluster.devices = 'turns' with [policies]: {what}")


def find_collisions(configs: Mapping[str, Config]) -> Iterator[Conflict]:
    """Addresses that two policies would listen at."""
    taken: dict[str, tuple[str, str]] = {}
    for name, config in configs.items():
        for key, address in _addresses(config):
            owner, where = taken.setdefault(address, (name, key))
            if owner != name:
                what = f"{key} = {address}: {where} of policy {owner} is the same"
                yield conflict(f"policies.{name}.{key}", f"policies.{name}.{what}; give each policy its own")


def _addresses(config: Config) -> Iterator[tuple[str, str]]:
    network = config.network
    for key in ("buffer", "standby", "weightsync"):
        if (address := getattr(network, key)) not in ("", "auto") and not address.endswith(":0"):
            yield f"network.{key}", address
    if config.trackers.prometheus_port:
        yield "trackers.prometheus_port", str(config.trackers.prometheus_port)
    for one in config.environments:
        if one.name == AGENT and one.agent.port:
            yield "environment.agent.port", str(one.agent.port)
