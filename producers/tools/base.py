"""Tools: their schema in OpenAI's form, from a Python function or given, and the call within its limits.

Guarantees:
1. the arguments of a call are checked against the signature before the function runs; a bad argument, or an error of
   the function, becomes a message for the policy: a policy's mistake never fails a sample;
2. a call has a time limit; a plain function runs in a thread, an `async` one on the event loop;
3. a call of an unknown tool gets the names of the known ones.

Example: `def double(number: int) -> int` with the docstring "Twice a number." and "number: to double" below "Args:" has
the schema {"type": "function", "function": {"name": "double", "description": "Twice a number.", "parameters": {"type":
"object", "properties": {"number": {"type": "integer", "description": "to double"}}, "required": ["number"]}}}.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Protocol, cast

import msgspec

from asyncrl.environment import EnvironmentFailure, Message, ToolCall
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.images.rows import IMAGE_PART, is_pil
from asyncrl.plugins import find, load_object
from asyncrl.runtime.user_errors import format_user_error
from producers.support.blocking_calls import run_blocking

MOST_WARNINGS = 16  # kinds of errors in the log
ERROR = "error: "  # prefix of an error message


class Tool(Protocol):
    """A callable of the policy. `async close()`, if present, is called at the end. `begin()`, if present, gives the
    tool of one sample, which is closed with it. `places`, if present, is a semaphore: a call waits for it before its
    time begins."""

    name: str
    schema: Mapping[str, Any]  # OpenAI's form

    async def call(self, arguments: Mapping[str, Any]) -> str | list[Message]:
        """The answer: text, or parts of a message. Its error becomes a message for the policy."""


class ToolSource(Protocol):
    """Several tools behind one name, known only after `open` (an MCP server). `begin()`, if present, gives the tools of
    one sample, which are closed with it (a browser)."""

    async def open(self) -> Sequence[Tool]: ...

    async def close(self) -> None: ...


class ToolError(Exception):
    """A call that cannot be answered; its text goes to the policy."""


class FunctionTool:
    """A Python function as a tool; its schema comes from signature and docstring unless it is given."""

    def __init__(self, function: Callable[..., Any], *, schema: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._arguments = _argument_struct(function)
        given = schema or getattr(function, "tool_schema", None)
        self.schema: Mapping[str, Any] = given or _make_schema(function, self._arguments)
        self.name: str = self.schema["function"]["name"]
        self._is_async = inspect.iscoroutinefunction(function)

    async def call(self, arguments: Mapping[str, Any]) -> str | list[Message]:
        try:
            checked = msgspec.convert(dict(arguments), self._arguments)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.name}: {error}") from None
        given = {name: getattr(checked, name) for name in self._arguments.__struct_fields__}
        if self._is_async:
            return answer_content(await self._function(**given))
        result = await run_blocking(self._function, **given)
        return answer_content(await result if inspect.isawaitable(result) else result)  # bounded: by the caller


class Toolbox:
    """The tools of a run, by name."""

    def __init__(self, tools: Sequence[Tool] = (), sources: Sequence[ToolSource] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._sources = sources
        self._opened = not sources
        self._opening = asyncio.Lock()
        self.failed_calls = 0  # that failed in the tool's own code
        self._warned: set[str] = set()

    async def open(self) -> None:
        """Connect the sources. Idempotent."""
        async with self._opening:
            if self._opened:
                return
            for source in self._sources:
                for tool in await source.open():
                    if tool.name in self._tools:  # a server may not replace another tool
                        raise _two(tool.name)
                    self._tools[tool.name] = tool
            self._opened = True

    async def close(self) -> None:
        for each in (*self._sources, *self._tools.values()):
            close = getattr(each, "close", None)
            if close is not None:
                await close()

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    def begin(self) -> SampleTools:
        """The tools of one sample. Raises `sandbox.unavailable`."""
        own = {name: tool.begin() for name, tool in self._tools.items() if hasattr(tool, "begin")}
        own |= {tool.name: tool for each in self._sources if hasattr(each, "begin") for tool in each.begin()}
        return SampleTools(self, {name: tool for name, tool in own.items() if tool is not self._tools[name]})

    async def call(
        self, call: ToolCall, *, timeout_s: float, own: Mapping[str, Tool] = MappingProxyType({})
    ) -> str | list[Message]:
        """The answer to a call, as content of a message, or an error message. `own`: tools of the sample."""
        tool = own.get(call.name) or self._tools.get(call.name)
        if tool is None:
            return f"{ERROR}no tool {call.name!r}; there are: {', '.join({**self._tools, **own})}"
        try:
            async with getattr(tool, "places", None) or nullcontext():  # bounded: by the episode
                return await asyncio.wait_for(tool.call(call.arguments), timeout_s)
        except TimeoutError:
            return f"{ERROR}{call.name} took longer than {timeout_s:g} s"
        except ToolError as error:
            return f"{ERROR}{error}"
        except (AsyncRLError, EnvironmentFailure):
            raise  # not the policy's fault: the sample fails, and its prompt is retried
        except Exception as error:  # the tool's own code may raise anything; the policy gets a message
            self._warn_author(call.name, error)
            return f"{ERROR}{call.name} raised {type(error).__name__}: {error}"

    def _warn_author(self, name: str, error: Exception) -> None:
        """The policy gets the error as if the call were at fault; the log gets its place, once for each kind."""
        self.failed_calls += 1
        kind = f"{name} {type(error).__name__}"
        if kind not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(kind)
            print(
                f"warning: tool {name} raised {format_user_error(error)}; the policy gets it, also later",
                flush=True,
            )


class SampleTools:
    """The tools as one sample has them: some keep a state between its calls."""

    def __init__(self, toolbox: Toolbox, own: Mapping[str, Tool]) -> None:
        self._toolbox = toolbox
        self._own = own

    async def call(
        self, call: ToolCall, *, timeout_s: float, more: Mapping[str, Tool] = MappingProxyType({})
    ) -> str | list[Message]:
        """As `Toolbox.call`; `more`: tools of the environment."""
        return await self._toolbox.call(call, timeout_s=timeout_s, own={**self._own, **more})

    async def end(self) -> None:
        """End what the sample's tools hold."""
        for tool in self._own.values():
            await tool.close()  # type: ignore[attr-defined]


def answer_content(value: Any) -> str | list[Message]:
    """Text unchanged, a PIL image as a part of a message, anything else as JSON, or as Python prints it."""
    if isinstance(value, str):
        return value
    if is_pil(value):
        return [{"type": IMAGE_PART, "image": value}]
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, *UNREADABLE):
        return str(value)


def make_toolbox(
    names: Sequence[str],
    args: Mapping[str, Any],
    *,
    sandbox: Callable[[], Any] = lambda: None,
    env: Collection[str] = (),
) -> Toolbox:
    """The configured tools; those with a parameter `sandbox` get it. `env`: variables that servers of tools inherit.
    Raises `config.environment`.
    """
    tools: list[Tool] = []
    sources: list[ToolSource] = []
    for name in names:
        kind, _, rest = name.partition(":")
        mine = args.get(kind, {})
        if name.endswith(".json"):
            tools += _load_file(Path(name))
        elif kind == "mcp":
            settings = {"inherits": env, **_require_settings(name, mine.get(rest))}
            sources.append(find("asyncrl.tools", kind)(rest, **settings))
        elif rest:
            tools.append(
                _tool(load_object(name, code="config.environment", where="environment.tools"), name, mine, sandbox)
            )
        else:
            made = _tool(find("asyncrl.tools", name), name, mine, sandbox)
            (sources if hasattr(made, "open") else tools).append(made)  # type: ignore[arg-type]
    twice = {tool.name for tool in tools if sum(other.name == tool.name for other in tools) > 1}
    if twice:
        raise _two(min(twice))
    return Toolbox(tools, sources)


def _two(name: str) -> ConfigError:
    return ConfigError("config.environment", f"two tools are called {name!r}", where="environment.tools")


def _require_settings(name: str, settings: Any) -> dict[str, Any]:
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


def _load_file(path: Path) -> list[Tool]:
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


def _argument_struct(function: Callable[..., Any]) -> type[msgspec.Struct]:
    """The arguments of a function as a struct that checks them. Raises `config.environment`."""
    name = getattr(function, "__name__", type(function).__name__)
    where = f"tool {name}"
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError("config.environment", f"its types cannot be read: {error}", where=where) from None
    described = _parse_docstring(inspect.getdoc(function) or "")[1]
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError("config.environment", f"parameter {parameter.name} has no fixed name", where=where)
        if parameter.name not in hints:
            raise ConfigError("config.environment", f"parameter {parameter.name} has no type", where=where)
        kind = hints[parameter.name]
        if parameter.name in described:
            kind = Annotated[kind, msgspec.Meta(description=described[parameter.name])]
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, kind, *default))
    fields.sort(key=len)  # those without a default first
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True)


def _make_schema(function: Callable[..., Any], arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (tree,), named = msgspec.json.schema_components([arguments])
    parameters = dict(named.get(arguments.__name__, tree))
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)
    description = _parse_docstring(inspect.getdoc(function) or "")[0]
    return {
        "type": "function",
        "function": {"name": arguments.__name__, "description": description, "parameters": parameters},
    }


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and the texts of its `Args:` by parameter."""
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
