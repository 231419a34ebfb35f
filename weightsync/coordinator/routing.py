"""How the target comes to a member: transport, source, whole weights or hops. Pure.

`auto` takes the first that fits of
1. `local`: on the publisher's host;
2. `collective`: at least two members lack the version together since it was published;
3. `stream`: the member joined later, failed, or is alone; from the least busy source: the publisher, or a member that
   serves the target and relays it;
4. `collective` if nothing else is possible.
`disk` is taken if it is set. With `direct` set, members that lacked the version when it was published take it in one
group; those that missed it take `local` or `stream`, once the publisher has staged it. Guarantees:
1. a source serves at most `relay_fanout` pulls at a time (0: no relays, the publisher serves all);
2. a source that failed a member is not its source again for this version, except the publisher if there is no other;
3. hops only to a member that holds their base by version and digest, if all are present, smaller than the whole and
   did not fail before; only from the publisher, and never by `local`, which only maps whole weights;
4. every route has a reason in words, also an empty one; an offer with an empty address is one that the publisher opens
   when it is chosen first;
5. an adapter only to a member that holds its base, by digest; other members get the base first, whole, from the
   publisher, alone (or by `collective` if that is set);
6. no failure is permanent: an address that a member cannot reach is tried again after `UNUSABLE_S`.

Example: version 7 of 1 GB, published with hops 5->6 (20 MB) and 6->7 (20 MB). A member that holds 6 takes 20 MB, one
that holds 5 takes 40 MB in two hops, one that holds 4, or another 6, takes 1 GB.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from asyncrl.config import WeightSyncConfig
from asyncrl.errors import WorkError
from asyncrl.wire import Hop, Manifest
from weightsync.coordinator.records import Member, Route, Target
from weightsync.encoding import ADAPTER, DELTA

UNUSABLE_S = 60.0  # before an address that a member cannot reach is tried again
MIN_GROUP = 2  # members from which on a collective is worth it


@dataclass(frozen=True)
class Scene:
    """What routes depend on. `together`: free members that lack the target since it was published; `loads`: pulls
    that a source serves now."""

    config: WeightSyncConfig
    target: Target | None
    offers: Mapping[str, str]
    hops: tuple[Hop, ...]
    members: Mapping[str, Member]
    together: Collection[str]
    loads: Mapping[str, int]
    publisher_silent: bool
    now: float
    base: Scene | None = None  # for the weights under the target, if that is an adapter and they are offered


class Source(NamedTuple):
    """A process that could serve a pull."""

    name: str
    address: str
    hops: tuple[Hop, ...]
    load: int
    far: bool
    publisher: bool


class Router:
    """Chooses routes. It has no state."""

    def choose(self, member: Member, scene: Scene) -> Route:
        """The route of the target to this member now."""
        target, mode = scene.target, scene.config.transport
        if target is None:
            return Route("", "weights: nothing is published yet")
        if target.manifest.encoding not in member.encodings:
            return Route("", f"it cannot take {target.manifest.encoding} weights")
        if self.lacks_base(member, target):
            return self._base_first(member, scene, target.manifest.base)
        if mode == "direct" and member.name in scene.together and _reaches(member, "direct", scene):
            return self._grouped(member, scene, "direct", "set by weightsync.transport")
        if self.is_near(member, scene):
            return Route(
                "local", f"same host as the publisher ({target.host})", scene.offers["local"], target.publisher
            )
        why = _why_not_local(member, target)
        if mode == "auto" and member.name in scene.together and len(scene.together) >= MIN_GROUP:
            return self._grouped(
                member, scene, "collective", f"{why}; {len(scene.together)} members lack the version together"
            )
        if mode in ("auto", "stream", "direct") and "stream" in member.transports:
            route = self._stream(member, scene, "set by weightsync.transport" if mode == "stream" else why)
            if route is not None:
                return route
        if mode in ("auto", "collective") and "collective" in member.transports and "collective" in scene.offers:
            return self._grouped(
                member, scene, "collective", "set by weightsync.transport" if mode == "collective" else why
            )
        if mode == "disk" and _reaches(member, "disk", scene):
            hops = self.hops_for(member, scene)
            return Route("disk", "set by weightsync.transport", scene.offers["disk"], target.publisher, hops)
        return Route("", f"weightsync.transport = {mode!r} does not reach it: {why}")

    def is_near(self, member: Member, scene: Scene) -> bool:
        """Whether the local transport brings the target to this member."""
        if scene.target is None or scene.config.transport not in ("auto", "local", "direct"):
            return False
        return member.host == scene.target.host and _reaches(member, "local", scene)

    def lacks_base(self, member: Member, target: Target | None) -> bool:
        """Whether the target is an adapter of weights that the member does not hold."""
        if target is None or target.manifest.encoding != ADAPTER or ADAPTER not in member.encodings:
            return False
        return not member.holds(target) and member.base != target.manifest.base

    def hops_for(self, member: Member, scene: Scene) -> tuple[Hop, ...]:
        """The hops from what the member holds to the target; empty if it needs the whole weights."""
        if scene.target is None or member.unsure or member.full_only or DELTA not in member.encodings:
            return ()
        manifest = scene.target.manifest
        if member.has_plan != manifest.plan:
            return ()
        for number, hop in enumerate(scene.hops):
            if (hop.base, hop.base_digest) == (member.version, member.digest):
                chain = scene.hops[number:]
                return chain if sum(sum(step.nbytes) for step in chain) < sum(manifest.bucket_bytes) else ()
        return ()

    def relays(self, member: Member, scene: Scene) -> list[Source]:
        """Members that relay the target and did not fail this one; without those that have been silent for long."""
        if not scene.config.relay_fanout:
            return []
        seen_after = scene.now - scene.config.member_timeout_s / 2
        return [
            Source(
                other.name, other.relay, (), scene.loads.get(other.name, 0), member.host != other.host, publisher=False
            )
            for other in scene.members.values()
            if other.relay
            and other.part is None
            and not other.dead
            and other.last_seen >= seen_after
            and other is not member
            and other.name not in member.failed_sources
            and other.holds(scene.target)
            and _usable(member, "stream", other.relay, scene.now)
        ]

    def _base_first(self, member: Member, scene: Scene, base: str) -> Route:
        if scene.base is None:
            return Route("", f"it lacks the base {base[:12]} of the adapter, and the base is not offered")
        route = self.choose(member, scene.base)
        return replace(route, why=f"the base of the adapter first; {route.why}", base=True)

    def _grouped(self, member: Member, scene: Scene, name: str, why: str) -> Route:
        assert scene.target is not None
        address = scene.offers.get(name, "")
        return Route(name, why, address, scene.target.publisher, self.hops_for(member, scene))

    def _stream(self, member: Member, scene: Scene, why: str) -> Route | None:
        """The pull from the least busy source; an empty route while all are busy; None if there is no source."""
        sources = self._sources(member, scene)
        if not sources and scene.offers.get("stream") == "" and scene.target is not None:
            return Route("stream", f"{why}; the publisher opens it", "", scene.target.publisher)
        if not sources:
            return None
        if any(source.hops for source in sources):
            sources = [source for source in sources if source.hops]
        limit = scene.config.relay_fanout
        free = [source for source in sources if not limit or source.load < limit]
        if not free:
            return Route("", f"waits for a free source: {len(sources)} with {limit} pulls each")
        best = min(free, key=lambda source: (source.load, source.far, source.publisher, source.name))
        origin = "the publisher" if best.publisher else f"{best.name}, which relays"
        return Route("stream", f"{why}; from {origin}", best.address, best.name, best.hops)

    def _sources(self, member: Member, scene: Scene) -> list[Source]:
        """The processes that can serve the target to this member."""
        assert scene.target is not None
        relays = self.relays(member, scene)
        address = scene.offers.get("stream", "")
        if not address or not _usable(member, "stream", address, scene.now):
            return relays
        name = scene.target.publisher
        if relays and (name in member.failed_sources or scene.publisher_silent):
            return relays
        load, far = scene.loads.get(name, 0), member.host != scene.target.host
        return [*relays, Source(name, address, self.hops_for(member, scene), load, far, publisher=True)]


def _why_not_local(member: Member, target: Target) -> str:
    if member.host != target.host:
        return f"on {member.host}, publisher on {target.host}"
    return "shared memory is not visible to it"


def _usable(member: Member, transport: str, address: str, now: float) -> bool:
    return now >= member.unusable.get((transport, address), now)


def _reaches(member: Member, transport: str, scene: Scene) -> bool:
    address = scene.offers.get(transport, "")
    return bool(address) and transport in member.transports and _usable(member, transport, address, scene.now)


def common_hops(needs: Sequence[tuple[Hop, ...]]) -> tuple[Hop, ...]:
    """The hops for a group: those that all its members need; else none (the whole weights)."""
    return needs[0] if len(set(needs)) == 1 else ()


def check_hops(manifest: Manifest, hops: Sequence[Hop]) -> None:
    """Raise `sync.failed` if the hops cannot lead to the version."""
    bases = [hop.base for hop in hops]
    if any(len(hop.nbytes) != len(manifest.bucket_bytes) or min(hop.nbytes, default=0) < 0 for hop in hops):
        raise WorkError("sync.failed", f"version {manifest.version}: a hop has other buckets", where="weightsync")
    if bases != sorted(set(bases)) or any(base >= manifest.version for base in bases):
        raise WorkError("sync.failed", f"version {manifest.version}: hops from {bases}", where="weightsync")
