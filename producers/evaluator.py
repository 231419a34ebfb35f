"""The evaluator process: a producer that generates held-out prompts alone (`evaluation.lane = "evaluators"`).

Run as `python -m producers.evaluator --config RESOLVED.toml --name NAME [--connect URL --key FILE]`, with a key of the
role producer. It takes new weights only for an evaluation, so training is disturbed by neither.
"""

from __future__ import annotations

import sys
from functools import partial

from asyncrl.runtime import role
from producers.main import body


def main() -> int:
    return role.run("evaluator", partial(body, evaluates=True))


if __name__ == "__main__":
    sys.exit(main())
