"""Links of the site: what lies beside docs/ (results files, configurations, tests) is named by its path instead.

In a checkout the links lead there; the site does not hold these files.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")


def named(text: str, *, page: str) -> str:
    """`[e2e.json](../benchmarks/results/e2e.json)` becomes "e2e.json (`benchmarks/results/e2e.json`)"."""
    depth = page.count("/") + 1  # of `..` that lead out of docs/

    def replace(found: re.Match[str]) -> str:
        label, target = found.groups()
        ups = found.group(0).partition("](")[2].count("../")
        if ups < depth:
            return found.group(0)
        return label if target.strip("/") in label else f"{label} (`{target}`)"

    return OUTSIDE.sub(replace, text)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """mkdocs asks for each page."""
    return named(markdown, page=page.file.src_uri)
