"""Programs on a SandboxFusion server, or on ours (`producers.sandbox.server`), by its route POST /run_code.

Guarantees:
1. the statuses of the server become those of `producers.sandbox.base`; the server does not distinguish memory and
   output, so the program's output decides;
2. a server that does not answer is tried `TRIES` times, then `sandbox.failed`; so is an invalid answer;
3. an answer is read up to the limits.
The server decides the isolation.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
from typing import Any

from asyncrl.errors import UNREADABLE, Unavailable
from producers.sandbox.base import MIB, Sandbox, SandboxJob, SandboxLimits, SandboxResult, check_job
from producers.support.http_post import TooLong, post

ROUTE = "/run_code"
HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
TRIES = 3
PAUSE_S = 1.0
ANSWER_S = 15.0  # beyond the program's own time
KILLED_BY_TIME = -9


class HTTPSandbox(Sandbox):
    """A client of one server."""

    def __init__(self, url: str, limits: SandboxLimits | None = None) -> None:
        super().__init__(limits)
        self.url = url if url.rstrip("/").endswith(ROUTE) else url.rstrip("/") + ROUTE

    def run_job(self, job: SandboxJob) -> SandboxResult:
        """Run one program to its end."""
        check_job(job)
        timeout_s = job.timeout_s if job.timeout_s is not None else self.limits.timeout_s
        memory = job.memory_bytes if job.memory_bytes is not None else self.limits.memory_bytes
        answer = self._ask(
            {
                "code": job.code,
                "stdin": job.stdin,
                "language": "python",
                "args": list(job.args),
                "compile_timeout": timeout_s,
                "run_timeout": timeout_s,
                "memory_limit_MB": max(1, memory // MIB),
                "files": {name: base64.b64encode(content).decode() for name, content in job.files.items()},
                "fetch_files": list(job.fetch),
            },
            timeout_s=timeout_s + ANSWER_S,
            most_bytes=8 * self.limits.output_bytes * (2 + len(job.fetch)) + MIB,
        )
        try:
            return read_result(answer, self.limits.output_bytes)
        except (*UNREADABLE, KeyError, TypeError, AttributeError) as error:
            raise Unavailable("sandbox.failed", f"{self.url}: it answered {answer!r:.200}: {error!r}") from None

    def _ask(self, body: dict[str, Any], *, timeout_s: float, most_bytes: int) -> Any:
        data, reason = json.dumps(body).encode(), ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S * attempt)
            try:
                return json.loads(post(self.url, data, HEADERS, timeout_s=timeout_s, most_bytes=most_bytes))
            except TooLong as error:
                raise Unavailable("sandbox.failed", f"{self.url}: {error}") from None
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code} {error.reason}"
                if error.code < 500:
                    break
            except (OSError, http.client.HTTPException, *UNREADABLE) as error:
                reason = str(error) or type(error).__name__
        raise Unavailable("sandbox.failed", f"{self.url}: {reason}")


def read_result(answer: dict[str, Any], output_bytes: int) -> SandboxResult:
    """The result in a server's answer. Raises if it is invalid."""
    run = answer.get("run_result")
    compiled = answer.get("compile_result")
    if compiled and (compiled["status"] != "Finished" or compiled.get("return_code")):
        run = compiled  # it did not run
    if answer["status"] == "SandboxError" or not run:
        raise Unavailable("sandbox.failed", f"the server failed: {answer.get('message') or answer['status']}")
    stdout, stderr = run.get("stdout") or "", run.get("stderr") or ""
    code = run.get("return_code")
    files = {name: base64.b64decode(content) for name, content in (answer.get("files") or {}).items()}
    status = {"Finished": "finished", "TimeLimitExceeded": "timeout", "Error": "error"}[run["status"]]
    if status == "finished" and code is None:
        raise ValueError("it has no return_code")
    if max(len(stdout), len(stderr)) >= output_bytes:
        status = "output"
    elif status == "finished" and code < 0:
        status = "killed"
    elif status == "finished" and code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
        status = "memory"
    return SandboxResult(
        status=status,
        exit_code=KILLED_BY_TIME if code is None else int(code),
        stdout=stdout[:output_bytes],
        stderr=stderr[:output_bytes],
        wall_s=float(run.get("execution_time") or 0.0),
        files=files,
    )
