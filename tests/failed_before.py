"""How many tests failed in the last run of pytest here: exit code 1 where it is none, or more than can be an accident.

Called by `make test-again`.
"""

import argparse
import json
import sys
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".pytest_cache" / "v" / "cache" / "lastfailed"


def main() -> int:
    """Print them; 0 where they may be run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-most", type=int, required=True, metavar="N")
    limit = parser.parse_args().at_most
    failed = sorted(json.loads(CACHE.read_text())) if CACHE.exists() else []
    print(f"{len(failed)} failed; they are run once more, alone:", *failed, sep="\n  ")
    return 0 if 0 < len(failed) <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
