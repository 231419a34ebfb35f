"""The interface of sandboxes: they run programs that a model wrote, and report how they ended.

Implementations: `producers.sandbox.bubblewrap` (isolated, on this host), `producers.sandbox.local` (no isolation) and
`producers.sandbox.remote` (a SandboxFusion server). Guarantees of all (tests/contract/test_sandboxes.py):
1. a program's failure is a result, never an exception: `finished` with its exit code, `timeout`, `memory`, `output`
   (more output than allowed), `killed` (by a signal; the exit code is its negative number) or `error` (for example
   files that do not fit);
2. an `AsyncRLError` is raised only if the sandbox itself cannot be used;
3. programs are isolated from each other; several threads may call at once.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from asyncrl.errors import ConfigError

MIB = 1 << 20


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Default limits of a program."""

    timeout_s: float = 10.0
    memory_bytes: int = 512 * MIB
    output_bytes: int = 1 * MIB  # of each stream, and of each file fetched
    disk_bytes: int = 64 * MIB
    max_processes: int = 32
    paths: tuple[str, ...] = ()  # folders that can be read and imported from


class SandboxJob(msgspec.Struct, frozen=True, kw_only=True):
    """One program and its input. None: the sandbox's limit."""

    code: str
    stdin: str = ""
    files: Mapping[str, bytes] = {}  # by relative name, in its working folder
    args: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()  # files to return
    timeout_s: float | None = None
    memory_bytes: int | None = None


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a program; `status` is listed in this module."""

    status: str
    exit_code: int = 0
    stdout: str = ""
    stderr: str = ""
    wall_s: float = 0.0
    files: Mapping[str, bytes] = {}
    state_lost: bool = False  # of a session: its process is gone

    @property
    def ok(self) -> bool:
        """It finished with exit code 0."""
        return self.status == "finished" and self.exit_code == 0


class SandboxSession(ABC):
    """Programs of one sample, in order: variables, imports and files stay. A shell keeps its folder and its files, a
    browser its page; its programs are calls in JSON (`producers.sandbox.browser_runner`)."""

    @abstractmethod
    def run(self, code: str, *, timeout_s: float | None = None) -> SandboxResult:
        """Run a program, or a command of the shell. The first one after a lost state begins anew."""

    @abstractmethod
    def close(self) -> None:
        """End its processes, also under a program that runs in another thread."""


class Sandbox(ABC):
    """Runs programs in Python. `run` and `run_many` block; `arun` and `arun_many` do the same on a thread."""

    at_once = 32  # programs, or sessions, that callers should run at once

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits or SandboxLimits()

    @abstractmethod
    def run_job(self, job: SandboxJob) -> SandboxResult:
        """Run one program to its end."""

    def open_session(self, *, shell: bool = False, pages: str = "") -> SandboxSession:
        """A session of Python, of a shell, or of a browser over the folder `pages`. Raises `sandbox.unavailable` if
        this kind has none."""
        raise ConfigError(
            "sandbox.unavailable",
            "this kind of sandbox keeps no state between programs",
            remedy="set sandbox.kind to bubblewrap, or do without the tools `shell` and `browser` and `keep_state`",
        )

    def probe(self) -> None:
        """Raise `sandbox.unavailable` if this host cannot isolate a program; a server is not contacted."""
        return

    def close(self) -> None:
        """End its processes."""
        return

    def run(
        self,
        code: str,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        *,
        timeout_s: float | None = None,
        memory_bytes: int | None = None,
        args: Sequence[str] = (),
        fetch: Sequence[str] = (),
    ) -> SandboxResult:
        """Run one program to its end."""
        return self.run_job(
            SandboxJob(
                code=code,
                stdin=stdin,
                files=dict(files or {}),
                args=tuple(args),
                fetch=tuple(fetch),
                timeout_s=timeout_s,
                memory_bytes=memory_bytes,
            )
        )

    def run_many(self, jobs: Sequence[SandboxJob]) -> list[SandboxResult]:
        """Run programs one after the other."""
        return [self.run_job(job) for job in jobs]

    async def arun(
        self, code: str, stdin: str = "", files: Mapping[str, bytes] | None = None, **options: Any
    ) -> SandboxResult:
        """`run` for an event loop, with the same options."""
        return await asyncio.to_thread(self.run, code, stdin, files, **options)  # bounded: by timeout_s

    async def arun_many(self, jobs: Sequence[SandboxJob]) -> list[SandboxResult]:
        """`run_many` for an event loop."""
        return await asyncio.to_thread(self.run_many, jobs)  # bounded: by their timeouts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_job(job: SandboxJob) -> SandboxJob:
    """The job, if its file names are inside the working folder. Raises `config.type`."""
    for name in (*job.files, *job.fetch):
        parts = name.split("/")
        if not name or name.startswith("/") or ".." in parts or "\0" in name or parts == ["main.py"]:
            message = f"a file of a sandbox is called {name!r}: give a relative name, other than main.py"
            raise ConfigError("config.type", message)
    return job
