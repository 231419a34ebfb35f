"""A reward from a server: POST {"query": [...], "prompts": [...], "labels": [...]}, as OpenRLHF sends it.

Guarantees:
1. the answer is JSON with `rewards`, one for each query (or a plain list of them); `scores` and `extra_logs` become
   parts; anything else is a failure of the samples, with the beginning of the answer in its text;
2. a server that does not answer is tried `tries` times, within the timeout of the call.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from typing import Any

from asyncrl.errors import UNREADABLE
from producers.support.http_post import TooLong, post

MOST_BYTES = 64 << 20


class RemoteReward:
    def __init__(
        self, url: str, *, timeout_s: float = 25.0, tries: int = 3, headers: dict[str, str] | None = None
    ) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._tries = tries
        self._headers = {"Content-Type": "application/json", **(headers or {})}

    def __call__(self, queries: list[str], prompts: list[str], labels: list[Any]) -> Any:
        body = json.dumps({"query": queries, "prompts": prompts, "labels": labels}).encode()
        deadline = time.monotonic() + self._timeout_s
        reason = ""
        for attempt in range(self._tries):
            left = deadline - time.monotonic() - attempt
            if left <= 0:
                break
            time.sleep(attempt)
            try:
                return self._post(body, left)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code} {error.reason}"
                if error.code < 500:
                    break
            except TooLong as error:
                raise RuntimeError(f"{self.url}: {error}") from None
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
        raise RuntimeError(f"{self.url}: {reason or 'no answer in time'}")

    def _post(self, body: bytes, timeout_s: float) -> Any:
        data = post(self.url, body, self._headers, timeout_s=timeout_s, most_bytes=MOST_BYTES)
        try:
            return json.loads(data)
        except UNREADABLE:
            raise TypeError(f"{self.url}: its answer is no JSON: {data[:80]!r}") from None
