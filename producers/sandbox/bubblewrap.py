"""Programs on this host, isolated by bubblewrap.

What it gives a program:
1. namespaces of its own (user or an unprivileged uid, pid, network, IPC, UTS, cgroup): no network, no other process;
2. a read-only root with the interpreter, its library and the C library, and nothing else of the host (a shell has
   its commands too; a browser its program, fonts and pages): no home, no run folder, no keys; /tmp of `disk_bytes`, in
   memory; /dev and / cannot be written;
3. no capability, no new privileges, a filter of system calls (`producers.sandbox.seccomp`), a session of its own;
4. limits for each process (memory, CPU time, file size, open files, no core) and for the whole (processes, resident
   memory, checked every `LOOK_S`), a wall clock, and a cap on its output;
5. it dies with the process that started it.
If this is not possible, nothing runs: `sandbox.unavailable`.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.runtime.child_environment import child_environment
from producers.sandbox import seccomp
from producers.sandbox.base import SandboxLimits, SandboxSession
from producers.sandbox.chromium import FONTS, find_chromium
from producers.sandbox.local import LocalSandbox
from producers.sandbox.process import BROWSER, ENVIRONMENT, FLAGS, RUNNER, SESSION, spawn

NEEDED_CAPABILITIES = (1 << 21) | (1 << 7) | (1 << 6)  # SYS_ADMIN, SETUID, SETGID
FIRST_UID, UIDS = 30_000, 30_000  # a sandbox that root starts takes one of these
INNER = "/sandbox"  # the folder of our files in the sandbox
COMMANDS = ("/bin", "/usr/bin")  # of the host, for a shell
_numbers = itertools.count()


class Bubblewrap(LocalSandbox):
    _readable = ""  # pages that the browser can read

    @property
    def is_isolated(self) -> bool:
        return True

    def open_session(self, *, shell: bool = False, pages: str = "") -> SandboxSession:
        session = super().open_session(shell=shell, pages=pages)
        if pages not in ("", self._readable) and is_privileged():
            _check_readable(Path(pages))
            self._readable = pages
        return session

    def start(self, script: Path = RUNNER, *, shell: bool = False, pages: str = "") -> subprocess.Popen[bytes]:
        """Raises `sandbox.unavailable` without bubblewrap."""
        found = shutil.which("bwrap")
        if sys.platform != "linux" or found is None:
            raise ConfigError("sandbox.unavailable", "bubblewrap (bwrap) is not on the PATH")
        number = (os.getpid() * 16 + next(_numbers)) % UIDS
        uid = FIRST_UID + number if is_privileged() else 0
        settings = {
            "uid": uid,
            "gid": uid,
            "folder": "/tmp",
            "max_processes": self.limits.max_processes,
            "paths": self.limits.paths,
            "file_bytes": self.limits.disk_bytes,
            "browser": find_chromium() if pages else "",
        }
        filters = os.memfd_create("filter", 0) if seccomp.program() else -1
        try:
            extra = []
            if filters >= 0:
                os.write(filters, seccomp.program())
                os.lseek(filters, 0, os.SEEK_SET)
                extra = ["--seccomp", str(filters)]
            command = [
                found,
                *arguments(self.limits, as_root=bool(uid), shell=shell, pages=pages),
                *extra,
                "--",
                interpreter(),
                *FLAGS,
                f"{INNER}/{script.name}",
                json.dumps(settings),
            ]
            return spawn(command, env=child_environment(), keep=(filters,) if filters >= 0 else ())
        finally:
            if filters >= 0:
                os.close(filters)


def is_privileged() -> bool:
    """Whether this process can make namespaces as root and drop root inside them."""
    if os.geteuid() != 0:
        return False
    status = Path("/proc/self/status").read_text()
    held = int(status.partition("CapEff:")[2].split()[0], 16)
    return held & NEEDED_CAPABILITIES == NEEDED_CAPABILITIES


def _check_readable(folder: Path) -> None:
    """Raises `sandbox.unavailable` for a file or folder that other users cannot read: the browser is one of them."""
    for place in (folder, *folder.rglob("*")):
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:  # it is gone, or a link that leads nowhere
            continue
        needed = 0o005 if stat.S_ISDIR(mode) else 0o004
        if mode & needed != needed:
            raise ConfigError(
                "sandbox.unavailable",
                "the browser runs as another user, who may not read it",
                where=str(place),
                remedy=f"chmod -R o+rX {shlex.quote(str(folder))}",
            )


def interpreter() -> str:
    """The interpreter itself, not the link of a virtual environment."""
    return os.path.realpath(sys.executable)


def arguments(limits: SandboxLimits, *, as_root: bool, shell: bool, pages: str = "") -> list[str]:
    """Arguments of bubblewrap. Root uses no user namespace: an unprivileged uid of the host bounds its processes."""
    isolate = [
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
        "--cap-drop",
        "ALL",
        "--cap-add",
        "CAP_SETUID",
        "--cap-add",
        "CAP_SETGID",
    ]
    if not as_root:
        isolate = ["--unshare-all", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    result = [*isolate, "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv"]
    libraries = os.pathsep.join(sorted({str(Path(interpreter()).parents[1] / "lib")}))
    for name, value in {**ENVIRONMENT, "LD_LIBRARY_PATH": libraries}.items():
        result += ["--setenv", name, value]
    result += ["--perms", "0755", "--dir", "/usr"]  # else its folders are closed to the user inside
    for place in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", *(COMMANDS if shell else ())):
        if os.path.islink(place):
            result += ["--symlink", os.readlink(place), place]
        elif os.path.exists(place):
            result += ["--ro-bind", place, place]
    places = [*interpreter_paths(), *limits.paths]
    if pages:
        places += [place for place in (*FONTS, str(Path(find_chromium()).parent)) if os.path.exists(place)]
        places = [place for place in places if not place.startswith("/usr/lib/")]  # it is there
    for folder in sorted({str(parent) for place in places for parent in Path(place).parents} - {"/", "/usr"}):
        result += ["--perms", "0755", "--dir", folder]
    for place in places:
        result += ["--ro-bind", place, place]
    result += ["--perms", "0755", "--dir", INNER]
    for own in (RUNNER, SESSION, BROWSER):
        result += ["--ro-bind", str(own), f"{INNER}/{own.name}"]
    result += ["--ro-bind", pages, f"{INNER}/pages"] if pages else []
    result += ["--proc", "/proc", "--dev", "/dev"]
    result += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
    return [*result, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


def interpreter_paths() -> list[str]:
    """The interpreter and its standard library."""
    paths = {interpreter()}
    for name in ("stdlib", "platstdlib"):
        paths.add(sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix}))
    library = Path(interpreter()).parents[1] / "lib"
    if str(library) not in ("/lib", "/usr/lib") and library.is_dir():
        paths.add(str(library))
    return sorted(path for path in paths if not path.startswith(("/lib/", "/usr/lib/")))
