"""Functions of notebooks and scripts as source files, for the processes of a run.

Guarantees:
1. nothing is pickled: a function travels as its source, together with the imports, constants, functions and classes of
   its own module that it names, all as text;
2. what cannot be written as text (an open file, a model, an object of a class of its own) is refused with its name and
   the reason, before anything starts;
3. a function of a module that other processes can import keeps its `module:name`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import hashlib
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.runtime.run_dir import write_atomic

FILE = "functions.py"


def write_functions(folder: Path, functions: list[Callable[..., Any]]) -> list[str]:
    """Write the functions that other processes cannot import to `folder/functions.py`, with its digest in
    `manifest.json`; the names of all, in order, as `module:name` or `path.py:name`.

    Raises:
        ConfigError: `config.reward`, for a function that has no source or needs an object that has none.
    """
    source, names = Source(), []
    for function in functions:
        if importable(function):
            names.append(f"{function.__module__}:{function.__qualname__}")
        else:
            source.add_function(function)
            names.append(f"{(folder / FILE).resolve()}:{function.__name__}")
    if source.parts:
        text = source.text().encode()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FILE, text)
        manifest = {"file": FILE, "sha256": hashlib.sha256(text).hexdigest(), "names": sorted(source.parts)}
        write_atomic(folder / "manifest.json", f"{json.dumps(manifest)}\n".encode())
    return names


def importable(found: Any) -> bool:
    """Whether other processes find it under its module and name: modules of installed packages, not `__main__`."""
    module = sys.modules.get(getattr(found, "__module__", ""))
    if module is None or module.__name__ == "__main__" or getattr(module, "__file__", None) is None:
        return False
    return getattr(module, getattr(found, "__qualname__", ""), None) is found


class Source:
    """Text of functions and of what they name, each name once, dependencies first."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}

    def text(self) -> str:
        """The whole file."""
        return "from __future__ import annotations\n\n" + "\n\n".join(self.parts.values()) + "\n"

    def add_function(self, function: Any) -> None:
        """A function or class, with everything that it names."""
        name = getattr(function, "__name__", type(function).__name__)
        if not name.isidentifier():
            raise refusal(name, "a lambda has no source of its own; write it with def")
        if name in self.parts:
            return
        try:
            text = textwrap.dedent(inspect.getsource(function))
        except (OSError, TypeError):
            raise refusal(name, "its source is not known: define it in a cell or a file") from None
        self.parts[name] = ""  # a function may name itself
        inside = inspect.unwrap(function)
        known = {**getattr(inside, "__globals__", vars(sys.modules[function.__module__])), **closure_of(inside)}
        code, annotations = names_in(text)
        for used in sorted(code - {name}):
            if used in known:
                self._add(used, known[used], of=name)
            elif not hasattr(builtins, used):
                raise refusal(name, f"it names {used}, which is not defined")
        for used in sorted(annotations & known.keys() - {name}):  # needed to read the types, not to call it
            with contextlib.suppress(ConfigError):
                self._add(used, known[used], of=name)
        del self.parts[name]
        self.parts[name] = text.rstrip()

    def _add(self, name: str, value: Any, *, of: str) -> None:
        """What a function names: an import, a function or class, or a constant."""
        if name in self.parts or name == of:
            return
        if isinstance(value, ModuleType):
            self.parts[name] = f"import {value.__name__} as {name}"
        elif importable(value):
            self.parts[name] = f"from {value.__module__} import {value.__qualname__} as {name}"
        elif inspect.isfunction(value) or inspect.isclass(value):
            self.add_function(value)
            if value.__name__ != name:
                self.parts[name] = f"{name} = {value.__name__}"
        elif is_literal(value):
            self.parts[name] = f"{name} = {value!r}"
        else:
            kind = type(value).__name__
            raise refusal(of, f"it uses {name}, a {kind}, which cannot be written as text: create it inside")


def closure_of(function: Any) -> dict[str, Any]:
    """Variables of the enclosing function by name."""
    names, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return dict(zip(names.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if names else {}


def names_in(text: str) -> tuple[set[str], set[str]]:
    """Names that the source takes from outside, read somewhere and bound nowhere in it: in code, in annotations alone.

    >>> sorted(names_in("def f(x: T, k=K):\\n    y = len(x)\\n    return re.sub('a', y, k)")[0])
    ['K', 'len', 're']
    """
    tree = ast.parse(text)
    bound, read, types = set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):  # texts, by the file's first line
            if isinstance(hint := getattr(node, field, None), ast.AST):
                types |= {one.id for one in ast.walk(hint) if isinstance(one, ast.Name)}
                setattr(node, field, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound, types - read - bound


def is_literal(value: Any) -> bool:
    """Whether `repr` gives the value back.

    >>> is_literal({"a": (1, 2.5)}), is_literal(float("nan")), is_literal(open)
    (True, False, False)
    """
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, RecursionError):
        return False


def refusal(name: str, reason: str) -> ConfigError:
    """The error of a function that cannot travel."""
    remedy = "or put it into a module and pass 'module:name'"
    return ConfigError("config.reward", f"the function {name} cannot run in other processes: {reason}", remedy=remedy)
