"""The documentation as a site: every page in its navigation, nothing fetched, links that leave docs/ become paths."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config import all_keys

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("site_links", ROOT / "docs" / "site_links.py")
assert spec is not None and spec.loader is not None
site_links = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_links)


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r"([\w/-]+\.md)", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert named == pages


def test_links_that_leave_the_docs_are_named_by_their_path() -> None:
    text = "see [e2e.json](../benchmarks/results/e2e.json), [here](../README.md#figures) and [pages](rewards.md)"
    assert site_links.named(text, page="index.md") == (
        "see e2e.json (`benchmarks/results/e2e.json`), here (`README.md`) and [pages](rewards.md)"
    )
    inside = "[wire](../wire.md) and [file](../../configs/sft.toml)"
    assert site_links.named(inside, page="adr/0001.md") == "[wire](../wire.md) and file (`configs/sft.toml`)"


@pytest.mark.timeout(300)
def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "mkdocs.yml", "-d", str(tmp_path)]
    env = {"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "index.html").read_text()
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:href|src)=\"?(?:https?:)?//", page)
    assert "Every prompt is accounted for" in page


def keys_of(cell: str) -> list[str]:
    """Settings in a cell of a table; `.x` after `a.b.c` is `a.b.x`."""
    found: list[str] = []
    for word in re.findall(r"`([^`]+)`", cell):
        key = word.replace("[[reward]] ", "reward.").split(" ")[0].split("=")[0]
        key = f"{found[-1].rpartition('.')[0]}{key}" if key.startswith(".") and found else key
        if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+", key):
            found.append(key)
    return found


@pytest.mark.parametrize("page", ["coming-from.md", "tune-staleness.md", "debug-a-hang.md", "ascend.md"])
def test_settings_that_these_pages_name_exist(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    cells = [row.split("|")[2] for row in text.splitlines() if row.startswith("| ") and row.count("|") == 3]
    if page != "coming-from.md":
        cells = [text]
    known, tops = set(all_keys()), {key.partition(".")[0] for key in all_keys()}
    named = [key for cell in cells for key in keys_of(cell) if key.partition(".")[0] in tops]
    assert len(named) > 2
    unknown = [key for key in named if key not in known and not any(one.startswith(f"{key}.") for one in known)]
    assert unknown == []
