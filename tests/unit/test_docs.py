"""The generated reference pages agree with the code; links of the documentation lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

from asyncrl import cli, config, errors, metrics

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


def test_every_command_and_option_says_what_it_is() -> None:
    commands = generate.subcommands(cli.parser())
    assert len(commands) >= 16
    for name, (one, text) in commands.items():
        assert text and f"asyncrl {name}" in (one.epilog or ""), f"{name}: give it an example"
        silent = [generate.argument(action) for action in one._actions if not action.help]
        assert silent == [], name


def test_every_code_metric_and_setting_stands_in_its_page() -> None:
    pages = {name: (ROOT / "docs" / name).read_text() for name in ("errors.md", "metrics.md", "configuration.md")}
    assert [code for code in errors.CATALOGUE if f"| `{code}` |" not in pages["errors.md"]] == []
    assert [code for code in errors.CATALOGUE if f"\n## `{code}`: " not in pages["errors.md"]] == []
    assert [name for name in metrics.CATALOGUE if f"| `{name}` |" not in pages["metrics.md"]] == []
    assert [key for key in config.all_keys() if f"| `{key}` |" not in pages["configuration.md"]] == []


def test_links_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
