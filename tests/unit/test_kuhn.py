"""The exact values of Kuhn poker in examples/kuhn, against Kuhn (1950)."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("kuhn", Path(__file__).parents[2] / "examples/kuhn/kuhn.py")
assert SPEC is not None and SPEC.loader is not None
kuhn = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(kuhn)


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 7), Fraction(1, 3)])
def test_no_player_gains_against_an_equilibrium(alpha: Fraction) -> None:
    first, second = kuhn.equilibrium(alpha)
    assert kuhn.value(first, second) == kuhn.VALUE == Fraction(-1, 18)
    assert kuhn.best_response(0, second) == Fraction(-1, 18)
    assert kuhn.best_response(1, first) == Fraction(1, 18)
    assert kuhn.exploitability(first, second) == 0


def test_a_jack_that_bets_too_often_is_exploited() -> None:
    first, second = kuhn.equilibrium(Fraction(1, 3))
    assert kuhn.exploitability({**first, ("J", ""): Fraction(1, 2)}, second) > 0


def test_random_and_passive_play() -> None:
    random = [dict.fromkeys(kuhn.information_sets(seat), Fraction(1, 2)) for seat in (0, 1)]
    assert (kuhn.value(*random), kuhn.exploitability(*random)) == (Fraction(1, 8), Fraction(11, 12))
    passive = [dict.fromkeys(kuhn.information_sets(seat), 0) for seat in (0, 1)]
    assert kuhn.exploitability(*passive) == 2 * Fraction(1, 1)


def test_payoffs() -> None:
    found = {history: (kuhn.payoff("KQ", history), kuhn.payoff("JQ", history)) for history in kuhn.ENDS}
    assert found == {"pp": (1, -1), "bp": (1, 1), "bb": (2, -2), "pbp": (-1, -1), "pbb": (2, -2)}


def test_an_average_weighs_by_reach() -> None:
    """A strategy that always bets never comes to its second decision, so it does not count there."""
    places = kuhn.information_sets(0)
    bets, passes = dict.fromkeys(places, 1), {place: int(place[1] == "pb") for place in places}
    mean = kuhn.average(0, [bets, {**passes, ("J", "pb"): 0}])
    assert mean["J", ""] == Fraction(1, 2) and mean["J", "pb"] == 0 and mean["K", "pb"] == 1


def test_each_player_sees_its_own_card() -> None:
    assert [row["prompt"] for row in kuhn.rows(1)] == ["2Q:", "2K:", "2J:", "2K:", "2J:", "2Q:"]
    assert kuhn.contexts(0) == ["1J:", "1Q:", "1K:", "1J:pb", "1Q:pb", "1K:pb"]
    assert kuhn.contexts(1) == ["2J:p", "2Q:p", "2K:p", "2J:b", "2Q:b", "2K:b"]
