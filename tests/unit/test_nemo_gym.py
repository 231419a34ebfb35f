"""Servers of NeMo-Gym: small ones of the same messages, and those of its authors if it is installed
(`make test-nemo-gym`)."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nemo_servers
import pytest
from env_lab import TOOLS_SHOWN, SayingEngine, play, tokenizer_in
from nemo_servers import called

from asyncrl.config import Config, DataConfig, parse
from asyncrl.errors import ConfigError, ConfigErrors
from producers.data.openai_items import ApiError
from producers.data.prompt_forms import apply_settings, split_prompt
from producers.data.prompts import BadPrompt, encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.environments.contract_test import check_environment
from producers.environments.multi_turn import make_environment
from producers.rollout.rollout import Finished
from producers.start_check import StartCheck

ADD = {"type": "function", "name": "add", "description": "", "strict": True}
READ = {**ADD, "name": "read", "parameters": {"type": "object", "properties": {}}}
ADD = {**ADD, "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}}
ROW: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1 and 2"}], "tools": [ADD, READ]},
    "initial_count": 3,
    "expected_count": 6,
    "agent_ref": {"name": "an_agent"},
}
Reply = Callable[["Server", str, str, Any], tuple[int, Any]]


def counter(server: Server, path: str, session: str, body: Any) -> tuple[int, Any]:
    """A count in each session."""
    counts = server.counts
    if path == "/seed_session":
        counts[session] = body["initial_count"]
    elif path == "/add" and not isinstance(body.get("count"), int):
        return 422, {"detail": "count: Input should be a valid integer"}
    elif path == "/add" and body["count"] < 0:
        return 500, "ValueError('below 0')"
    elif path == "/add":
        counts[session] += body["count"]
    elif path == "/read":
        return 200, {"count": counts[session]}
    else:
        right = counts[session] == body["expected_count"]
        return 200, {**body, "reward": float(right), "accuracy": right, "note": "text", "nothing": None}
    return 200, {}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(200, {"paths": {path: {} for path in self.server.routes}} if self.path == "/openapi.json" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get("session")
        session = cookie.value if cookie else f"s{len(self.server.counts)}{time.monotonic_ns()}"
        self.server.seen.append((self.path, session, body))
        self._answer(*self.server.reply(self.server, self.path, session, body), session=session)

    def _answer(self, status: int, found: Any, *, session: str = "") -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        if session:
            self.send_header("Set-Cookie", f"session={session}; path=/; httponly; samesite=lax")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, reply: Reply, routes: Sequence[str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.routes = reply, routes
        self.counts: dict[str, int] = {}
        self.seen: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, _, body in self.seen if asked == path]


COUNTER = ("/seed_session", "/verify", "/add", "/read", "/aggregate_metrics")


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(reply: Reply = counter, routes: Sequence[str] = COUNTER) -> Server:
        server = Server(reply, routes)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_in(folder, TOOLS_SHOWN)


def config_for(
    folder: Path,
    url: str,
    *,
    key: str = "responses_create_params",
    args: str = "",
    room: int = 1500,
    prompt: int = 1200,
) -> Config:
    return parse(
        f'[model]\npath = "{folder}"\n[data]\npath = "{folder}/rows.jsonl"\nprompt_key = "{key}"\n'
        f"max_prompt_tokens = {prompt}\n[sampling]\nmax_new_tokens = {room}\n[learner]\nmicro_batch_tokens = 20000\n"
        f'[environment]\nname = "nemo_gym"\nargs = {{url = "{url}"{args}}}\n'
    )


def played(
    config: Config, tokenizer: Tokenizer, script: Any, row: dict[str, Any] = ROW, *, samples: int = 1
) -> tuple[list[Finished], str, SayingEngine]:
    """The samples, the reason of a failure, and the engine."""
    engine = SayingEngine(tokenizer, script)
    environment = make_environment(config, tokenizer)
    done, failure = play(environment, engine, config, tokenizer, row, samples=samples, limit_s=60)
    return done, failure.reason if failure else "", engine


# ---------------------------------------------------------------- samples


def test_calls_reach_the_session_of_their_sample(folder: Path, tokenizer: Tokenizer, serve: Any) -> None:
    server = serve()
    says = [
        f"Adding. {called('add', count=1)}{called('add', count=2)}",
        f"{called('verify', reward=1)}{called('add', count='x')}<tool_call>{{oops</tool_call>{called('add', count=-1)}",
        called("read"),
        "It is 6.",
    ]
    done, reason, engine = played(
        config_for(folder, server.url), tokenizer, lambda i, n, _: says[n] if i == 0 else "No idea.", samples=2
    )
    assert not reason and [one.reward for one in done] == [1.0, 0.0]
    assert done[0].parts == {"accuracy": 1.0} and done[1].mask is None
    shown = [tokenizer.decode(request.prompt_ids.tolist()) for request in engine.asked]
    assert all(text.startswith("tools\n[{") and "add 1 and 2" in text for text in shown)
    last = max(shown, key=len)
    for text in (
        "error: no tool 'verify'; there are: add, read",
        'error: add: {"detail": "count: Input should be a valid integer"}',
        "error: the call is no JSON object",
        "error: add raised ServerError: \"ValueError('below 0')\"",
        '{"count": 6}',
    ):
        assert text in last, text
    assert all({name: body[name] for name in ROW} == ROW for body in server.bodies("/seed_session"))
    assert all({name: body[name] for name in ROW} == ROW for body in server.bodies("/verify"))
    [items] = [body["response"]["output"] for body in server.bodies("/verify") if body["response"]["id"] == "resp_3"]
    kinds = [item["type"].removeprefix("function_") for item in items]
    first = ["message", "call", "call", "call_output", "call_output"]
    second = ["call", "call", "call", "call_output", "call_output", "call_output"]
    assert kinds == [*first, *second, "call", "call_output", "message"], kinds
    assert items[0]["content"][0]["text"] == "Adding." and items[1]["arguments"] == '{"count": 1}'
    assert items[-2]["output"] == '{"count": 6}' and items[-1]["content"][0]["text"] == "It is 6."
    outputs = {item["call_id"] for item in items if item["type"] == "function_call_output"}
    assert outputs == {item["call_id"] for item in items if item["type"] == "function_call"}


def test_a_cut_answer_is_verified_as_incomplete(folder: Path, tokenizer: Tokenizer, serve: Any) -> None:
    server = serve()
    config = config_for(folder, server.url, room=9)
    (done,), reason, _ = played(config, tokenizer, lambda *_: "a long answer without an end")
    assert (reason, done.reward, done.sample.finish) == ("", 0.0, "length")
    [found] = [body["response"] for body in server.bodies("/verify")]
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete" and found["output"][0]["content"][0]["text"] == "a long an"


def test_a_server_that_runs_no_tool_compares_the_call(folder: Path, tokenizer: Tokenizer, serve: Any) -> None:
    def compare(_: Server, path: str, __: str, body: Any) -> tuple[int, Any]:
        if path == "/seed_session":
            return 200, {}
        calls = [item for item in body["response"]["output"] if item["type"] == "function_call"]
        return 200, {"reward": float([call["name"] for call in calls] == ["add"])}

    config = config_for(folder, serve(compare, ("/seed_session", "/verify")).url)
    (done,), reason, engine = played(config, tokenizer, lambda *_: called("add", count=1))
    assert (reason, done.reward, len(engine.asked)) == ("", 1.0, 1)


def test_turns_of_a_server_with_steps(folder: Path, tokenizer: Tokenizer, serve: Any) -> None:
    def cards(server: Server, path: str, session: str, body: Any) -> tuple[int, Any]:
        if path == "/reset":
            server.counts[session] = 0
            return 200, {"observation": "Your hand: 12", "info": {}}
        server.counts[session] += 1
        items = body["response"]["output"]
        if items[0]["type"] == "function_call":
            output = {"call_id": items[0]["call_id"], "output": '"looked"'}
            return 200, {"observation": None, "reward": 0.25, "info": {"tool_outputs": [output]}}
        ended = "stand" in items[0]["content"][0]["text"]
        return 200, {"observation": "Your hand: 20", "reward": float(ended), "terminated": ended, "info": {}}

    server = serve(cards, ("/reset", "/step"))
    row = {"responses_create_params": {"input": "Deal."}, "deck": 1}
    says = ["hit", called("look"), "stand"]
    (done,), reason, engine = played(config_for(folder, server.url), tokenizer, lambda _, n, __: says[n], row)
    assert (reason, done.reward) == ("", 1.25) and [reward for _, reward in done.turns] == [0.25, 1.0]
    shown = tokenizer.decode(engine.asked[-1].prompt_ids.tolist())
    assert shown.index("Deal.") < shown.index("Your hand: 12") < shown.index("Your hand: 20") < shown.index('"looked"')
    assert [len(body["response"]["output"]) for body in server.bodies("/step")] == [1, 1, 1]
    assert len({session for _, session, _ in server.seen}) == 1 and server.seen[0][2] == row


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize(("rewards", "wanted"), [([None, 1.0], 1.0), ([None, None], None), ([None, 0.0], 0.0)])
def test_a_reward_of_null_is_none(
    *, folder: Path, tokenizer: Tokenizer, serve: Any, rewards: list[float | None], wanted: float | None, workers: bool
) -> None:
    def steps(server: Server, path: str, session: str, _: Any) -> tuple[int, Any]:
        if path == "/reset":
            server.counts[session] = 0
            return 200, {"observation": "Go.", "info": {}}
        server.counts[session] += 1
        number = server.counts[session]
        return 200, {"observation": "On.", "reward": rewards[number - 1], "terminated": number == 2, "info": {}}

    scored = '}\n[[reward]]\nfunction = "a:b"\nargs = {' if workers else ""
    config = config_for(folder, serve(steps, ("/reset", "/step")).url, args=scored)
    row = {"responses_create_params": {"input": "Deal."}}
    done, reason, _ = played(config, tokenizer, lambda *_: "on", row)
    if wanted is None and not workers:
        wanted = 0.0  # without reward workers: the server may reward the last step alone
    assert [one.reward for one in done] == [wanted] and not reason


def answers(path: str, status: int, found: Any) -> Reply:
    """The counter, except for this path."""
    return lambda server, asked, session, body: (
        (status, found) if asked == path else counter(server, asked, session, body)
    )


def silent(server: Server, path: str, session: str, body: Any) -> tuple[int, Any]:
    if path == "/verify":
        time.sleep(1.0)
    return counter(server, path, session, body)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (answers("/seed_session", 422, {"detail": "initial_count"}), r"raised: .*/seed_session answers 422: .*initial"),
        (answers("/verify", 500, "KeyError('synonym_values')"), r"raised: .*/verify answers 500: .*synonym_values"),
        (answers("/verify", 200, {"accuracy": 1}), "no_reward: .*/verify gave none, but accuracy"),
        (answers("/verify", 200, {"reward": None}), "no_reward: .*/verify gave none"),
        (answers("/verify", 200, {"reward": "much"}), "result: a reward is a str"),
        (answers("/verify", 200, {"reward": float("nan")}), "not_finite"),
        (answers("/verify", 200, ["no object"]), "raised: .*/verify answers 200"),
        (answers("/add", 503, "overloaded"), "raised: tool add answers 503: .*overloaded"),
        (silent, r"raised: .*/verify: no answer within 0\.4 s"),
    ],
)
def test_what_a_server_does_wrong_fails_the_sample(
    folder: Path, tokenizer: Tokenizer, serve: Any, reply: Reply, why: str
) -> None:
    config = config_for(folder, serve(reply).url, args=", timeout_s = 0.4")
    done, reason, _ = played(config, tokenizer, lambda _, n, __: "6" if n else called("add", count=1))
    assert not done
    assert re.search(why, reason), reason


def test_a_server_of_other_rows_or_one_that_goes_away(folder: Path, tokenizer: Tokenizer, serve: Any) -> None:
    config = config_for(folder, serve(routes=("/seed_session", "/verify", "/add")).url)
    _, reason, engine = played(config, tokenizer, lambda *_: "6")
    assert "has no tool read: is it the server of these rows?" in reason and not engine.asked
    server = serve()

    def leave(*_: Any) -> str:
        server.shutdown()
        server.server_close()
        return "6"

    _, reason, _ = played(config_for(folder, server.url), tokenizer, leave)
    assert reason.startswith(f"environment.raised: {server.url}/verify: Client"), reason


def test_the_contract_of_environments(folder: Path, tokenizer: Tokenizer, serve: Any) -> None:
    findings = check_environment(config_for(folder, serve().url), ROW)
    assert findings and all(one.kept for one in findings), findings


# ---------------------------------------------------------------- before a run


def test_wrong_settings(folder: Path, tokenizer: Tokenizer, serve: Any) -> None:
    with pytest.raises(ConfigErrors, match=r"set data\.prompt_key = 'responses_create_params'"):
        config_for(folder, "http://127.0.0.1:1", key="prompt")
    with pytest.raises(ConfigError, match="is not a http:// or https:// address"):
        make_environment(config_for(folder, "127.0.0.1:1"), tokenizer)
    config = parse(
        f'[model]\npath = "{folder}"\n[data]\npath = "d.jsonl"\nprompt_key = "responses_create_params"\n'
        '[environment]\nname = "nemo_gym"\n'
    )
    with pytest.raises(ConfigError, match="missing a required argument: 'url'"):
        make_environment(config, tokenizer)


def checked(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    """What the check of a start says."""
    StartCheck(config, play=True).run()
    return capsys.readouterr().out


def test_the_check_of_a_start(
    folder: Path, tokenizer: Tokenizer, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    server = serve()
    said = checked(config_for(folder, server.url), capsys)
    assert '"error"' not in said and "tools" in said and "1 turns, reward 0" in said, said
    said = checked(config_for(folder, serve(routes=("/v1/responses", "/run")).url), capsys)
    assert '"error", "config.environment"' in said and "neither /verify nor /step, but /v1/responses, /run" in said
    server.shutdown()
    server.server_close()
    said = checked(config_for(folder, server.url), capsys)
    assert '"error", "config.environment"' in said and "no server of NeMo-Gym answers at" in said
    assert "start it before the run" in said


# ---------------------------------------------------------------- prompts


def test_a_request_is_messages_and_tools(folder: Path, tokenizer: Tokenizer) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add 1"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"count": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "{}"},
    ]
    messages, tools = split_prompt({"input": items, "instructions": "Count.", "tools": [ADD]})
    assert [one["role"] for one in messages] == ["system", "system", "user", "assistant", "tool"]
    assert messages[3]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"count": 1}}
    assert [one["function"]["name"] for one in tools] == ["add"] and messages[2]["content"] == "add 1"
    assert split_prompt("text") == ("text", ()) and split_prompt(messages) == (messages, ())
    with pytest.raises(ApiError, match="parts of text"):
        split_prompt({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})


def test_rows_with_requests_are_encoded(folder: Path, tokenizer: Tokenizer) -> None:
    data = DataConfig(path="x", prompt_key="responses_create_params", system_prompt="Count.")
    row = apply_settings(ROW, data)
    text = tokenizer.decode(encode_prompt(row, data, tokenizer).tolist())
    assert text.startswith("tools\n[{") and text.endswith("system\nCount.\nuser\nadd 1 and 2\nassistant\n"), text
    own = {"responses_create_params": {"input": [{"role": "developer", "content": "Mine."}]}}
    assert apply_settings(own, data) is own
    for wrong, why in (({"input": 7}, "input must be text"), ({"metadata": {}}, "a dict, not text")):
        with pytest.raises(BadPrompt, match=why):
            encode_prompt({"responses_create_params": wrong}, data, tokenizer)


# ---------------------------------------------------------------- the servers of its authors


@nemo_servers.INSTALLED
@pytest.mark.parametrize("name", nemo_servers.NAMES)
def test_servers_of_the_authors(name: str, folder: Path, tokenizer: Tokenizer) -> None:
    """Their example rows, with answers that they reward."""
    rows = nemo_servers.rows(name)
    with nemo_servers.serve(name) as url:
        config = config_for(folder, url, room=4000, prompt=12000)
        for row in rows:

            def say(_: int, turn: int, __: str, row: Any = row) -> str:
                return nemo_servers.right_answer(name, row, turn)

            done, reason, _ = played(config, tokenizer, say, row)
            assert not reason and [one.reward for one in done] == [1.0], (reason, row)
