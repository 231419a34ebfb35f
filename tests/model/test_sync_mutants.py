"""Wrong rules must be caught by the same search that finds nothing wrong with the real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sync_mutants import MUTANTS, Mutant
from sync_search import search


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.kind.__name__)
def test_a_wrong_rule_is_caught(mutant: Mutant, figure: Callable[[str], None]) -> None:
    found = search(mutant.case, parts=mutant.parts, limit=20_000, every=7)
    how = found.violation or (f"{found.stuck} states from which nobody is served" if found.stuck else "")
    assert how, f"{mutant.kind.__name__} survived {found.line()}"
    assert mutant.words in how
    figure(f"caught after {found.states} states, {len(found.trace)} moves: {how}")


@pytest.mark.chaos
def test_the_right_rules_pass_the_cases_of_the_mutants() -> None:
    """What is caught above is the mutant, not the case."""
    for case in {mutant.case for mutant in MUTANTS}:
        found = search(case, limit=1500, every=7)
        assert not found.violation, (case, found.violation, found.trace)
