"""The forms of reward functions, ours and those of other trainers, recognised by parameter names.

A form knows its own functions, their arguments, and the number of values in a result; it does not interpret values.

| form | recognised by | per |
|---|---|---|
| `sample` (ours) | one parameter | sample |
| `verl` | `solution_str` | sample |
| `verl_batch` | `solution_strs` | batch |
| `areal` | `prompt` and `completions` | sample |
| `trl` | `completions` | batch |
| `openrlhf` | `queries` | batch |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.errors import ConfigError
from producers.rewards.forms.areal_openrlhf import AReaL, OpenRLHF
from producers.rewards.forms.asyncrl_form import OwnSample
from producers.rewards.forms.base import Form, Parameters
from producers.rewards.forms.trl import TRL
from producers.rewards.forms.verl import Verl, VerlBatch

#: Tried in this order; the first that claims a function gets it.
FORMS: tuple[type[Form], ...] = (Verl, VerlBatch, OpenRLHF, AReaL, TRL, OwnSample)


def read_parameters(function: Callable[..., Any], args: Mapping[str, Any], *, name: str = "") -> Parameters:
    """The parameters of a function besides the `args` of the configuration. Raises `config.reward`."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError("config.reward", f"its parameters cannot be read: {error}", where=name) from None
    named = [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in found)
    unknown = sorted(set(args) - {p.name for p in named if p.kind is not p.POSITIONAL_ONLY})
    if unknown and not takes_all:
        shown = ", ".join(p.name for p in named) or "none"
        raise ConfigError("config.reward", f"args has {', '.join(unknown)}; its parameters: {shown}", where=name)
    left = [p for p in named if p.name not in args]
    return Parameters(
        names=frozenset(p.name for p in left),
        takes_all=takes_all,
        required=frozenset(p.name for p in left if p.default is p.empty),
        positional=tuple(p.name for p in left if p.kind is not p.KEYWORD_ONLY),
    )


def recognise(
    function: Callable[..., Any], *, name: str = "", args: Mapping[str, Any] | None = None, prompt_key: str = "prompt"
) -> Form:
    """The form of a function. Raises `config.reward` with all forms in its text if it fits none."""
    parameters = read_parameters(function, args or {}, name=name)
    for form in FORMS:
        if form.claims(parameters):
            missing = form.missing_parameters(parameters)
            if missing:
                what = (
                    f"nothing to give for its parameters {', '.join(sorted(missing))} (it looks like {form.signature})"
                )
                raise ConfigError("config.reward", f"{what}; give them by args, or a default", where=name)
            return form(parameters, prompt_key=prompt_key)
    keywords = sorted(parameters.names - set(parameters.positional))
    taken = ", ".join((*parameters.positional, *keywords))
    forms = " | ".join(form.signature for form in reversed(FORMS))
    raise ConfigError(
        "config.reward",
        f"its parameters ({taken or 'none'}) fit none of the forms {forms}",
        where=name,
        remedy="give it the parameters of one of these forms, or further ones a default or a value in args",
    )
