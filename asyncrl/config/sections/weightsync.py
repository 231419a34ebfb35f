"""`[weightsync]`: how new weights reach the generators."""

from __future__ import annotations

from typing import Literal

from asyncrl.config.sections.base import Count, Positive, Seconds, Section

SentDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]


class WeightSyncConfig(Section, frozen=True):
    """`[weightsync]`: how new weights reach the generators."""

    transport: Literal["auto", "local", "collective", "stream", "disk", "direct"] = "auto"  # auto: by members' places
    encoding: Literal["full", "delta"] = "full"  # delta: send only changed elements to members with a recent version
    delta_chain: Count = 4  # consecutive deltas kept for members that are behind; beyond that, full weights
    dtype: SentDtype = "auto"  # cast before sending; int8, fp8: matrices alone, with scales; auto: model.dtype
    in_place: bool = False  # engines without memory for a second copy: they pause from the first byte on
    bucket_bytes: Positive = 64 << 20  # size of the pieces of the weights
    timeout_s: Seconds = 30.0  # of a round, for one member; a second more for every GiB of weights
    member_timeout_s: Seconds = 20.0  # a member that is silent for this long is dead
    collective_host: str = "127.0.0.1"  # address of this host for the Gloo / NCCL rendezvous
    collective_backend: Literal["auto", "gloo", "nccl", "hccl"] = "auto"  # auto: by the devices of both ends
    stream_host: str = "127.0.0.1"  # address of this host for members that pull versions
    stream_chunk_bytes: Positive = 4 << 20  # of one answer; four are requested ahead
    relay_fanout: Count = 2  # simultaneous pulls from one source; members relay versions; 0: no relays
    disk_dir: str = ""  # folder or URL of the disk transport; empty: the run folder

    @property
    def quantised(self) -> str:
        """`int8` or `fp8`: matrices are sent in 8 bits (`weightsync.encoding.quantised`); empty: they are not."""
        return self.dtype if self.dtype in ("int8", "fp8") else ""
