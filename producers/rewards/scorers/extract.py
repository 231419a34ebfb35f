"""Finds fenced blocks and text between two marks in a response. Pure.

Guarantee: time is linear in the length of the text; a pattern that searches an end for every beginning is quadratic.
"""

from __future__ import annotations

import re
from collections.abc import Collection

#: Possessive: a long line that is no opening is gone through once. `print` between such marks in a line opens nothing.
FENCE = re.compile(r"```(?:([\w+#.-]++)[^\n`]*+|[ \t]*+)\n(.*?)(```|\Z)", re.DOTALL)


def find_fenced(text: str, languages: Collection[str]) -> str | None:
    """The last fenced block in one of these languages (lower case); else the last one of no language; else None.

    Blocks of other languages are skipped with their ends. The last block may be open if it has a language.

    >>> find_fenced("```python\\nprint(1)\\n```\\nIt prints:\\n```\\n1\\n```", {"python"})
    'print(1)\\n'
    """
    blocks: list[tuple[str, str]] = [(name.lower(), block) for name, block, end in FENCE.findall(text) if name or end]
    for wanted in (languages, ("",)):
        found = [block for name, block in blocks if name in wanted]
        if found:
            return found[-1]
    return None


def find_between(text: str, start: str, end: str) -> list[str]:
    """The text between `start` and the next `end`, from the left.

    >>> find_between("<a>1</a> <a><a>2</a> <a>", "<a>", "</a>")
    ['1', '<a>2']
    """
    found, at = [], 0
    while (begin := text.find(start, at)) >= 0 and (stop := text.find(end, begin + len(start))) >= 0:
        found.append(text[begin + len(start) : stop])
        at = stop + len(end)
    return found
