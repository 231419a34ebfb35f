"""The state of a run during and after it: `asyncrl status --json` and `asyncrl top`.

status_schema  the published form of the services' answers and the files (docs/status.schema.json)
source         asks the services and follows the files: the only module with side effects
snapshot       one view of both, pure
advice         rules from a snapshot to one line of advice, pure
plain, screen  a snapshot as plain lines, or drawn on a terminal, pure
top            the loop of the command
"""
