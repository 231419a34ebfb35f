"""`[sandbox]`: where programs that the model wrote run (docs/sandbox.md)."""

from __future__ import annotations

from asyncrl.config.sections.base import Positive, Seconds, Section


class SandboxConfig(Section, frozen=True):
    """`[sandbox]`: where programs that the model wrote run."""

    kind: str = "bubblewrap"  # bubblewrap; http(s) address of a SandboxFusion server; none: unprotected
    timeout_s: Seconds = 10.0  # of one program, unless its reward or tool sets another
    memory_bytes: Positive = 536870912  # of one program with all its processes
    output_bytes: Positive = 1048576  # of each stream; more ends the program
    disk_bytes: Positive = 67108864  # of its folder, in memory
    max_processes: Positive = 32  # of one program
    paths: tuple[str, ...] = ()  # folders that programs can read and import from, such as site-packages
