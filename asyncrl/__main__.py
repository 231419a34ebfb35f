"""`python -m asyncrl`: the command `asyncrl`."""

import sys

from asyncrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
