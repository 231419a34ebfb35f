"""The lint of waits: which calls in a source text can wait for ever. Used by `test_house`.

A wait whose bound stands elsewhere says so in place: `# bounded: why` on one of its lines or right above. What no text
can show (a
`with lock:`, a collective under its group's timeout) is not looked at.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

LIMITS = {"timeout", "timeout_s", "timeout_ms", "socket_timeout"}
#: Methods that wait for ever when called without an argument.
BARE = {"join", "wait", "communicate", "get", "acquire", "recv", "recv_multipart", "recv_string", "accept", "readline"}
#: Calls that need a limit by name, whatever else they are given.
NAMED = {
    "init_process_group",
    "new_group",
    "monitored_barrier",
    "TCPStore",
    "create_connection",
    "urlopen",
    "Redis",
    "from_url",
    "UnixDomainSocketConnection",
    "StrictRedis",
}
RUNS = {"run", "call", "check_call", "check_output"}
FOREVER = {("signal", "pause"), ("signal", "sigwait"), ("os", "wait"), ("", "input")}


def unbounded(source: str) -> list[str]:
    """`line 3: join() without a limit` of every wait that can last for ever."""
    lines = source.splitlines()
    finder = _Finder()
    finder.visit(ast.parse(source))
    return [
        f"line {node.lineno}: {what}"
        for node, what in finder.found
        if not any(re.search(r"# .*bounded: \w", line) for line in _places(lines, node))
    ]


def _places(lines: list[str], node: ast.expr) -> list[str]:
    """The lines of the call, and the comment right above it."""
    first = node.lineno - 1
    above = [lines[first - 1]] if first and lines[first - 1].lstrip().startswith("#") else []
    return [*above, *lines[first : node.end_lineno]]


class _Finder(ast.NodeVisitor):
    """Walks a module. `covered` counts the limits around the present place: asyncio.wait_for, asyncio.timeout."""

    def __init__(self) -> None:
        self.found: list[tuple[ast.expr, str]] = []
        self.covered = 0
        self.timed_sockets = 0  # functions around this place that call settimeout

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        limits = [item for item in node.items if _name(item.context_expr) in ("timeout", "timeout_at")]
        self.covered += bool(limits)
        self.generic_visit(node)
        self.covered -= bool(limits)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        covered, self.covered = self.covered, 0  # a limit around the definition is none around its calls
        timed = any(_name(call) == "settimeout" for call in _calls(node))
        self.timed_sockets += timed
        self.generic_visit(node)
        self.timed_sockets -= timed
        self.covered = covered

    def visit_Await(self, node: ast.Await) -> None:
        if isinstance(node.value, ast.Name | ast.Attribute) and not self.covered:
            self.found.append((node, "await of a future without a limit"))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, owner = _name(node), _owner(node)
        if not self.covered and (what := self._wrong(node, name, owner)):
            self.found.append((node, what))
        limit = name == "wait_for" and owner == "asyncio" and (len(node.args) > 1 or _limited(node))
        self.covered += limit
        self.generic_visit(node)
        self.covered -= limit

    def _wrong(self, node: ast.Call, name: str, owner: str) -> str:
        first = node.args[0] if node.args else None
        method = isinstance(node.func, ast.Attribute)
        words = {word.arg for word in node.keywords}
        if (owner, name) in FOREVER or (owner == "os" and name == "waitpid" and "WNOHANG" not in ast.unparse(node)):
            return f"{name}() waits for ever"
        if name in RUNS and owner == "subprocess" and not _limited(node):
            return f"subprocess.{name}() without a timeout"
        if name in ("wait", "gather") and owner == "asyncio":
            return "" if _limited(node) else f"asyncio.{name}() without a limit"
        if name == "wait_for":
            return "" if len(node.args) > 1 or _limited(node) else "wait_for() without a limit"
        if name == "select" and owner == "select" and (len(node.args) < 4 or _none(node.args[3])):
            return "select() without a timeout"
        if name == "poll" and method and (_none(first) or (not node.args and _waits_in_poll(owner))):
            return "poll() without a timeout"
        if name in ("flock", "lockf") and "LOCK_NB" not in ast.unparse(node) and "LOCK_UN" not in ast.unparse(node):
            return f"{name}() that blocks"
        if name in NAMED and not _limited(node):
            return f"{name}() without a timeout"
        if name == "barrier" and method:
            return "barrier() without a timeout"
        if name == "shutdown" and "wait" in words and owner != "":
            waits = next(word.value for word in node.keywords if word.arg == "wait")
            return "" if isinstance(waits, ast.Constant) and waits.value is False else "shutdown() that waits"
        return self._bare(node, name, words) if method and name in BARE else ""

    def _bare(self, node: ast.Call, name: str, words: set[str | None]) -> str:
        if name in ("recv", "accept"):
            quiet = "NOBLOCK" in ast.unparse(node) or self.timed_sockets
            return "" if quiet else f"{name}() of a socket without a timeout"
        endless = _none(node.args[0]) if node.args else not words & {*LIMITS, "block", "blocking"}
        named = [word.value for word in node.keywords if word.arg in LIMITS]
        return f"{name}() without a limit" if endless or any(map(_none, named)) else ""


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Call))


def _name(node: ast.expr) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _owner(node: ast.Call) -> str:
    """`asyncio` of `asyncio.wait(...)`, `socket` of `self.socket.poll()`."""
    value = getattr(node.func, "value", None)
    return value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")


def _limited(node: ast.Call) -> bool:
    return any(word.arg in LIMITS and not _none(word.value) for word in node.keywords)


def _none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _waits_in_poll(owner: str) -> bool:
    return "sock" in owner or "poller" in owner
