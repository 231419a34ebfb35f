"""From the text of `[[reward]] function` to a function: a module, a file, a built-in scorer, or a server.

Guarantees:
1. a function that cannot be loaded is `config.reward` with the missing part, before anything is scored;
2. a class is instantiated with `args`, and so is a function that fits no form and takes just them (a factory); both get
   the run's sandbox if they have a parameter `sandbox`;
3. a file is imported under its own module name, with its folder at the end of the Python path.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.config.sections.reward import FORMS, reward_kind
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.plugins import load_object
from producers.rewards.forms import read_parameters, recognise
from producers.sandbox import open_sandbox

Function = Callable[..., Any]


def load_reward(
    dotted: str, args: Mapping[str, Any] | None = None, *, make_sandbox: Callable[[], Any] | None = None
) -> Function:
    """The function, class instance or server behind a name, with `args` in place. Raises `config.reward`."""
    given = dict(args or {})
    kind = reward_kind(dotted)
    if kind == "url":
        from producers.rewards.remote import RemoteReward

        return _instantiate(RemoteReward, {"url": dotted, **given}, dotted, make_sandbox)
    if kind == "builtin":
        from producers.rewards.scorers import find

        return _instantiate(find(dotted), given, dotted, make_sandbox)
    found = load_function(dotted)
    if inspect.isclass(found):
        return _instantiate(found, given, dotted, make_sandbox)
    if _is_factory(found, given):
        return _instantiate(found, given, dotted, make_sandbox)
    read_parameters(found, given, name=dotted)
    return functools.partial(found, **given) if given else found


def load_function(dotted: str) -> Function:
    """The object behind a module's or a file's name. Raises `config.reward`, also if the import fails."""
    kind = reward_kind(dotted)
    if kind not in ("module", "file"):
        raise ConfigError("config.reward", f"{dotted!r} is not {FORMS}", where=dotted)
    try:
        found = load_object(dotted, code="config.reward", where=dotted)
    except AsyncRLError:
        raise
    except Exception as error:  # the import runs the user's code, which may raise anything
        message = f"importing it raised {type(error).__name__}: {error}"
        raise ConfigError("config.reward", message, where=dotted) from error
    if not callable(found):
        raise ConfigError("config.reward", f"it is a {type(found).__name__}, not a function", where=dotted)
    function: Function = found
    return function


def _is_factory(function: Function, args: dict[str, Any]) -> bool:
    """Whether a function fits no form and takes exactly `args`."""
    try:
        recognise(function, args=args)
        return False
    except ConfigError:
        pass
    try:
        return read_parameters(function, args).required <= {"sandbox"}
    except ConfigError:
        return False


def _instantiate(
    maker: Function, args: dict[str, Any], dotted: str, make_sandbox: Callable[[], Any] | None
) -> Function:
    """The function from a class or a factory and its arguments."""
    parameters = read_parameters(maker, args, name=dotted)
    if "sandbox" in parameters.names:
        args = {**args, "sandbox": (make_sandbox or open_sandbox)()}
        parameters = read_parameters(maker, args, name=dotted)
    if parameters.required:
        needed = ", ".join(sorted(parameters.required))
        raise ConfigError("config.reward", f"it needs args = {{...}} with {needed}", where=dotted)
    try:
        made = maker(**args)
    except AsyncRLError as error:
        raise ConfigError("config.reward", error.message, where=dotted, remedy=error.remedy) from error
    except Exception as error:  # the user's code may raise anything
        raise ConfigError("config.reward", f"making it raised {type(error).__name__}: {error}", where=dotted) from error
    if not callable(made):
        what = f"called with args it gives a {type(made).__name__}, not a function"
        try:
            recognise(maker, name=dotted, args=args)
        except ConfigError as error:
            what = f"{error.message}; {what}"
        raise ConfigError("config.reward", what, where=dotted)
    result: Function = made
    return result
