"""One POST: what is followed, how long it may take, how much is read."""

from __future__ import annotations

import http.client
import http.server
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from producers.rewards.remote import RemoteReward
from producers.support.http_post import TooLong, post

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers what the test says; keeps what it was asked."""

    play: Callable[[Handler], None]
    seen: list[tuple[str, str | None]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        type(self).play(self)

    def says(self, code: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[str]:
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    Handler.seen.clear()
    yield f"http://127.0.0.1:{found.server_port}/score"
    found.shutdown()
    thread.join(60)
    found.server_close()


def asked(server: str, play: Callable[[Handler], None], **limits: Any) -> bytes:
    Handler.play = play
    return post(server, b"{}", HEADERS, **{"timeout_s": 30.0, "most_bytes": 1000, **limits})


def test_an_answer_is_read_whole(server: str) -> None:
    assert asked(server, lambda handler: handler.says(200, b"x" * 1000)) == b"x" * 1000


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_an_error_and_the_secret_stays_here(server: str, code: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        asked(server, lambda handler: handler.says(code, b"", Location="/elsewhere"))
    caught.value.close()
    assert caught.value.code == code and Handler.seen == [("/score", "Bearer s3cret")]
    with pytest.raises(RuntimeError, match=f"HTTP {code}"):
        RemoteReward(server, headers=HEADERS)(["q"], ["p"], ["l"])
    assert Handler.seen == [("/score", "Bearer s3cret")] * 2, "it is not asked again either"


def test_an_answer_beyond_the_limit_is_not_read(server: str) -> None:
    with pytest.raises(TooLong, match="longer than 1000 bytes"):
        asked(server, lambda handler: handler.says(200, b"x" * 100_000))


def test_half_an_answer_is_none(server: str) -> None:
    with pytest.raises(http.client.IncompleteRead):
        asked(server, lambda handler: handler.says(200, b"x", length=9))


@pytest.mark.timeout(300)
def test_a_server_that_sends_a_byte_now_and_then_holds_nobody(server: str) -> None:
    gone = threading.Event()

    def drip(handler: Handler) -> None:
        handler.says(200, b"", length=900)
        while not gone.is_set() and time.sleep(0.2) is None:
            try:
                handler.wfile.write(b"x")
            except OSError:
                return

    with pytest.raises(TimeoutError, match="no whole answer within 1 s"):
        asked(server, drip, timeout_s=1.0)
    gone.set()
