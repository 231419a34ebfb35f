"""A judge behind an OpenAI-compatible server: `POST {url}/chat/completions` for every sample.

Made by `producers.rewards.judges.child`. Needs the extra `http` (aiohttp). Guarantees:
1. at most `concurrency` requests are under way and `max_requests_per_s` begin in a second, second requests included;
2. 408, 429, 5xx, no connection, an attempt's time-out and an answer that is no completion are tried again, up to
   `attempts`; `Retry-After` holds all requests back; what is longer than the sample has left is a failure at once;
3. any other refusal is a failure at once (`refused`); an answer without a number is `unparsed`, and asked again only
   where the temperature may give another one. No failure is ever a reward;
4. with `hedge` a call that is slower than 95 % of those so far is asked a second time: the first answer wins;
5. the key comes from an environment variable or a file that only its owner reads, and is in no message.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError
from producers.rewards.judges import rate_limit as pace
from producers.rewards.judges.templates import messages_of, number_in, summed, yes_share
from producers.rewards.outcome import Asked, Done, Problem, Verdict, checked, each
from producers.rewards.sample import RewardSample

AGAIN = frozenset({408, 425, 429})  # and 5xx
SHOWN = 200  # characters of a refusal
LONGEST_ANSWER = 8 << 20
TOP = 20  # likeliest words that are asked for; the most that the interface allows


class Again(Exception):
    """This attempt failed, and another one may not."""

    def __init__(self, problem: Problem, wait_s: float = 0.0) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.wait_s = wait_s


class Remote:
    def __init__(self, asked: Asked, *, rng: random.Random | None = None) -> None:
        self.table = asked.table
        self._timeout_s = asked.timeout_s
        self._attempt_s = asked.table.attempt_timeout_s or asked.timeout_s
        self._endpoint = f"{asked.table.url.rstrip('/')}/chat/completions"
        self._key = key_of(asked)
        self._pace = pace.Pace(asked.table.max_requests_per_s)
        self._slow = pace.Slow()
        self._rng = rng or random.Random()
        self._http: Any = None
        self._session: Any = None
        self.requests = self.retries = self.hedges = 0
        self._under_way = 0

    async def start(self) -> None:
        """Make the session; nothing is asked yet: a server may be up later than this."""
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("config.extra", "a judge with a url needs the extra http (aiohttp)") from None
        self._http = aiohttp
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def version(self) -> str:
        """Digest of what is asked, of which model, where."""
        table = self.table
        asked = [
            table.url,
            table.model,
            table.system,
            table.prompt,
            table.answer,
            table.pattern,
            table.range,
            table.yes,
            table.no,
            table.temperature,
            table.max_new_tokens,
        ]
        return hashlib.blake2b(msgspec.json.encode(asked), digest_size=8).hexdigest()

    async def score(self, samples: Sequence[RewardSample], done: Done) -> None:
        """All samples, so many at once."""
        await each(samples, self._one, done, timeout_s=self._timeout_s, at_once=self.table.concurrency)

    async def _one(self, sample: RewardSample) -> Verdict:
        body = self._body(sample)
        deadline = time.monotonic() + self._timeout_s
        last = Problem("unreachable", "no attempt was made")
        for attempt in range(1, self.table.attempts + 1):
            try:
                return await self._attempt(body)
            except Again as error:
                last = error.problem
                wait_s = max(error.wait_s, pace.backoff(attempt, self._rng))
                if attempt == self.table.attempts or time.monotonic() + wait_s > deadline:
                    break
                self.retries += 1
                await asyncio.sleep(wait_s)
        raise Problem(last.reason, f"{last.detail} (attempt {attempt} of {self.table.attempts})")

    async def _attempt(self, body: dict[str, Any]) -> Verdict:
        """One request, or two where it is slow."""

        async def call() -> dict[str, Any]:
            self._under_way += 1
            try:
                await self._pace.permit()
                return await self._post(body)
            finally:
                self._under_way -= 1

        def count() -> None:
            self.hedges += 1

        after_s = self._slow.after() if self.table.hedge else None
        answer: Any = await pace.hedged(
            call, after_s=after_s, may=lambda: self._under_way < self.table.concurrency, counted=count
        )
        return self._verdict(answer)

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests += 1
        started = time.monotonic()
        limit = self._http.ClientTimeout(total=self._attempt_s)
        try:
            async with self._session.post(
                self._endpoint,
                json=body,
                timeout=limit,
                allow_redirects=False,  # the key is for this server alone
            ) as response:
                raw = await response.content.read(LONGEST_ANSWER + 1)
                status, wait = response.status, response.headers.get("Retry-After")
                while len(raw) <= LONGEST_ANSWER and (more := await response.content.read(LONGEST_ANSWER)):
                    raw += more  # bounded: the attempt has its time, an answer its size
        except TimeoutError:
            raise Again(Problem("timeout", f"{self._endpoint}: no answer within {self._attempt_s:g} s")) from None
        except (self._http.ClientError, OSError) as error:
            raise Again(Problem("unreachable", f"{self._endpoint}: {type(error).__name__}: {error}"[:500])) from None
        if status != 200:
            self._refused(status, raw, wait)
        self._slow.took(time.monotonic() - started)
        return self._decoded(raw)

    def _refused(self, status: int, raw: bytes, wait: str | None) -> None:
        problem = Problem("refused", f"{self._endpoint}: HTTP {status}: {raw[:SHOWN].decode(errors='replace')}")
        if status not in AGAIN and status < 500:
            raise problem
        wait_s = pace.retry_after(wait, now=time.time())
        if wait_s:
            self._pace.leave_alone(min(wait_s, self._timeout_s))
        raise Again(problem, wait_s)

    def _decoded(self, raw: bytes) -> dict[str, Any]:
        try:
            if len(raw) > LONGEST_ANSWER:
                raise ValueError(f"more than {LONGEST_ANSWER} bytes")
            choice = msgspec.json.decode(raw)["choices"][0]
            if not isinstance(choice["message"]["content"], str):
                raise ValueError("its content is no text")
        except (KeyError, IndexError, TypeError, *UNREADABLE) as error:
            detail = f"{self._endpoint}: no completion ({type(error).__name__}: {error}): {raw[:SHOWN]!r}"
            raise Again(Problem("refused", detail)) from None
        found: dict[str, Any] = choice
        return found

    def _body(self, sample: RewardSample) -> dict[str, Any]:
        table = self.table
        messages = messages_of(table, sample)
        body = {"model": table.model, "messages": messages, "temperature": table.temperature, "n": 1}
        if table.answer == "yes_no":
            return {**body, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        return {**body, "max_tokens": table.max_new_tokens}

    def _verdict(self, choice: dict[str, Any]) -> Verdict:
        try:
            if self.table.answer == "yes_no":
                found = yes_share(self.table, summed(_likeliest(choice)))
            else:
                found = number_in(self.table, choice["message"]["content"])
        except Problem as problem:
            if problem.reason == "unparsed" and self.table.temperature:
                raise Again(problem) from None
            raise
        checked(found.value)
        return found


def _likeliest(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Words and log-probs of the first token. Raises Problem where the server gave none."""
    try:
        first = choice["logprobs"]["content"][0]
        return [(str(item["token"]), float(item["logprob"])) for item in first["top_logprobs"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Problem("refused", f"the server gives no top_logprobs ({type(error).__name__}: {error})") from None


def key_of(asked: Asked) -> str:
    """The key of the server, empty without one. Raises `config.missing` or `config.file`."""
    table = asked.table
    if table.api_key_env:
        key = os.environ.get(table.api_key_env, "").strip()
        if not key:
            remedy = f"export {table.api_key_env}=... before the start"
            raise ConfigError("config.missing", f"{table.api_key_env} is not set", where="api_key_env", remedy=remedy)
        return key
    if not table.api_key_file:
        return ""
    path = Path(table.api_key_file)
    try:
        key, mode = path.read_text().strip(), path.stat().st_mode & 0o077
    except (OSError, ValueError) as error:
        raise ConfigError("config.file", f"api_key_file: {error}", where=str(path)) from None
    if mode or not key:
        what = "the file is empty" if not key else "the file is readable by others"
        raise ConfigError("config.file", what, where=str(path), remedy=f"chmod 600 {path}")
    return key
