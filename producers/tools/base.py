"""Tools: their schema in OpenAI's form, from a Python function or given, and the call within its limits.

Guarantees:
1. the arguments of a call are checked against the signature before the function runs; what does not fit is described in
   words that the policy is shown, as is what the function raises: a policy's mistake never fails a sample;
2. a call has a time limit; a plain function runs beside the event loop, an `async` one on it;
3. a tool of an unknown name is answered by the names of those that there are.

Example: `def double(number: int) -> int` with the docstring "Twice a number." and "number: to double" below "Args:" has
the schema {"type": "function", "function": {"name": "double", "description": "Twice a number.", "parameters": {"type":
"object", "properties": {"number": {"type": "integer", "description": "to double"}}, "required": ["number"]}}}.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import msgspec

from asyncrl.environment import EnvironmentFailure, ToolCall
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.plugins import find, load_object
from asyncrl.runtime.user_errors import format_user_error
from producers.support.blocking_calls import beside

TOLD_AT_MOST = 16  # kinds of errors that the log gets
ERROR = "error: "  # what an answer begins with that is none


class Tool(Protocol):
    """What a policy may call. An `async close()`, where it has one, is called at the end."""

    name: str
    schema: Mapping[str, Any]  # OpenAI's form

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The answer. What it raises is shown to the policy."""


class ToolSource(Protocol):
    """Several tools behind one name that are known only once it was opened (an MCP server)."""

    async def open(self) -> Sequence[Tool]: ...

    async def close(self) -> None: ...


class ToolError(Exception):
    """A call that cannot be answered; its text is shown to the policy."""


class FunctionTool:
    """A Python function as a tool; its schema is read from signature and docstring unless it is given."""

    def __init__(self, function: Callable[..., Any], *, schema: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._arguments = _struct_of(function)
        given = schema or getattr(function, "tool_schema", None)
        self.schema: Mapping[str, Any] = given or _schema_of(function, self._arguments)
        self.name: str = self.schema["function"]["name"]
        self._is_async = inspect.iscoroutinefunction(function)

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Check the arguments, run the function."""
        try:
            checked = msgspec.convert(dict(arguments), self._arguments)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: {error}") from None
        given = {name: getattr(checked, name) for name in self._arguments.__struct_fields__}
        if self._is_async:
            return shown(await self._function(**given))
        result = await beside(self._function, **given)
        return shown(await result if inspect.isawaitable(result) else result)  # bounded: by the caller


class Toolbox:
    """The tools of a run, by name."""

    def __init__(self, tools: Sequence[Tool] = (), sources: Sequence[ToolSource] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._sources = sources
        self._opened = not sources
        self._opening = asyncio.Lock()
        self.failed_calls = 0  # that raised in the tool's own code
        self._told: set[str] = set()

    async def open(self) -> None:
        """Connect to what has to be connected to; once."""
        async with self._opening:
            if self._opened:
                return
            for source in self._sources:
                for tool in await source.open():
                    if tool.name in self._tools:  # a server may not put itself in the place of another tool
                        raise _two(tool.name)
                    self._tools[tool.name] = tool
            self._opened = True

    async def close(self) -> None:
        """Let go of it."""
        for each in (*self._sources, *self._tools.values()):
            close = getattr(each, "close", None)
            if close is not None:
                await close()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def call(self, call: ToolCall, *, timeout_s: float) -> str:
        """The answer to a call, or an error in words."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"{ERROR}no tool {call.name!r}; there are: {', '.join(self._tools)}"
        try:
            return await asyncio.wait_for(tool.call(call.arguments), timeout_s)
        except TimeoutError:
            return f"{ERROR}{call.name} took longer than {timeout_s:g} s"
        except ToolError as error:
            return f"{ERROR}{error}"
        except (AsyncRLError, EnvironmentFailure):
            raise  # not the policy's fault: the sample fails, and its prompt is tried again
        except Exception as error:  # the tool's own code may raise anything; the policy is told
            self._tell_author(call.name, error)
            return f"{ERROR}{call.name} raised {type(error).__name__}: {error}"

    def _tell_author(self, name: str, error: Exception) -> None:
        """The policy is shown the error as if the call were at fault; the log gets the place, once for each kind."""
        self.failed_calls += 1
        kind = f"{name} {type(error).__name__}"
        if kind not in self._told and len(self._told) < TOLD_AT_MOST:
            self._told.add(kind)
            print(
                f"warning: tool {name} raised {format_user_error(error)}; the policy is told, as for later ones",
                flush=True,
            )


def shown(value: Any) -> str:
    """Text as it is, anything else as JSON, or as Python writes it."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, *UNREADABLE):
        return str(value)


def toolbox_of(names: Sequence[str], args: Mapping[str, Any], *, sandbox: Callable[[], Any] = lambda: None) -> Toolbox:
    """The configured tools; those with a parameter `sandbox` are given it. Raises `config.environment`."""
    tools: list[Tool] = []
    sources: list[ToolSource] = []
    for name in names:
        kind, _, rest = name.partition(":")
        mine = args.get(kind, {})
        if name.endswith(".json"):
            tools += _from_file(Path(name))
        elif kind == "mcp":
            sources.append(find("asyncrl.tools", kind)(rest, **_settings_of(name, mine.get(rest))))
        elif rest:
            tools.append(
                _tool(load_object(name, code="config.environment", where="environment.tools"), name, mine, sandbox)
            )
        else:
            tools.append(_tool(find("asyncrl.tools", name), name, mine, sandbox))
    twice = {tool.name for tool in tools if sum(other.name == tool.name for other in tools) > 1}
    if twice:
        raise _two(min(twice))
    return Toolbox(tools, sources)


def _two(name: str) -> ConfigError:
    return ConfigError("config.environment", f"two tools are called {name!r}", where="environment.tools")


def _settings_of(name: str, settings: Any) -> dict[str, Any]:
    if not isinstance(settings, dict):
        where = f"environment.tool_args.{name.replace(':', '.')}"
        raise ConfigError("config.environment", f"tool {name!r} needs settings", where=where)
    return settings


def _tool(found: Any, name: str, args: Mapping[str, Any], sandbox: Callable[[], Any]) -> Tool:
    """A class is made with its settings, a function is wrapped."""
    where = f"environment.tools: {name}"
    try:
        if inspect.isclass(found):
            extra = {"sandbox": sandbox} if "sandbox" in inspect.signature(found).parameters else {}
            made: Any = found(**args, **extra)
            return cast(Tool, made)
        if callable(found):
            return FunctionTool(found)
    except TypeError as error:
        raise ConfigError("config.environment", str(error), where=where) from None
    raise ConfigError("config.environment", f"it is a {type(found).__name__}, no function or class", where=where)


def _from_file(path: Path) -> list[Tool]:
    """A list of schemas, each with `call`: the 'module:function' behind it."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        return [
            FunctionTool(
                load_object(entry["call"], code="config.environment", where=str(path)),
                schema={"type": "function", "function": dict(entry["function"], name=entry["function"]["name"])},
            )
            for entry in entries
        ]
    except (OSError, KeyError, *UNREADABLE) as error:
        what = f"no {error} in an entry" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            "config.environment",
            what,
            where=str(path),
            remedy='write [{"function": {"name", "description", "parameters"}, "call": "module:function"}, ...]',
        ) from None


# ---------------------------------------------------------------- schemas


def _struct_of(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """The arguments of a function as a struct that checks them. Raises `config.environment`."""
    name = getattr(function, "__name__", type(function).__name__)
    where = f"tool {name}"
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError("config.environment", f"its types cannot be read: {error}", where=where) from None
    told = _told(inspect.getdoc(function) or "")[1]
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError("config.environment", f"parameter {parameter.name} has no fixed name", where=where)
        if parameter.name not in hints:
            raise ConfigError("config.environment", f"parameter {parameter.name} has no type", where=where)
        kind = hints[parameter.name]
        if parameter.name in told:
            kind = Annotated[kind, msgspec.Meta(description=told[parameter.name])]
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, kind, *default))
    fields.sort(key=len)  # those without a default first
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True)


def _schema_of(function: Callable[..., Any], arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (tree,), named = msgspec.json.schema_components([arguments])
    parameters = dict(named.get(arguments.__name__, tree))
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    description = _told(inspect.getdoc(function) or "")[0]
    return {
        "type": "function",
        "function": {"name": arguments.__name__, "description": description, "parameters": parameters},
    }


def _told(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and what its `Args:` say of each parameter."""
    head = " ".join(text.split("\n\n", maxsplit=1)[0].split())
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
    found: dict[str, str] = {}
    last = ""
    for line in section[1].splitlines() if section else ():
        entry = re.match(r"\s{2,4}(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if entry:
            last = entry[1]
            found[last] = entry[2].strip()
        elif last and line.strip():
            found[last] += " " + line.strip()
    return head, found
