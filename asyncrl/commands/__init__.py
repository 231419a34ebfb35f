"""The commands of `asyncrl`, a module for each kind; called by `asyncrl.cli`.

A module has `add(commands)`, which declares its commands, and one function per command that imports what it needs when
it runs: `--help` and the shell's completion stay fast. Guarantee: nothing but the standard library is imported here.
"""

#: In the order of `asyncrl --help`.
MODULES = (
    "launch",
    "configure",
    "keys",
    "top",
    "monitor",
    "runs",
    "results",
    "metrics",
    "author_tools",
    "doctor",
    "environments",
    "planner",
)
