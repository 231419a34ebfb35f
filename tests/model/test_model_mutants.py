"""Wrong rules must be caught by the same search that finds nothing wrong with the real ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from model_mutants import MUTANTS, PAIRS, Mutant, combine
from model_search import Found, search

from buffers.groups.machine import Parts


def caught(found: Found) -> str:
    """How the search saw it; the empty string where it did not."""
    if found.violation:
        return found.violation
    return f"{found.stuck} states from which no completion is reachable" if found.stuck else ""


def name_pair(pair: tuple[dict[str, tuple[type, ...]], object]) -> str:
    return "+".join(kind.__name__ for kinds in pair[0].values() for kind in kinds)


@pytest.mark.chaos_cases("CheckpointsWithoutRoom")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_rule_is_caught(mutant: Mutant, figure: Callable[[str], None]) -> None:
    found = search(mutant.case, parts=Parts(**mutant.parts), limit=20_000)
    how = caught(found)
    assert how, f"{mutant.name} survived {found.line()}"
    assert mutant.words in how
    figure(f"caught after {found.states} states, {len(found.trace)} transitions: {how}")


@pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: "+".join(kind.__name__ for kinds in pair[0].values() for kind in kinds)
)
def test_two_wrong_rules_do_not_hide_each_other(pair: tuple, figure: Callable[[str], None]) -> None:  # type: ignore[type-arg]
    wrong, case = pair
    found = search(case, parts=combine(wrong), limit=20_000)
    assert caught(found)
    figure(f"caught after {found.states} states: {caught(found)}")


@pytest.mark.chaos
def test_the_right_rules_pass_the_cases_of_the_mutants() -> None:
    """What is caught above is the mutant, not the case."""
    for case in {mutant.case for mutant in MUTANTS} | {case for _, case in PAIRS}:
        found = search(case, limit=500)
        assert not caught(found), (case, caught(found))
