"""`[sandbox]`: where programs that the model wrote run, for every reward and tool that runs some.

Part of `asyncrl.config`; `problems` lists what contradicts the rest of the file. See docs/sandbox.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.config.sections.base import Positive, Seconds, Section

if TYPE_CHECKING:
    from asyncrl.config import Config


class SandboxConfig(Section, frozen=True):
    """`[sandbox]`: where programs that the model wrote run."""

    kind: str = "bubblewrap"  # bubblewrap; http(s) address of a SandboxFusion server; none: unprotected
    timeout_s: Seconds = 10.0  # of one program, where its reward or tool says nothing else
    memory_bytes: Positive = 536870912  # of one program with all that it starts
    output_bytes: Positive = 1048576  # of each stream; more ends the program
    disk_bytes: Positive = 67108864  # of its folder, in memory
    max_processes: Positive = 32  # of one program
    paths: tuple[str, ...] = ()  # folders that programs can read and import from, such as a site-packages


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
    sandbox = config.sandbox
    if sandbox.kind not in ("bubblewrap", "none") and not sandbox.kind.startswith(("http://", "https://")):
        yield (
            "config.type",
            f"sandbox.kind = {sandbox.kind!r} is not bubblewrap, none or an http address",
            ("sandbox", "kind"),
        )
    for path in sandbox.paths:
        if not Path(path).is_absolute():
            yield "config.type", f"sandbox.paths: {path!r} is not an absolute path", ("sandbox", "paths")
    own = {judge.name: judge.timeout_s for judge in config.judge}
    for index, reward in enumerate(config.reward):
        limit_s = own.get(reward.judge) or config.reward_workers.timeout_s
        asked = reward.args.get("timeout_s")
        program_s = asked if isinstance(asked, int | float) else sandbox.timeout_s
        if reward.function == "builtin:code" and program_s >= limit_s:
            message = (
                f"a program may take {program_s:g} s and its call {limit_s:g} s: an endless program would be a failed "
                "reward and no 0; lower sandbox.timeout_s or raise reward_workers.timeout_s"
            )
            yield "config.conflict", message, ("reward", f"[{index}]")
