"""Follows the choices of prompts through a history for the audit (`data.sampler = "difficulty"`).

Guarantee: it makes every choice again from the outcomes before it, and compares; with an archive every outcome is
compared with the rewards of its group.
"""

from __future__ import annotations

from typing import Any

from asyncrl.audit.findings import Audit
from asyncrl.audit.group_reader import GroupReader
from asyncrl.prompt_choice import MOST_ROWS, PromptChoice


class ChoiceReader:
    """The table of a buffer, built from its lines."""

    def __init__(self, found: Audit, work: GroupReader) -> None:
        self.found = found
        self.work = work
        self.choice = PromptChoice()
        self.rows: dict[int, int] = {}  # group -> row

    def on_prompts(self, event: dict[str, Any]) -> None:
        rows = int(event["rows"])
        if not 0 <= rows <= MOST_ROWS:
            self.found.violation("choice", f"{rows} rows to choose from")
            return
        self.choice.seed = int(event["seed"])
        self.choice.resize(0 if event["fresh"] else rows)
        self.choice.resize(rows)

    def on_choose(self, event: dict[str, Any]) -> None:
        number, row = int(event["g"]), int(event["row"])
        self.rows[number] = row
        expected = self.choice.choose(number) if len(self.choice) else -1
        if row != expected or row < 0:  # -1: there is no table
            self.found.violation("choice", f"group {number} got row {row}, the outcomes before it choose {expected}")

    def on_outcome(self, event: dict[str, Any]) -> None:
        number, row, mixed = int(event["g"]), int(event["row"]), bool(event["mixed"])
        if self.rows.get(number) != row or not 0 <= row < len(self.choice):
            self.found.violation("choice", f"the outcome of group {number} is of row {row}, which it did not get")
            return
        rewards = {origin.reward for origin in self.work.find(event).origins.values()}
        if self.work.keeps_origins and mixed != (len(rewards) > 1):
            what = "different" if mixed else "equal"
            self.found.violation("choice", f"group {number} counts as one with {what} rewards, and has {len(rewards)}")
        self.choice.observe(row, mixed=mixed)
