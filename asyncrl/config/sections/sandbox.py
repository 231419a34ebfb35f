"""`[sandbox]`: where programs that the model wrote run, for every reward and tool that runs some.

Part of `asyncrl.config`; `problems` lists what contradicts the rest of the file. See docs/sandbox.md.
"""

from __future__ import annotations

from asyncrl.config.sections.base import Positive, Seconds, Section


class SandboxConfig(Section, frozen=True):
    """`[sandbox]`: where programs that the model wrote run."""

    kind: str = "bubblewrap"  # bubblewrap; http(s) address of a SandboxFusion server; none: unprotected
    timeout_s: Seconds = 10.0  # of one program, where its reward or tool says nothing else
    memory_bytes: Positive = 536870912  # of one program with all that it starts
    output_bytes: Positive = 1048576  # of each stream; more ends the program
    disk_bytes: Positive = 67108864  # of its folder, in memory
    max_processes: Positive = 32  # of one program
    paths: tuple[str, ...] = ()  # folders that programs can read and import from, such as a site-packages
