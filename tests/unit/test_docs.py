"""The generated reference pages agree with the code; links of the documentation lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
assert spec is not None and spec.loader is not None
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.mark.parametrize("page", sorted(generate.PAGES))
def test_reference_pages_are_current(page: str) -> None:
    assert (ROOT / "docs" / page).read_text() == generate.PAGES[page](), "run `make docs`"


def test_every_setting_has_a_meaning() -> None:
    text = generate.configuration()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    empty = [row for row in rows if row.rstrip(" |").count("|") < 4]
    assert len(rows) > 80
    assert empty == []


def test_links_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
