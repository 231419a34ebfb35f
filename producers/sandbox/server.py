"""A small server on loopback that runs programs in our sandbox and speaks SandboxFusion's route POST /run_code.

Run as `asyncrl sandbox-server` (`python -m producers.sandbox.server`), for code that expects such a server. Guarantees:
1. it listens only on loopback, answers only requests with a loopback Host and type application/json (a web page cannot
   reach it), and takes bodies up to `MAX_BODY_BYTES`;
2. time and memory of a request are limited to the server's own limits;
3. a program's failure is an answer with status `Failed`; a failure of the sandbox is `SandboxError`.
Only Python is supported.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncrl.errors import UNREADABLE, AsyncRLError
from asyncrl.net.descriptors import raise_descriptor_limit
from asyncrl.net.http_server import LimitedHandler, LimitedHTTPServer
from asyncrl.runtime.role import die_with_parent
from producers.sandbox import Sandbox, SandboxJob, SandboxLimits, SandboxResult, open_sandbox
from producers.sandbox.base import MIB

ROUTE = "/run_code"
MAX_BODY_BYTES = 16 * MIB
LOOPBACK = ("127.0.0.1", "localhost", "::1")
IDLE_S = 120.0  # of a connection between two requests
LANGUAGES = ("python", "python3")


class Request(msgspec.Struct):
    """The body of POST /run_code, by SandboxFusion's names; other fields are ignored."""

    code: str
    language: str = "python"
    stdin: str | None = None
    run_timeout: float | None = None
    memory_limit_MB: int = -1  # noqa: N815  # its name on the wire
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []
    args: list[str] = []


def build_job(request: Request, limits: SandboxLimits) -> SandboxJob:
    """The job of a request, within the limits."""
    memory = limits.memory_bytes if request.memory_limit_MB < 1 else request.memory_limit_MB * MIB
    return SandboxJob(
        code=request.code,
        stdin=request.stdin or "",
        args=tuple(request.args),
        fetch=tuple(request.fetch_files),
        files={name: decode_base64(content or "") for name, content in request.files.items()},
        timeout_s=min(limits.timeout_s, request.run_timeout or limits.timeout_s),
        memory_bytes=min(limits.memory_bytes, memory),
    )


def decode_base64(text: str) -> bytes:
    """The bytes of base64 text, with or without line breaks. Raises binascii.Error."""
    return base64.b64decode("".join(text.split()), validate=True)


def build_answer(result: SandboxResult) -> dict[str, Any]:
    """The answer in SandboxFusion's form."""
    kind = {"timeout": "TimeLimitExceeded", "error": "Error"}.get(result.status, "Finished")
    run = {
        "status": kind,
        "execution_time": result.wall_s,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "return_code": result.exit_code if kind == "Finished" else None,
    }
    return {
        "status": "SandboxError" if kind == "Error" else "Success" if result.ok else "Failed",
        "message": result.stderr if kind == "Error" else "",
        "compile_result": None,
        "run_result": run,
        "files": {name: base64.b64encode(content).decode() for name, content in result.files.items()},
    }


class Handler(LimitedHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    idle_s = IDLE_S

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        stated = self.headers.get("Content-Length") or ""
        length = int(stated) if stated.isdecimal() and len(stated) <= len(str(MAX_BODY_BYTES)) else -1
        if not self._is_allowed() or not 0 <= length <= MAX_BODY_BYTES or self.path != ROUTE:
            self.close_connection = True
            self._answer(403 if not self._is_allowed() else 404 if self.path != ROUTE else 413, {"message": "refused"})
            return
        body = self.rfile.read(length)
        try:
            request = msgspec.json.decode(body, type=Request)
            if request.language not in LANGUAGES:
                raise ValueError(f"language {request.language!r}: only python is run here")
            job = build_job(request, self.server.sandbox.limits)
        except (*UNREADABLE, binascii.Error) as error:
            self._answer(422, {"status": "SandboxError", "message": str(error)})
            return
        try:
            answer = build_answer(self.server.sandbox.run_job(job))
        except AsyncRLError as error:
            answer = {"status": "SandboxError", "message": error.message}
        self._answer(200, answer)

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        self._answer(200 if self.path == "/v1/ping" and self._is_allowed(body=False) else 404, "pong")

    def _is_allowed(self, *, body: bool = True) -> bool:
        try:
            host = urlsplit("//" + (self.headers.get("Host") or "")).hostname
        except ValueError:  # for example an incomplete IPv6 address
            return False
        kind = (self.headers.get("Content-Type") or "").partition(";")[0].strip()
        return host in LOOPBACK and (not body or kind == "application/json")

    def _answer(self, code: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        return


class Server(LimitedHTTPServer):
    """A thread for each connection; programs wait for a place in the sandbox."""

    def __init__(self, sandbox: Sandbox, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.sandbox = sandbox


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="asyncrl sandbox-server", description="run programs for SandboxFusion clients"
    )
    limits = SandboxLimits()
    result.add_argument("--port", type=int, default=8080, help="on 127.0.0.1; 0: any free one (default 8080)")
    result.add_argument("--kind", default="bubblewrap", help="bubblewrap, or none: without isolation")
    result.add_argument("--workers", type=int, default=2, help="programs at once")
    result.add_argument("--timeout-s", type=float, default=60.0, help="longest time of a program")
    result.add_argument("--memory-bytes", type=int, default=limits.memory_bytes, help="most memory of a program")
    result.add_argument("--output-bytes", type=int, default=limits.output_bytes, help="most output of a program")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    args = parser().parse_args(argv)
    die_with_parent()
    raise_descriptor_limit()
    limits = SandboxLimits(timeout_s=args.timeout_s, memory_bytes=args.memory_bytes, output_bytes=args.output_bytes)
    try:
        with open_sandbox(args.kind, limits, workers=args.workers) as sandbox:
            sandbox.run("pass")  # raises at once on a host without isolation
            return serve(sandbox, args.port)
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error[net.port_in_use] 127.0.0.1:{args.port}: {error}", file=sys.stderr)
        return 2


def serve(sandbox: Sandbox, port: int) -> int:
    """Answer requests until a signal."""
    server = Server(sandbox, port)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown, daemon=True).start())
    print(f"sandbox server on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever(poll_interval=0.2)
    server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
