"""`asyncrl presets [NAME]`: what a preset sets, where it is from, and where it differs from its paper.

The table of docs/algorithms.md is made from the same text.
"""

from __future__ import annotations

import textwrap

from asyncrl.config import Config, parse, presets
from asyncrl.config.mode import explain_update
from asyncrl.config.sections.algorithm_catalogue import effective_correction
from asyncrl.metrics import CATALOGUE as METRICS

LEAST = 'model.path = "m"\ndata.path = "d"\n[[reward]]\nfunction = "a:b"\n'
WIDTH = 100
WEIGHTED = (
    "samples come from older policies as well: the correction makes up for their age. In the paper every sample comes "
    "from the policy at the start of the batch"
)
MEASURED = (
    "one update per batch, as in the paper, where the policy that sampled is the one that the ratio compares with; "
    "here it is older, and the clip is measured from it (clip_against)"
)
ADVICE = {
    "lr": "learner.optim.lr",
    "warmup_steps": "learner.optim.warmup_steps",
    "weight_decay": "learner.optim.weight_decay",
    "group_size": "sampling.group_size",
    "batch_groups": "buffer.batch_groups",
}


def presets_command(name: str) -> int:
    """Print one preset, or all of them by line."""
    if name:
        print(describe_preset(name))
        return 0
    width = max(map(len, presets.names()))
    for one in presets.names():
        print(f"{one:<{width}}  {presets.read_title(one)}")
    print("\nasyncrl presets NAME shows what one sets, its paper, and where it differs from it.")
    return 0


def config_of(name: str) -> Config:
    """A preset without other settings."""
    return parse(LEAST, overrides=[f"{presets.KEY}={name}"])


def list_differences(name: str) -> list[str]:
    """Where a preset differs from its paper, each with the reason."""
    learner, recipe = config_of(name).learner, presets.load_recipe(name)
    found = [f"the update has the direction of preset {other}'s: they differ by a factor" for other in recipe.equals]
    found += recipe.differs
    if learner.mode == "rl" and effective_correction(learner.algorithm) != "none":
        found.append(WEIGHTED)
    if learner.algorithm.clip_against == "behaviour":
        found.append(MEASURED)
    return found


def list_advice(name: str) -> dict[str, str]:
    """Setting -> value that the paper used; only those that it states."""
    recipe = presets.load_recipe(name)
    values = {key: getattr(recipe, field) for field, key in ADVICE.items()}
    return {key: f"{value:g}".replace("e-0", "e-") for key, value in values.items() if value is not None}


def describe_preset(name: str) -> str:
    """The page of a preset. Raises `config.preset`."""
    recipe, text = presets.load_recipe(name), presets.read_text(name)
    settings = text.partition("\n[recipe]")[0].strip()
    lines = [settings, ""]
    if recipe.paper:
        lines += [f"paper:     arXiv {recipe.paper}, {recipe.equation}"]
    lines += [f"algorithm: {explain_update(config_of(name))}"]
    if recipe.acts:
        lines += [f"acts:      {recipe.acts} is above 0 ({METRICS[recipe.acts].meaning})"]
    if advice := list_advice(name):
        lines += ["", "recommended, not set by the preset:", *(f"  {key} = {value}" for key, value in advice.items())]
    if differences := list_differences(name):
        lines += ["", "differs from the paper:"]
        for one in differences:
            lines += textwrap.wrap(one, WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)
