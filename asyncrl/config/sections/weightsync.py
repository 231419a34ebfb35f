"""`[weightsync]`: how new weights reach the generators."""

from __future__ import annotations

from typing import Literal

from asyncrl.config.sections.base import Count, Positive, Seconds, Section


class WeightSyncConfig(Section, frozen=True):
    """`[weightsync]`: parameters back to the generators."""

    transport: Literal["auto", "local", "collective", "stream", "disk"] = "auto"  # auto: by where a member is
    encoding: Literal["full", "delta"] = "full"  # delta: who holds a recent version gets the changed elements alone
    delta_chain: Count = 4  # so many deltas are kept and applied one after the other; then the whole weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # cast on send; auto: model.dtype
    in_place: bool = False  # engines without room for a second copy: they stand still from the first byte on
    bucket_bytes: Positive = 64 << 20  # weights travel in pieces of this size
    timeout_s: Seconds = 30.0  # of a round, for one member
    member_timeout_s: Seconds = 20.0  # silent for this long: dead
    collective_host: str = "127.0.0.1"  # address of this host for the Gloo / NCCL rendezvous
    collective_backend: Literal["auto", "gloo", "nccl", "hccl"] = "auto"  # auto: by the devices of both ends
    stream_host: str = "127.0.0.1"  # address of this host where versions are pulled from
    stream_chunk_bytes: Positive = 4 << 20  # of one answer; four are asked for ahead
    relay_fanout: Count = 2  # pulls that one source serves at a time; members pass a version on; 0: none do
    disk_dir: str = ""  # folder or URL of the disk transport; empty: the run folder
