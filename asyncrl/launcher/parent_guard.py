"""Ties a command to the life of the launcher: `python -m asyncrl.launcher.parent_guard --parent PID -- command...`.

Guarantees (Linux):
1. the command gets SIGKILL when the thread that started it dies, from its first instruction on. Roles ask for the same,
   but only after seconds of imports, and foreign programs (torchrun) never do;
2. if the parent is dead already, the wrapper ends with code 1 and starts nothing;
3. the command replaces the wrapper (`exec`): same pid, same signals, same exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def guard_command(words: Sequence[str]) -> list[str]:
    """The command of a child that dies with this process."""
    return [sys.executable, "-m", "asyncrl.launcher.parent_guard", "--parent", str(os.getpid()), "--", *words]


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the command. Returns only on failure: 1 orphaned, 2 usage, 127 no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) < 4 or words[0] != "--parent" or words[2] != "--":
        print("usage: python -m asyncrl.launcher.parent_guard --parent PID -- command...", file=sys.stderr)
        return 2
    if not tie_to_parent(int(words[1])):
        return 1
    command = words[3:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error[internal] child: cannot start {command[0]}: {error}", file=sys.stderr)
        return 127


def tie_to_parent(parent: int) -> bool:
    """Ask the kernel for SIGKILL when the parent dies; False if it is dead already. Always True except on Linux."""
    if sys.platform != "linux":
        return True
    import ctypes
    import signal

    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 = PR_SET_PDEATHSIG, kept across exec
    return os.getppid() == parent if parent else os.getppid() != 1


if __name__ == "__main__":
    sys.exit(main())
