"""Finds the functions of `asyncrl.config.sections.algorithm_catalogue` and of plugins, and binds their options.

Guarantees:
1. an unknown name or option, or a value of the wrong type, raises one error that lists the valid ones;
2. a plugin is a function with the signature of its kind (`learners.algorithms.types`), registered in the entry-point
group `asyncrl.advantages`, `asyncrl.losses` or `asyncrl.corrections`, or named by its place ("my_losses:mine",
"mine.py:mine"); its keyword-only arguments are its options;
3. attributes of a plugin's function declare its further needs: `needs` (names of `Rollouts` fields), `aggregation` (the
only mode that the loss supports), `choose` (a function that selects tokens of the whole mini-batch), `whole_batch` (the
correction depends on all rows).

Example: `advantage = "mine"` with `[project.entry-points."asyncrl.advantages"] mine = "my_package:mine"`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec
import torch
from torch import Tensor

from asyncrl.config.sections import algorithm_catalogue as algorithms
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import ConfigError
from asyncrl.plugins import is_place, load_object
from learners.algorithms.aggregation import Denominators, aggregate
from learners.algorithms.kl import Kind as KLKind
from learners.algorithms.kl import kl_estimate
from learners.algorithms.tensors import masked, sequence_lengths
from learners.algorithms.types import Correction, Estimate, LossInputs, Rollouts, TokenLoss

Kind = Literal["advantage", "loss", "correction"]


class Chosen(NamedTuple):
    """A function and its options."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]

    @property
    def call(self) -> Callable[..., Any]:
        """Return the function with its options bound."""
        return functools.partial(self.function, **self.options)


def find_function(kind: str, name: str) -> Callable[..., Any]:
    """Return the function by name. Raises `config.type` for an unknown name, `config.extra` if it cannot be loaded."""
    where = f"learner.algorithm.{kind}"
    found = algorithms.entry(kind, name)
    if found is not None:
        return typing.cast("Callable[..., Any]", load_object(found.dotted, code="config.extra", where=where))
    if is_place(name):
        return typing.cast("Callable[..., Any]", load_object(name, code="config.extra", where=where))
    for point in entry_points(group=algorithms.GROUPS[kind], name=name):
        return typing.cast("Callable[..., Any]", load_object(point.value, code="config.extra", where=where))
    raise ConfigError(
        "config.type", f"{where} = {name!r} is not known: one of {', '.join(algorithms.known_names(kind))}", where=where
    )


def options_in(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keyword-only arguments of the function: option -> type and default."""
    hints = typing.get_type_hints(function)
    return {
        name: (hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def choose(algorithm: AlgorithmConfig, kind: Kind) -> Chosen:
    """Return the configured function of a kind and its options, converted to the types in its signature."""
    name = algorithms.effective_name(algorithm, kind)
    function = find_function(kind, name)
    known = options_in(function)
    options: dict[str, Any] = {}
    for key, value in algorithms.effective_options(algorithm, kind).items():
        where = f"learner.algorithm.{kind}_options.{key}"
        if key not in known:
            raise ConfigError(
                "config.unknown_key", f"{kind} {name!r} has the options {', '.join(known) or 'none'}", where=where
            )
        try:
            options[key] = msgspec.convert(value, known[key][0])
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError("config.type", f"{key} = {value!r}: {error}", where=where) from None
    missing = [key for key, (_, default) in known.items() if default is inspect.Parameter.empty and key not in options]
    if missing:
        raise ConfigError(
            "config.missing", f"{kind} {name!r} needs {', '.join(missing)}", where=f"learner.algorithm.{kind}_options"
        )
    return Chosen(name, function, options)


def advantage_for(algorithm: AlgorithmConfig) -> Callable[[Rollouts], Estimate]:
    """Return the configured estimator."""
    return choose(algorithm, "advantage").call


def loss_for(algorithm: AlgorithmConfig) -> Callable[[LossInputs], TokenLoss]:
    """Return the configured loss."""
    return choose(algorithm, "loss").call


def correction_for(algorithm: AlgorithmConfig) -> Callable[..., Correction]:
    """Return the configured correction: `(proximal, behaviour, mask, sequences) -> Correction`."""
    return choose(algorithm, "correction").call


def chooser_for(algorithm: AlgorithmConfig) -> Callable[..., Any] | None:
    """Return the function that selects the loss's tokens in the mini-batch, or None without one.

    It is the attribute `choose` of the loss, else `choose_<name>` in its module.
    """
    found = choose(algorithm, "loss")
    picker = getattr(found.function, "choose", None)
    if picker is None:
        home = sys.modules[found.function.__module__]
        picker = getattr(home, f"choose_{found.function.__name__}", None)
    if picker is None:
        return None
    known = options_in(picker)
    return functools.partial(picker, **{key: value for key, value in found.options.items() if key in known})


def aggregation_for(algorithm: AlgorithmConfig) -> str:
    """Return the configured aggregation, or the loss's own if it supports only one."""
    found = algorithms.entry("loss", algorithm.loss)
    if found is not None:
        return found.aggregation or algorithm.aggregation
    return str(getattr(find_function("loss", algorithm.loss), "aggregation", "") or algorithm.aggregation)


def reduction_for(algorithm: AlgorithmConfig, denominators: Denominators) -> Callable[..., Tensor]:
    """Return `(loss, mask, sequences, *, siblings) -> scalar`: a piece's share of the loss, as `aggregate` has it.

    A user's own aggregation is a function `(mask, sequences, lengths, denominators) -> weights`: bool `[N]`, the row of
    each token `[N]`, trained tokens of each row's sample `[S]`, counts of the whole mini-batch. Its weights `[N]`
    multiply the token losses, whose sum over all pieces is the loss.
    """
    mode = aggregation_for(algorithm)
    if not is_place(mode):
        factor = algorithm.loss_scale_factor or None
        return functools.partial(aggregate, mode=mode, denominators=denominators, loss_scale_factor=factor)
    weigh = load_object(mode, code="config.extra", where="learner.algorithm.aggregation")

    def reduce(loss: Tensor, mask: Tensor, sequences: Tensor, *, siblings: Tensor) -> Tensor:
        lengths = sequence_lengths(mask, sequences, siblings.numel()) + siblings
        weights = torch.as_tensor(weigh(mask, sequences, lengths, denominators), device=loss.device)
        return (masked(loss, mask) * masked(weights, mask)).sum()

    return reduce


def divergence_for(kind: str, *, auto: KLKind = "k3") -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return `(log_probs, reference, mask) -> nats per token` of a kind of `learners.algorithms.kl`, or of a user's own
    function `(log_probs, reference) -> value`, which gets 0 for both outside the mask. Any shape. `auto`: the kind that
    this word stands for.
    """
    if not is_place(kind):
        return functools.partial(kl_estimate, kind=auto if kind == "auto" else typing.cast("KLKind", kind))
    own = load_object(kind, code="config.extra", where="learner.algorithm.kl.kind")

    def estimate(log_probs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        return masked(own(masked(log_probs, mask), masked(reference.detach(), mask)), mask)

    return estimate


def needs_for(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Return the fields that the estimator needs in addition to rewards, mask and groups."""
    found = algorithms.entry("advantage", algorithm.advantage)
    if found is not None:
        return found.needs
    return tuple(getattr(find_function("advantage", algorithm.advantage), "needs", ()))


# ---------------------------------------------------------------- options as data


def option_table() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return the content of `asyncrl/algorithm_options.json`: kind -> name -> option -> types and default."""
    table: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for kind, entries in algorithms.TABLES.items():
        table[kind] = {}
        for name in entries:
            known = options_in(find_function(kind, name))
            table[kind][name] = {
                key: {"types": type_names(hint), "default": toml_value(default)}
                for key, (hint, default) in known.items()
            }
    return table


def type_names(hint: Any) -> list[Any]:
    """Return the type names of a hint: `["float", "off"]` for `float | None`, a list of words for a Literal."""
    if get_origin(hint) is Literal:
        return [list(get_args(hint))]
    if get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for option in get_args(hint) for kind in type_names(option)]
    if hint is type(None):
        return ["off"]
    if hint in (float, int, bool, str):
        return [hint.__name__]
    return ["list"] if get_origin(hint) in (tuple, list, Sequence) else ["any"]


def toml_value(default: Any) -> Any:
    """Return a default as TOML shows it: "off" for None, "required" if there is none."""
    if default is None:
        return "off"
    return "required" if default is inspect.Parameter.empty else msgspec.to_builtins(default)
