"""`[run]`, `[network]` and `[log]`: the run itself, where its services listen, and what it writes."""

from __future__ import annotations

from asyncrl.config.sections.base import Count, Positive, Seconds, Section


class RunConfig(Section, frozen=True):
    """`[run]`: the run itself."""

    name: str = "run"  # shown in reports; part of the run's identity
    dir: str = "runs/run"  # everything the run writes; the same folder again resumes it
    seed: int = 0  # of the order of prompts and of sampling
    silent_timeout_s: Seconds = 10.0  # a process without a sign of life for this long is named (nothing is ended)
    hang_timeout_s: Seconds = 600.0  # no step for this long ends the run with a diagnosis (exit code 70)
    start_timeout_s: Seconds = 600.0  # from a learner's start to its first step, where that is longer


class NetworkConfig(Section, frozen=True):
    """`[network]`: where services listen."""

    buffer: str = "auto"  # auto: ipc in the run folder; else tcp://host:port
    weightsync: str = "auto"  # like buffer
    key_file: str = ""  # CURVE keys; needed beyond loopback; made if missing
    insecure_no_auth: bool = False  # listen beyond loopback without keys
    max_message_bytes: Positive = 256 << 20  # larger messages are refused
    request_timeout_s: Seconds = 60.0  # a service that does not answer for this long is unreachable


class LogConfig(Section, frozen=True):
    """`[log]`: what is written."""

    tensorboard: bool = True  # curves in the run folder
    samples_per_step: Count = 2  # kept for the report
    heartbeat_s: Seconds = 1.0  # how often workers report
    archive: bool = False  # keep the batch of every step, for trace and replay: about 8 bytes per token, never removed
