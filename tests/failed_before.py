"""How many tests failed in the last run here: exit code 1 where it is none, more than can be an accident, or where that
run was ended before all tests had their turn.
"""

import argparse
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".pytest_cache"
CACHE, ENDED = FOLDER / "v" / "cache" / "lastfailed", FOLDER / "ended"
FAILED = "1"  # pytest's exit code where every test was run and some failed


def main() -> int:
    """Print them; 0 where they may be run again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-most", type=int, required=True, metavar="N")
    limit = parser.parse_args().at_most
    failed = sorted(json.loads(CACHE.read_text())) if CACHE.exists() else []
    ended = ENDED.read_text().strip() if ENDED.exists() else "nothing"
    if ended != FAILED:
        print(f"the last run ended with {ended}: not all tests had their turn")
        return 1
    print(f"{len(failed)} failed; they are run once more, alone:", *failed, sep="\n  ")
    return 0 if 0 < len(failed) <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
