"""The state of a run while it goes on, and after it: `asyncrl status --json` and `asyncrl top`.

state     the published form of what the services say and the files hold (docs/status.schema.json)
source    asks the services and follows the files: the only part that touches anything
snapshot  one view of it all, pure
advice    rules from a snapshot to one line of advice, pure
render    a snapshot as plain lines, pure; `screen`: as a picture of the terminal
top       the loop of the command
"""
