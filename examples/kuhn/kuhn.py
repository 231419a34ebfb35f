"""Kuhn poker for two policies: the game as an environment, its rows, and exact values of strategies.

Three cards J < Q < K, one for each player; each pays 1 into the pot. Moves are `p` (pass) and `b` (bet 1 more, or
call). The histories and what the first player wins: `pp` and `bb`, `pbb` a showdown for 1 or 2, `bp` 1, `pbp` -1.
Another answer than `p` or `b` counts as `p` and costs the player `ILLEGAL`. The value of the game for the first player
is -1/18.

`python examples/kuhn/kuhn.py FOLDER` writes two tiny models, which play at random, and the deals of both players.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

CARDS = "JQK"
SEATS = ("first", "second")  # the names of the policies
MOVES = "pb"
ENDS = ("pp", "bp", "bb", "pbp", "pbb")
DECISIONS = (("", "pb"), ("p", "b"))  # histories at which each player moves
ILLEGAL = 1
WARM_STEPS = 60
CHARACTERS = f"12:{CARDS}{MOVES}"
VALUE = Fraction(-1, 18)

#: Probability of `b` at an information set: (card, history). The other move is `p`.
Strategy = Mapping[tuple[str, str], Any]


# ---------------------------------------------------------------- the environment


async def play(chat: Any, row: Mapping[str, Any]) -> float:
    """One game of the deal `row["cards"]`; what the trained policy wins."""
    players = [chat if name == chat.policy else chat.other(name) for name in SEATS]
    for seat, player in enumerate(players):
        if player is not chat:  # the row's prompt shows the trained policy its card
            player.show(prompt(seat, row["cards"][seat]))
    history, shown, illegal = "", [0, 0], 0
    while history not in ENDS:
        seat = len(history) % 2
        turn = await players[seat].say(history[shown[seat] :] or None, max_new_tokens=1)
        shown[seat] = len(history) + 1
        legal = turn.text in tuple(MOVES)
        illegal += players[seat] is chat and not legal
        history += turn.text if legal else "p"
    won = payoff(row["cards"], history)
    return float((won if players[0] is chat else -won) - ILLEGAL * illegal)


def prompt(seat: int, card: str) -> str:
    """What a player sees before its first move, but the other's moves: `2Q:`."""
    return f"{seat + 1}{card}:"


def rows(seat: int) -> list[dict[str, Any]]:
    """The six deals, from the place of one player."""
    deals = ["".join(deal) for deal in permutations(CARDS, 2)]
    return [{"prompt": prompt(seat, deal[seat]), "cards": deal, "data_source": "kuhn"} for deal in deals]


# ---------------------------------------------------------------- exact values


def payoff(cards: str, history: str) -> int:
    """What the first player wins at the end of a game."""
    if history in ("bp", "pbp"):  # the pass gives up
        return 1 if history == "bp" else -1
    stake = 2 if history.endswith("bb") else 1
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def value(first: Strategy, second: Strategy) -> Any:
    """What the first player wins on average, over all deals and moves."""
    deals = list(permutations(CARDS, 2))
    return sum(_play_on("".join(deal), "", (first, second)) for deal in deals) / len(deals)


def _play_on(cards: str, history: str, players: tuple[Strategy, Strategy]) -> Any:
    if history in ENDS:
        return Fraction(payoff(cards, history))
    seat = len(history) % 2
    bet = players[seat][cards[seat], history]
    return bet * _play_on(cards, f"{history}b", players) + (1 - bet) * _play_on(cards, f"{history}p", players)


def best_response(seat: int, other: Strategy) -> Any:
    """What a player wins at most against this strategy: the best of its 64 pure strategies."""
    return max(
        value(pure, other) if seat == 0 else -value(other, pure) for pure in pure_strategies(seat)
    )  # fmt: skip


def pure_strategies(seat: int) -> Iterator[dict[tuple[str, str], int]]:
    """Every choice of a move at each of the six information sets of a player."""
    places = information_sets(seat)
    for number in range(2 ** len(places)):
        yield {place: number >> bit & 1 for bit, place in enumerate(places)}


def information_sets(seat: int) -> list[tuple[str, str]]:
    return [(card, history) for history in DECISIONS[seat] for card in CARDS]


def exploitability(first: Strategy, second: Strategy) -> Any:
    """What best responses win more than the strategies, summed over both players; 0 in an equilibrium alone."""
    return best_response(0, second) + best_response(1, first)


def equilibrium(alpha: Any = Fraction(1, 3)) -> tuple[dict[tuple[str, str], Any], dict[tuple[str, str], Any]]:
    """An equilibrium of Kuhn (1950); the first player bets a jack with probability `alpha`, 0 to 1/3."""
    third = Fraction(1, 3)
    first = [alpha, 0, 3 * alpha, 0, alpha + third, 1]
    second = [third, 0, 1, 0, third, 1]
    return dict(zip(information_sets(0), first, strict=True)), dict(zip(information_sets(1), second, strict=True))


def average(seat: int, strategies: list[Strategy]) -> dict[tuple[str, str], Any]:
    """The average of strategies by how often each comes to an information set by its own moves."""
    found = {}
    for card, history in information_sets(seat):
        # Of its own moves, only the first player's `p` leads to its second decision.
        reach = [1 - one[card, ""] if history == "pb" else 1 for one in strategies]
        bets = [weight * one[card, history] for weight, one in zip(reach, strategies, strict=True)]
        found[card, history] = sum(bets) / sum(reach) if sum(reach) else Fraction(1, 2)
    return found


# ---------------------------------------------------------------- models


def contexts(seat: int) -> list[str]:
    """What a player reads at each of its information sets."""
    return [prompt(seat, card) + history for card, history in information_sets(seat)]


def move_logprobs(model: Any, tokenizer: Any, seat: int) -> Any:
    """Log-probs `[6, vocabulary]` of a player's answer at each of its information sets."""
    import torch

    read = tokenizer(contexts(seat), return_tensors="pt", padding=True, padding_side="right")
    last = read["attention_mask"].sum(-1) - 1
    logits = model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).logits
    return torch.log_softmax(logits[torch.arange(len(last)), last].float(), dim=-1)


def make_model(folder: Path, seat: int, *, seed: int) -> None:
    """A tiny model that plays `p` and `b` with equal probability, and its tokenizer."""
    import torch

    from learners.warm_start.tiny_model import SPECIAL_TOKENS, make_tiny_qwen3, make_tokenizer, save_model

    tokenizer = make_tokenizer(folder, characters=CHARACTERS)
    size = len(SPECIAL_TOKENS) + len(CHARACTERS)
    model = make_tiny_qwen3(size, seed=seed, hidden_size=64, layers=2, mlp_size=128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(WARM_STEPS):
        loss = -move_logprobs(model, tokenizer, seat)[:, tokenizer.convert_tokens_to_ids(list(MOVES))].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_model(folder, model)


def main(folder: Path, *, seed: int = 0) -> None:
    """Write the models and the rows."""
    for seat, name in enumerate(SEATS):
        make_model(folder / "models" / name, seat, seed=seed + seat)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(seat)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
