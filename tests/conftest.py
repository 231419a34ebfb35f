"""Figures that a test measured (schedules, states, faults, recovery times) stand at the end of the run's output."""

from __future__ import annotations

from collections.abc import Callable

import pytest


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
    last = ""
    for nodeid, text in sorted(found, key=lambda pair: pair[0]):
        if nodeid != last:
            terminalreporter.write_line(nodeid)
        last = nodeid
        for line in str(text).splitlines():
            terminalreporter.write_line(f"  {line}")
