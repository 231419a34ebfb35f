"""SandboxFusion's route: what its answers mean to our client, and what our server refuses."""

from __future__ import annotations

import http.client
import http.server
import json
import struct
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from sandbox_lab import served

from asyncrl.errors import AsyncRLError
from producers.sandbox import SandboxLimits, open_sandbox, seccomp
from producers.sandbox.remote import read_result


def run_result(status: str = "Finished", code: int | None = 0, out: str = "", err: str = "") -> dict[str, Any]:
    return {"status": status, "execution_time": 0.25, "return_code": code, "stdout": out, "stderr": err}


#: Answers in the form of SandboxFusion's server, and what they mean.
ANSWERS = [
    ({"status": "Success", "message": "", "compile_result": None, "run_result": run_result(out="1\n")}, "finished", 0),
    ({"status": "Failed", "message": "", "run_result": run_result(code=1, err="ZeroDivisionError")}, "finished", 1),
    ({"status": "Failed", "run_result": run_result(code=1, err="Traceback\nMemoryError\n")}, "memory", 1),
    ({"status": "Failed", "run_result": run_result("TimeLimitExceeded", None)}, "timeout", -9),
    ({"status": "Failed", "run_result": run_result(code=-11)}, "killed", -11),
    ({"status": "Failed", "compile_result": run_result(code=1, err="error: ;"), "run_result": None}, "finished", 1),
    ({"status": "Success", "run_result": run_result(out="x" * 200)}, "output", 0),
    ({"status": "Failed", "run_result": run_result("Error", None)}, "error", -9),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "status", "code"), ANSWERS)
def test_what_an_answer_means(answer: dict[str, Any], status: str, code: int) -> None:
    result = read_result(answer, 100)
    assert (result.status, result.exit_code, result.wall_s) == (status, code, 0.25) and len(result.stdout) <= 100


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers what the test says."""

    said: list[tuple[int, bytes]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        code, body = self.said.pop(0)
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("producers.sandbox.remote.PAUSE_S", 0.01)
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    thread.join(60)
    found.server_close()


GOOD = json.dumps(ANSWERS[0][0]).encode()


def test_a_busy_server_is_asked_again(server: str) -> None:
    Handler.said = [(504, b""), (200, b"no json"), (200, GOOD)]
    assert open_sandbox(server + "/run_code").run("print(1)").stdout == "1\n"


@pytest.mark.parametrize(
    "said",
    [
        [(400, b"no")],
        [(500, b""), (500, b""), (500, b"")],
        [(200, b"[]")],
        [(200, b'{"status": "Success"}')],
        [(200, b'{"status": "SandboxError", "message": "no place"}')],
        [(200, b'"' + b"x" * (3 << 20) + b'"')],
        [(200, b'{"status": "Success", "run_result": {"status": "Strange"}}')],
    ],
)
def test_a_server_that_cannot_be_used_makes_no_result(server: str, said: list[tuple[int, bytes]]) -> None:
    Handler.said = list(said)
    with pytest.raises(AsyncRLError) as caught:
        open_sandbox(server, SandboxLimits(output_bytes=1000)).run("print(1)")
    assert caught.value.code == "sandbox.failed" and Handler.said == []


@pytest.fixture(scope="module")
def ours() -> Iterator[str]:
    with served(SandboxLimits()) as url:
        yield url


JSON = {"Content-Type": "application/json"}
HELLO = json.dumps({"code": "print('hello')", "language": "python"})


@pytest.mark.parametrize(
    ("headers", "body", "path", "code"),
    [
        (JSON, HELLO, "/run_code", 200),
        ({**JSON, "Host": "localhost:1"}, HELLO, "/run_code", 200),
        ({**JSON, "Host": "evil.example"}, HELLO, "/run_code", 403),
        ({**JSON, "Host": "["}, HELLO, "/run_code", 403),
        ({"Content-Type": "text/plain"}, HELLO, "/run_code", 403),
        ({}, HELLO, "/run_code", 403),
        (JSON, HELLO, "/other", 404),
        (JSON, "{", "/run_code", 422),
        (JSON, "[" * 5000, "/run_code", 422),
        (JSON, '{"language": "python"}', "/run_code", 422),
        (JSON, json.dumps({"code": "int main() {}", "language": "cpp"}), "/run_code", 422),
        (JSON, json.dumps({"code": "", "files": {"a": "no base 64!"}}), "/run_code", 422),
        ({**JSON, "Content-Length": str(1 << 40)}, None, "/run_code", 413),
        ({**JSON, "Content-Length": "many"}, None, "/run_code", 413),
        ({**JSON, "Content-Length": "9" * 5000}, None, "/run_code", 413),
    ],
)
def test_what_our_server_takes(ours: str, headers: dict[str, str], body: str | None, path: str, code: int) -> None:
    link = http.client.HTTPConnection(str(urlsplit(ours).netloc), timeout=60)
    link.request("POST", path, body, headers)
    answer = link.getresponse()
    tree = json.loads(answer.read())
    link.close()
    assert answer.status == code, tree
    assert code != 200 or tree["run_result"]["stdout"] == "hello\n"


def test_files_that_leave_the_folder_are_refused_by_our_server(ours: str) -> None:
    link = http.client.HTTPConnection(str(urlsplit(ours).netloc), timeout=60)
    link.request("POST", "/run_code", json.dumps({"code": "", "files": {"../x": ""}}), JSON)
    assert json.loads(link.getresponse().read())["status"] == "SandboxError"
    link.close()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_calls_jumps_within_itself_and_always_returns(machine: str) -> None:
    code = seccomp.program(machine)
    steps = list(struct.iter_unpack("=HBBI", code))
    assert len(code) % 8 == 0 and 100 < len(steps) < 4096
    for place, (kind, if_true, if_false, _) in enumerate(steps):
        if kind != seccomp.RETURN:
            assert place + 1 + max(if_true, if_false) < len(steps)
    assert steps[-1][0] == seccomp.RETURN and seccomp.program("riscv64") == b""
