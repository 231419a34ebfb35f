"""`[run]`, `[network]`, `[log]` and `[service]`: the run itself, where its services listen, and what it writes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from asyncrl.config.sections.base import Count, Positive, Seconds, Section


class RunConfig(Section, frozen=True):
    """`[run]`: the run itself."""

    name: str = "run"  # shown in reports; part of the run's identity
    dir: str = "runs/run"  # folder of everything the run writes; a launch in the same folder resumes the run
    seed: int = 0  # seed of the order of prompts and of sampling
    silent_timeout_s: Seconds = 10.0  # report a process without a sign of life for this long (nothing is stopped)
    hang_timeout_s: Seconds = 600.0  # no step for this long ends the run with a diagnosis (exit code 70)
    start_timeout_s: Seconds = 600.0  # from a learner's start to its first step, if that is longer
    policy: str = ""  # with several policies: the one that this run trains, a table of [policies]
    other_policies: dict[str, str] = field(default_factory=dict)  # folders of the others' runs, made from [policies]


class NetworkConfig(Section, frozen=True):
    """`[network]`: where services listen."""

    buffer: str = "auto"  # auto: ipc in the run folder; else tcp://host:port
    standby: str = ""  # tcp://host:port where a second buffer takes over; see docs/standby.md
    weightsync: str = "auto"  # like buffer
    key_file: str = ""  # CURVE keys; required beyond loopback; created if missing
    insecure_no_auth: bool = False  # listen beyond loopback without keys
    max_message_bytes: Positive = 256 << 20  # refuse larger messages
    request_timeout_s: Seconds = 60.0  # a service that does not answer for this long is unreachable


class LogConfig(Section, frozen=True):
    """`[log]`: what the run writes."""

    tensorboard: bool = True  # TensorBoard files in the run folder
    samples_per_step: Count = 2  # samples kept for the report
    heartbeat_s: Seconds = 1.0  # interval of the workers' heartbeats
    archive: bool = False  # keep the batch of every step for trace and replay: about 8 bytes per token, never removed
    sign: bool = False  # sign the history's chain with network.key_file: only its holders can write or check one


class ServiceConfig(Section, frozen=True):
    """`[service]`: a training service; see docs/training-service.md."""

    host: str = "127.0.0.1"  # address of the HTTP endpoint; beyond this host put TLS in front of it
    port: Annotated[int, Meta(ge=0, le=65535)] = 0  # its port; 0: this file is no training service
    max_models: Positive = 16  # adapters held in memory; the others are read again from the run folder
