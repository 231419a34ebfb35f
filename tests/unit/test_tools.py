"""Tools: schemas from functions, arguments, the calculator, search, parsers, MCP, Python in a sandbox."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.environment import EnvironmentFailure, ToolCall
from asyncrl.errors import ConfigError, WorkError
from producers.sandbox import SandboxLimits, SandboxResult, open_sandbox
from producers.tools.base import FunctionTool, Toolbox, ToolError, make_toolbox
from producers.tools.calculator import MAX_DIGITS, calculator
from producers.tools.parsers import Parsed, find_parser, hermes, plain_json
from producers.tools.search import SearchTool


def answer(box: Toolbox, name: str, timeout_s: float = 20.0, **arguments: Any) -> str:
    async def run() -> str:
        await box.open()
        try:
            return await box.call(ToolCall(name, arguments), timeout_s=timeout_s)
        finally:
            await box.close()

    return asyncio.run(asyncio.wait_for(run(), 90))


# ---------------------------------------------------------------- schemas


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Tell the weather
    of a city.

    Args:
        city: its name
        days (int): from today on,
            today among them
    """
    return {"city": city, "days": days, "unit": unit}


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def raising() -> str:
    """Never works."""
    raise KeyError("oops")


GIVEN = {"type": "function", "function": {"name": "given", "description": "As told.", "parameters": {}}}


def told() -> str:
    """Another docstring."""
    return "told"


told.tool_schema = GIVEN  # type: ignore[attr-defined]


def test_the_schema_of_a_function() -> None:
    function = FunctionTool(weather).schema["function"]
    assert (function["name"], function["description"]) == ("weather", "Tell the weather of a city.")
    parameters = function["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["city"] == {"type": "string", "description": "its name"}
    assert parameters["properties"]["days"] == {
        "type": "integer",
        "description": "from today on, today among them",
        "default": 1,
    }
    assert sorted(parameters["properties"]["unit"]["enum"]) == ["C", "F"]


def test_arguments_are_checked_before_the_function_runs(capsys: pytest.CaptureFixture[str]) -> None:
    box = Toolbox([FunctionTool(weather), FunctionTool(slow), FunctionTool(raising)])
    assert json.loads(answer(box, "weather", city="Ulm")) == {"city": "Ulm", "days": 1, "unit": "C"}
    assert answer(box, "weather") == "error: weather: Object missing required field `city`"
    assert "Expected `int`, got `str`" in answer(box, "weather", city="Ulm", days="two")
    assert "unknown field `when`" in answer(box, "weather", city="Ulm", when=3)
    assert "no tool 'nothing'; there are: weather, slow, raising" in answer(box, "nothing")
    assert answer(box, "raising") == "error: raising raised KeyError: 'oops'"
    assert answer(box, "raising") == "error: raising raised KeyError: 'oops'" and box.failed_calls == 2
    told = capsys.readouterr().out  # the policy cannot mend it: its author is told, once
    assert told.count("warning: tool raising raised KeyError: 'oops' (test_tools.py:") == 1
    assert answer(box, "slow", seconds=0.0) == "done"
    assert answer(box, "slow", timeout_s=0.05, seconds=60.0) == "error: slow took longer than 0.05 s"


def test_given_schemas(tmp_path: Path) -> None:
    assert FunctionTool(told).schema == GIVEN
    file = tmp_path / "tools.json"
    about = {"name": "forecast", "description": "Tell.", "parameters": {"type": "object"}}
    file.write_text(json.dumps([{"type": "function", "function": about, "call": f"{__name__}:weather"}]))
    box = make_toolbox([str(file)], {})
    assert box.schemas == [{"type": "function", "function": about}]
    assert "Ulm" in answer(box, "forecast", city="Ulm")
    file.write_text('[{"function": {"name": "x"}}]')
    with pytest.raises(ConfigError, match="no 'call' in an entry"):
        make_toolbox([str(file)], {})


def untyped(city) -> str:  # type: ignore[no-untyped-def]
    """No type."""
    return str(city)


def many(*cities: str) -> str:
    """No names."""
    return str(cities)


@pytest.mark.parametrize(
    ("name", "why"),
    [("untyped", "parameter city has no type"), ("many", "parameter cities has no fixed name"), ("GIVEN", "a dict")],
)
def test_functions_that_can_be_no_tool(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_toolbox([f"{__name__}:{name}"], {})


def test_two_tools_of_one_name() -> None:
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        make_toolbox(["calculator", "producers.tools.calculator:calculator"], {})


class Source:
    """Tools that are known once it is opened, and what was let go of."""

    def __init__(self, *tools: Any) -> None:
        self.tools = tools
        self.closed: list[str] = []

    async def open(self) -> Any:
        return self.tools

    async def close(self) -> None:
        self.closed.append("source")


def test_a_server_cannot_put_itself_in_the_place_of_a_tool() -> None:
    own = FunctionTool(calculator)
    box = Toolbox([own], [Source(FunctionTool(calculator))])
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        asyncio.run(box.open())
    box = Toolbox([], [Source(own), Source(own)])
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        asyncio.run(box.open())


def test_tools_that_hold_something_are_closed() -> None:
    class Holding(FunctionTool):
        async def close(self) -> None:
            source.closed.append(self.name)

    source = Source(Holding(slow))
    assert answer(Toolbox([Holding(raising), FunctionTool(weather)], [source]), "slow", seconds=0.0) == "done"
    assert sorted(source.closed) == ["raising", "slow", "source"]


class Awaited:
    """A tool whose call is async, though it is no async function."""

    def __call__(self, number: int) -> Any:
        return slow(number)


def test_an_awaitable_answer_is_awaited() -> None:
    tool = FunctionTool(Awaited().__call__, schema={"function": {"name": "later"}})
    assert answer(Toolbox([tool]), "later", number=0) == "done"


# ---------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+2*3", "7"),
        (" (2 - 5) ** 2 ", "9"),
        ("7/2", "3.5"),
        ("8/2", "4"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("1e3", "1000"),
        ("2**-1", "0.5"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "__import__('os')",
        "a",
        "1 if 2 else 3",
        "(1).real",
        "9**9**9",
        "10**400",
        "1/0",
        "'a'*9",
        "True",
        "1j",
        "(-8)**0.5",
        "1e308*10",
        "9" * 2000,
        "(" * 900 + ")" * 900,
        "[1][0]",
        "1;2",
        "lambda: 1",
        "1<2",
        "~1",
    ],
)
def test_the_calculator_knows_arithmetic_alone(expression: str) -> None:
    with pytest.raises(ToolError):
        calculator(expression)


@given(st.text("0123456789+-*/%(). e", max_size=40))
def test_the_calculator_answers_or_refuses(expression: str) -> None:
    try:
        found = calculator(expression)
    except ToolError:
        return
    assert len(found) <= MAX_DIGITS + 2


# ---------------------------------------------------------------- parsers


def test_calls_as_hermes_writes_them() -> None:
    text = (
        'I try.\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call><tool_call>{"name": "b", "arguments": '
        '"{\\"y\\": [2]}"}</tool_call> and <tool_call>{"name": 3}</tool_call><tool_call>{"name": "c"'
    )
    found = hermes(text)
    assert found.calls == (ToolCall("a", {"x": 1}), ToolCall("b", {"y": [2]}))
    assert [why.split(":")[0] for why in found.malformed] == [
        'the call is no JSON object with "name" and "arguments"',
        "<tool_call> is not closed",
    ]
    assert hermes("nothing here") == Parsed()
    assert hermes('<tool_call>{"name": "a", "arguments": {}}').calls == ()  # cut off, though what is there is JSON


def test_calls_as_json() -> None:
    assert plain_json('{"name": "a", "parameters": {"x": 1}}').calls == (ToolCall("a", {"x": 1}),)
    assert plain_json('```json\n[{"name": "a"}, {"name": "b"}]\n```').calls == (ToolCall("a", {}), ToolCall("b", {}))
    assert plain_json("The answer is 3.") == Parsed()
    assert plain_json('{"answer": 3}') == Parsed()
    assert plain_json('{"name": "a"').malformed
    assert plain_json('[{"name": "a"}, 3]').malformed


@given(st.text(max_size=60), st.sampled_from([hermes, plain_json]))
def test_no_text_breaks_a_parser(text: str, parser: Any) -> None:
    for whole in (text, f"<tool_call>{text}</tool_call>", "{" + text, "[" * 300 + text):
        found = parser(whole)
        assert all(isinstance(call.arguments, dict) for call in found.calls)


@pytest.mark.timeout(300)
def test_white_space_without_end_costs_no_time() -> None:
    """A producer's other samples wait while a parser runs."""
    for text in ("```" + "\n" * 20_000 + "x", "```json" + " " * 20_000 + "```", "```" + "\n " * 20_000, "```", "`````"):
        assert plain_json(text) == Parsed()
    assert plain_json('\n```json\n{"name": "a"}\n\n```\n').calls == (ToolCall("a", {}),)


def test_a_parser_of_ones_own() -> None:
    assert find_parser("producers.tools.parsers:hermes") is hermes
    with pytest.raises(ConfigError, match="no function"):
        find_parser(f"{__name__}:GIVEN")


# ---------------------------------------------------------------- search


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    rows = [
        ("Ulm", "The minster of Ulm has the tallest church tower."),
        ("Bonn", "Bonn lies on the Rhine, a river."),
        ("", "Rivers: Rhine, Rhine, Rhine and Danube."),
    ]
    file.write_text("".join(json.dumps({"title": title, "text": text}) + "\n" for title, text in rows))
    return file


def test_search_finds_the_best_first(corpus: Path) -> None:
    box = make_toolbox(["search"], {"search": {"path": str(corpus), "results": 2, "passage_letters": 20}})
    assert answer(box, "search", query="rhine").splitlines() == [
        "[1] Rivers: Rhine, Rhine",
        "[2] Bonn: Bonn lies on the Rhi",
    ]
    assert answer(box, "search", query="towers?").startswith("[1] Ulm: The minster")
    assert answer(box, "search", query="zeppelin") == "nothing found"


def test_any_text_is_a_query() -> None:
    tool = SearchTool(str(Path(__file__).parents[2] / "docs"), results=1)

    @given(st.text(max_size=60))
    def ask(query: str) -> None:
        assert isinstance(tool.search(query), str)

    ask()


def test_a_corpus_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        SearchTool(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"no \.txt or \.md"):
        SearchTool(str(tmp_path))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"title": "b"}\n')
    with pytest.raises(ConfigError, match="with 'text'") as error:
        SearchTool(str(tmp_path / "bad.jsonl"))
    assert error.value.where.endswith(":2")
    with pytest.raises(ConfigError, match="path"):
        make_toolbox(["search"], {})


# ---------------------------------------------------------------- python


def test_python_in_a_sandbox() -> None:
    results = {
        "print(1)": SandboxResult(status="finished", stdout="1\n"),
        "1/0": SandboxResult(status="finished", exit_code=1, stderr="ZeroDivisionError"),
        "while 1: 0": SandboxResult(status="timeout", stdout="so far"),
    }

    def run(code: str, *, timeout_s: float | None) -> SandboxResult:
        if code == "gone":
            raise WorkError("internal", "no bubblewrap")
        return results[code]

    box = make_toolbox(
        ["python"],
        {"python": {"timeout_s": 3}},
        sandbox=lambda: SimpleNamespace(run=run, close=lambda: None, at_once=1),
    )
    assert answer(box, "python", code="print(1)") == "1\n"
    assert answer(box, "python", code="1/0") == "ZeroDivisionError\n[exit code 1]"
    assert answer(box, "python", code="while 1: 0") == "so far\n[timeout]"
    with pytest.raises(EnvironmentFailure, match="the sandbox: no bubblewrap"):
        answer(box, "python", code="gone")


def test_a_program_waits_for_its_place_before_its_time_begins_and_outside_of_the_pool_of_asyncio() -> None:
    started: list[str] = []
    release = threading.Event()

    def run(code: str, *, timeout_s: float | None) -> SandboxResult:
        started.append(code)
        assert release.wait(60)
        return SandboxResult(status="finished", stdout=code)

    class Pool(ThreadPoolExecutor):
        def submit(self, *_: Any) -> Any:  # type: ignore[override]
            raise AssertionError("the pool that weight updates need")

    async def play() -> None:
        asyncio.get_running_loop().set_default_executor(Pool(1))
        box = make_toolbox(["python"], {}, sandbox=lambda: SimpleNamespace(run=run, close=lambda: None, at_once=1))
        first = asyncio.create_task(box.call(ToolCall("python", {"code": "1"}), timeout_s=60))
        second = asyncio.create_task(box.call(ToolCall("python", {"code": "2"}), timeout_s=0.1))
        try:
            await asyncio.wait({first, second}, timeout=0.4)
            assert not second.done() and "2" not in started
        finally:
            release.set()
        assert await first == "1"
        await second

    asyncio.run(asyncio.wait_for(play(), 60))


def test_python_for_real() -> None:
    box = make_toolbox(["python"], {}, sandbox=lambda: open_sandbox("none", SandboxLimits(timeout_s=60), workers=1))
    assert answer(box, "python", 80.0, code="print(6 * 7)").strip() == "42"


def test_tools_that_keep_state_have_one_for_each_sample() -> None:
    box = make_toolbox(
        ["python", "shell"],
        {"python": {"keep_state": True}},
        sandbox=lambda: open_sandbox("none", SandboxLimits(timeout_s=60), workers=2),
    )

    async def run() -> None:
        one, other = box.begin(), box.begin()
        try:

            async def say(tools: Any, name: str, **arguments: Any) -> Any:
                return await tools.call(ToolCall(name, arguments), timeout_s=60)

            assert await say(one, "python", code="x = 20") == ""
            assert await say(one, "python", code="x + 1") == "21\n"
            assert "NameError" in await say(other, "python", code="x")
            assert "variables and files are lost" in await say(one, "python", code="import os; os._exit(1)")
            assert await say(one, "shell", command="echo hi > note") == ""
            assert await say(one, "shell", command="cat note") == "hi\n"
            assert "error: shell: " in await say(one, "shell", code="ls")
        finally:
            await one.end()
            await other.end()
            await box.close()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_state_needs_a_sandbox_that_keeps_it() -> None:
    for tools in (["shell"], ["python"]):
        with pytest.raises(ConfigError, match="keeps no state"):
            make_toolbox(tools, {"python": {"keep_state": True}}, sandbox=lambda: open_sandbox("http://127.0.0.1:1"))


# ---------------------------------------------------------------- MCP

SERVER = """
from mcp.server import MCPServer

server = MCPServer("test")

@server.tool()
def double(number: int) -> str:
    "Twice a number."
    if number < 0:
        raise ValueError("too small")
    return str(2 * number)

@server.tool()
def leave() -> str:
    "End the server."
    import os
    os._exit(3)

server.run()
"""


def mcp_box(tmp_path: Path, source: str = SERVER, **settings: Any) -> Toolbox:
    (tmp_path / "server.py").write_text(source)
    mine = {"command": sys.executable, "args": [str(tmp_path / "server.py")], **settings}
    return make_toolbox(["mcp:test", "calculator"], {"mcp": {"test": mine}})


def test_tools_of_an_mcp_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    box = mcp_box(tmp_path)

    async def run() -> list[str]:
        await box.open()
        try:
            calls = [
                ToolCall("double", {"number": 4}),
                ToolCall("double", {"number": -1}),
                ToolCall("double", {}),
                ToolCall("calculator", {"expression": "1+1"}),
            ]
            return [await box.call(call, timeout_s=60) for call in calls]
        finally:
            await box.close()

    right, wrong, missing, other = asyncio.run(asyncio.wait_for(run(), 120))
    assert (right, other) == ("8", "2")
    assert wrong.startswith("error:") and "double" in wrong
    assert missing.startswith("error:")
    double = box.schemas[1]["function"]
    assert (double["name"], double["description"]) == ("double", "Twice a number.")
    assert double["parameters"]["properties"]["number"]["type"] == "integer"


def test_an_mcp_server_that_leaves_fails_the_sample_and_is_started_again(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    box = mcp_box(tmp_path)

    async def run() -> list[str]:
        await box.open()
        try:
            with pytest.raises(EnvironmentFailure, match=r"environment.raised: the MCP server 'test' is gone"):
                await box.call(ToolCall("leave", {}), timeout_s=60)
            both = (box.call(ToolCall("double", {"number": number}), timeout_s=60) for number in (1, 2))
            answers = await asyncio.gather(*both)
            (tmp_path / "server.py").write_text("raise SystemExit(1)")
            with pytest.raises(EnvironmentFailure, match="is gone"):
                await box.call(ToolCall("leave", {}), timeout_s=60)
            with pytest.raises(EnvironmentFailure, match="does not start"):
                await box.call(ToolCall("double", {"number": 3}), timeout_s=60)
            return list(answers)
        finally:
            await box.close()

    assert asyncio.run(asyncio.wait_for(run(), 120)) == ["2", "4"]


BY_URL = SERVER.replace(
    "server.run()",
    """
import os, sys
from pathlib import Path
from mcp.server.mcpserver import Context

@server.tool()
def authorized(context: Context) -> str:
    "The token of the request."
    return str(context.request_context.request.headers.get("authorization"))

server.run(transport="streamable-http", port=int(sys.argv[1]))
""",
)


def test_an_mcp_server_by_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was started by somebody else: it is not ended with the tools, and they find it again."""
    pytest.importorskip("mcp")
    monkeypatch.setenv("A_TOKEN", "secret")
    (tmp_path / "server.py").write_text(BY_URL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start() -> subprocess.Popen[bytes]:
        server = subprocess.Popen([sys.executable, str(tmp_path / "server.py"), str(port)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            time.sleep(0.05)
        return server

    mine = {"url": f"http://127.0.0.1:{port}/mcp", "token_env": "A_TOKEN"}
    box = make_toolbox(["mcp:test"], {"mcp": {"test": mine}})

    async def run(server: subprocess.Popen[bytes]) -> None:
        await box.open()
        try:
            assert await box.call(ToolCall("double", {"number": 4}), timeout_s=60) == "8"
            assert await box.call(ToolCall("authorized", {}), timeout_s=60) == "Bearer secret"
            server.kill()
            server.wait()
            with pytest.raises(EnvironmentFailure, match="is gone"):
                await box.call(ToolCall("double", {"number": 5}), timeout_s=60)
            servers.append(start())
            assert await box.call(ToolCall("double", {"number": 5}), timeout_s=60) == "10"
        finally:
            await box.close()

    servers = [start()]
    try:
        asyncio.run(asyncio.wait_for(run(servers[0]), 120))
        assert servers[-1].poll() is None
    finally:
        for server in servers:
            server.kill()
            server.wait()


@pytest.mark.parametrize("settings", [{}, {"command": "x", "url": "http://y"}, {"command": "x", "token_env": "T"}])
def test_an_mcp_server_has_a_command_or_an_address(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set `command`, or `url`"):
        make_toolbox(["mcp:test"], {"mcp": {"test": settings}})


def test_an_mcp_server_that_does_not_come_up_or_lacks_a_tool(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    with pytest.raises(ConfigError) as error:
        asyncio.run(asyncio.wait_for(mcp_box(tmp_path, "raise SystemExit(1)").open(), 120))
    assert error.value.code == "config.environment"
    with pytest.raises(ConfigError, match="needs settings"):
        make_toolbox(["mcp:other"], {})
