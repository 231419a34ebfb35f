"""The commands of `asyncrl`, a module for each kind.

A module declares its commands with `add...(commands)`; each command is a function that imports what it needs when it
runs, so `--help` and the completion of the shell stay fast. Guarantee: only the standard library is imported here.
"""

#: (module, function) in the order of `asyncrl --help`.
COMMANDS = (
    ("launch", "add"),
    ("configure", "add"),
    ("machine", "add_keys"),
    ("monitor", "add_top"),
    ("monitor", "add"),
    ("runs", "add"),
    ("runs", "add_results"),
    ("monitor", "add_metrics"),
    ("authoring", "add"),
    ("machine", "add_doctor"),
    ("authoring", "add_environments"),
    ("planner", "add"),
)
