"""A judge behind an OpenAI-compatible server: `POST {url}/chat/completions` for every sample.

Needs the extra `http` (aiohttp). Guarantees:
1. at most `concurrency` requests are under way and `max_requests_per_s` begin in a second, with hedged ones;
2. 408, 429, 5xx, no connection, a time-out of an attempt and an invalid answer are retried, up to `attempts`;
   `Retry-After` holds all requests back; a wait longer than the sample's remaining time is a failure at once;
3. any other refusal is a failure at once (`refused`); an answer without a number is `unparsed`, and retried only if the
   temperature may give another one. No failure is ever a reward;
4. with `hedge` a call that is slower than 95 % of the others is sent a second time: the first answer wins;
5. the key comes from an environment variable or a file that only its owner can read, and is in no message.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from asyncrl.errors import UNREADABLE, ConfigError
from producers.rewards.judges import rate_limit as pace
from producers.rewards.judges.templates import judge_messages, number_in, question_digest, sum_logprobs, yes_share
from producers.rewards.outcome import JudgeSettings, Problem, Report, Verdict, require_finite, score_each
from producers.rewards.sample import RewardSample

RETRIED = frozenset({408, 425, 429})  # and 5xx
SHOWN = 200  # characters of a refusal
LONGEST_ANSWER = 8 << 20
TOP = 20  # likeliest words to request; the maximum of the interface


class RetryLater(Exception):
    """This attempt failed; a retry may succeed."""

    def __init__(self, problem: Problem, wait_s: float = 0.0) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.wait_s = wait_s


class Exchange(Protocol):
    """What is asked of a server, and how its answer is read. `path`: of the request, after the address."""

    path: str
    longest_answer: int  # bytes

    def body(self, sample: RewardSample) -> dict[str, Any]:
        """The request. Raises Problem for a sample that cannot be asked about."""

    def read(self, answer: Any, sample: RewardSample) -> Verdict:
        """The verdict in an answer. Raises Problem; RetryLater or another error if a second answer may be better."""


class Remote:
    def __init__(
        self, settings: JudgeSettings, *, exchange: Exchange | None = None, rng: random.Random | None = None
    ) -> None:
        self.table = settings.table
        self._exchange = exchange or ChatQuestion(settings)
        self._timeout_s = settings.timeout_s
        self._attempt_s = settings.table.attempt_timeout_s or settings.timeout_s
        self._endpoint = settings.table.url.rstrip("/") + self._exchange.path
        self._key = read_api_key(settings)
        self._pace = pace.Pace(settings.table.max_requests_per_s)
        self._slow = pace.Slow()
        self._rng = rng or random.Random()
        self._http: Any = None
        self._session: Any = None
        self.requests = self.retries = self.hedges = 0
        self._under_way = 0

    async def start(self) -> None:
        """Make the session; no request yet: the server may start later."""
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
        """Digest of the question, the model and the server."""
        return question_digest(self.table, self.table.url, self.table.model)

    async def score(self, samples: Sequence[RewardSample], done: Report) -> None:
        """Score all samples, `concurrency` at once."""
        await score_each(samples, self._one, done, timeout_s=self._timeout_s, at_once=self.table.concurrency)

    async def _one(self, sample: RewardSample) -> Verdict:
        body = self._exchange.body(sample)
        deadline = time.monotonic() + self._timeout_s
        last = Problem("unreachable", "no attempt was made")
        for attempt in range(1, self.table.attempts + 1):
            try:
                return await self._attempt(body, sample)
            except RetryLater as error:
                last = error.problem
                wait_s = max(error.wait_s, pace.backoff(attempt, self._rng))
                if attempt == self.table.attempts or time.monotonic() + wait_s > deadline:
                    break
                self.retries += 1
                await asyncio.sleep(wait_s)
        raise Problem(last.reason, f"{last.detail} (attempt {attempt} of {self.table.attempts})")

    async def _attempt(self, body: dict[str, Any], sample: RewardSample) -> Verdict:
        """One request, or two if it is slow."""

        async def call() -> bytes:
            self._under_way += 1
            try:
                await self._pace.permit()
                return await self._post(body)
            finally:
                self._under_way -= 1

        def count() -> None:
            self.hedges += 1

        after_s = self._slow.threshold_s() if self.table.hedge else None
        raw: Any = await pace.hedge(
            call, after_s=after_s, may=lambda: self._under_way < self.table.concurrency, counted=count
        )
        try:
            if len(raw) > self._exchange.longest_answer:
                raise ValueError(f"more than {self._exchange.longest_answer} bytes")
            return self._exchange.read(msgspec.json.decode(raw), sample)
        except (KeyError, IndexError, TypeError, *UNREADABLE) as error:
            detail = f"{self._endpoint}: no completion ({type(error).__name__}: {error}): {raw[:SHOWN]!r}"
            raise RetryLater(Problem("refused", detail)) from None

    async def _post(self, body: dict[str, Any]) -> bytes:
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
                longest = self._exchange.longest_answer
                raw: bytes = await response.content.read(longest + 1)
                status, wait = response.status, response.headers.get("Retry-After")
                while len(raw) <= longest and (more := await response.content.read(longest)):
                    raw += more  # bounded: the attempt has its time, the answer its size
        except TimeoutError:
            raise RetryLater(Problem("timeout", f"{self._endpoint}: no answer within {self._attempt_s:g} s")) from None
        except (self._http.ClientError, OSError) as error:
            raise RetryLater(
                Problem("unreachable", f"{self._endpoint}: {type(error).__name__}: {error}"[:500])
            ) from None
        if status != 200:
            self._raise_refusal(status, raw, wait)
        self._slow.record(time.monotonic() - started)
        return raw

    def _raise_refusal(self, status: int, raw: bytes, wait: str | None) -> None:
        problem = Problem("refused", f"{self._endpoint}: HTTP {status}: {raw[:SHOWN].decode(errors='replace')}")
        if status not in RETRIED and status < 500:
            raise problem
        wait_s = pace.retry_after(wait, now=time.time())
        if wait_s:
            self._pace.pause_for(min(wait_s, self._timeout_s))
        raise RetryLater(problem, wait_s)


class ChatQuestion:
    """A question to a chat model, whose answer has a number or is yes or no."""

    path = "/chat/completions"
    longest_answer = LONGEST_ANSWER

    def __init__(self, settings: JudgeSettings) -> None:
        self.table = settings.table

    def body(self, sample: RewardSample) -> dict[str, Any]:
        table = self.table
        messages = judge_messages(table, sample)
        body = {"model": table.model, "messages": messages, "temperature": table.temperature, "n": 1}
        if table.answer == "yes_no":
            return {**body, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        return {**body, "max_tokens": table.max_new_tokens}

    def read(self, answer: Any, sample: RewardSample) -> Verdict:
        choice = answer["choices"][0]
        if not isinstance(choice["message"]["content"], str):
            raise ValueError("its content is no text")
        try:
            if self.table.answer == "yes_no":
                found = yes_share(self.table, sum_logprobs(_likeliest(choice)))
            else:
                cut = choice.get("finish_reason") == "length"
                found = number_in(self.table, choice["message"]["content"], cut=cut)
        except Problem as problem:
            if problem.reason == "unparsed" and self.table.temperature:
                raise RetryLater(problem) from None
            raise
        require_finite(found.value)
        return found


def _likeliest(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Words and log-probs of the first token. Raises Problem without them."""
    try:
        first = choice["logprobs"]["content"][0]
        return [(str(item["token"]), float(item["logprob"])) for item in first["top_logprobs"]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Problem("refused", f"the server gives no top_logprobs ({type(error).__name__}: {error})") from None


def read_api_key(settings: JudgeSettings) -> str:
    """The key of the server, empty without one. Raises `config.missing` or `config.file`."""
    table = settings.table
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
