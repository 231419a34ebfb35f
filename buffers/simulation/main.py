"""The process behind `asyncrl plan`: a request on stdin, forecasts on stdout, both JSON.

Started as `python -m buffers.simulation.main` by `asyncrl.planner.forecast`, which knows nothing of the state
machine. Guarantee:
one forecast per scenario, in their order; nothing is read or written but the two streams.
"""

from __future__ import annotations

import sys

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.planner.model import Request
from buffers.simulation.simulation import play


def main() -> int:
    """Entry point of the process."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        forecasts = [play(request.plant, scenario) for scenario in request.scenarios]
    except AsyncRLError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    sys.stdout.buffer.write(msgspec.json.encode(forecasts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
