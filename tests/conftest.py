"""Figures that a test measured (schedules, states, faults, recovery times) stand at the end of the run's output."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub; tests/e2e/test_hub.py has one of its own


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cases FILE`: worked numbers for test_reference_cases instead of the file that ships; `--figures FILE`: keep
    the figures in a file too (`make chaos`).
    """
    parser.addoption("--cases", metavar="FILE", help="case file of tests/unit/test_reference_cases.py")
    parser.addoption("--figures", metavar="FILE", help="write the figures that tests measured to this file too")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m "long and ..."` imports only files with such a test: the others take half a minute in every process."""
    if not config.option.markexpr.startswith("long and") or not collection_path.match("test_*.py"):
        return None
    return True if "mark.long" not in collection_path.read_text() else None


#: Folders whose tests compute, and those whose tests wait (for deadlines, for processes): their files take turns, so
#: that the workers do not all do the same; the short ones come last, so that no worker begins a long one at the end.
COMPUTE, WAIT = ("e2e", "engines", "distributed", "simulator", "model"), ("faults", "contract")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by file (`make test` hands out whole files in this order), and mark the cases that other targets run."""
    for item in items:
        if _is_long_case(item):
            item.add_marker(pytest.mark.long)
        if _is_named(item, "chaos_cases"):
            item.add_marker(pytest.mark.chaos)
    files = {item.path: None for item in items}
    compute, wait = ([path for path in files if path.parent.name in names] for names in (COMPUTE, WAIT))
    turns = itertools.chain.from_iterable(itertools.zip_longest(compute, wait))
    order = {path: number for number, path in enumerate(path for path in turns if path is not None)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def _is_long_case(item: pytest.Item) -> bool:
    """By `long_cases(pattern, ...)` or `long_except(pattern, ...)` over the id of a parametrized case."""
    excepted = any(item.iter_markers("long_except"))
    return _is_named(item, "long_cases") or (excepted and not _is_named(item, "long_except"))


def _is_named(item: pytest.Item, marker: str) -> bool:
    """Whether a pattern of the marker fits the id of the case."""
    case = getattr(getattr(item, "callspec", None), "id", "")
    return any(fnmatch(case, pattern) for mark in item.iter_markers(marker) for pattern in mark.args)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Commands that a test ran in this process make files private from then on: not so in the next test."""
    os.umask(0o022)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`figure("20000 schedules, 0 lost")`: one line under the test's name in the summary, also with workers."""

    def note(text: str) -> None:
        print(text)
        request.node.user_properties.append(("figure", text))

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures by test."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    found = [
        (report.nodeid, text)
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, text in report.user_properties
        if name == "figure"
    ]
    if not found:
        return
    terminalreporter.section("figures")
    lines, last = [], ""
    for nodeid, text in sorted(found, key=lambda pair: pair[0]):
        if nodeid != last:
            lines.append(nodeid)
        last = nodeid
        lines += [f"  {line}" for line in str(text).splitlines()]
    for line in lines:
        terminalreporter.write_line(line)
    if place := terminalreporter.config.getoption("--figures"):
        Path(place).write_text("\n".join(lines) + "\n")
