"""`[[judge]]`: who scores what. Rewards of one judge are scored together, by worker processes of that judge alone.

Part of `asyncrl.config`; also called by `asyncrl.process_plan.plan`, the reward workers and the buffer. A
`[[reward]]` without
`judge` belongs to the default judge, whose settings are those of `[reward_workers]`; a `[[judge]]` table inherits what
it leaves out. Guarantees:
1. which judges are asked about a row is a pure function of the row's data source and the settings (`judges_for`): all
   that have a reward for it, in the order of the file; the first one where none has (its workers say why it fails);
2. `judges_of` gives every judge with its settings filled in, the default one only where a reward belongs to it.

Example: `[[judge]]` with `name = "slow"`, `count = 8`, `timeout_s = 120`, and `[[reward]]` with `function = "my:deep"`,
`judge = "slow"`: a sample is scored by a worker of the default judge and by one of `slow`, at the same time; its reward
is the sum of the two.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Section
from asyncrl.errors import UNREADABLE

if TYPE_CHECKING:
    from asyncrl.config import Config, RewardFunctionConfig

DEFAULT = ""  # name of the judge of rewards that name none
SHOWN_DEFAULT = "default"  # its name where people read it; no other judge may have it
NAME = r"[A-Za-z][A-Za-z0-9_]{0,31}"
_OrInherited = Annotated[int, Meta(ge=-1)]


class JudgeConfig(Section, frozen=True):
    """`[[judge]]`: worker processes of their own for the rewards that name it."""

    name: str  # letters, digits and _: what `judge` of a `[[reward]]` says
    count: Count = 0  # processes on this host; 0: reward_workers.count
    restarts: _OrInherited = -1  # in 10 minutes; -1: reward_workers.restarts
    timeout_s: Annotated[float, Meta(ge=0)] = 0.0  # of one call; 0: reward_workers.timeout_s
    retries: _OrInherited = -1  # on other workers of this judge; -1: reward_workers.retries
    batch_samples: Count = 0  # leased at once; 0: reward_workers.batch_samples
    memory_bytes: Count = 0  # of one process that runs functions; 0: reward_workers.memory_bytes
    kind: Literal["functions", "classifier", "generative", "url"] = "functions"  # functions of its rewards, or a model
    model: str = ""  # folder of the model; kind = url: the name that the server knows it by
    url: str = ""  # kind = url: an OpenAI-compatible server, such as http://127.0.0.1:8000/v1
    prompt: str = ""  # what it is asked, with {prompt} {response} {ground_truth} and {column}; generative and url
    system: str = ""  # a system message before it
    answer: Literal["pattern", "yes_no"] = "pattern"  # a number in its text, or the probability of yes against no
    pattern: str = r"(-?\d+(?:\.\d+)?)"  # the last match counts: its first group is the number; regular expression
    range: tuple[float, ...] = ()  # lowest and highest number that is an answer; any other is a failure; empty: all
    yes: tuple[str, ...] = ("yes", "Yes", "YES")  # answer = yes_no: what counts as yes
    no: tuple[str, ...] = ("no", "No", "NO")  # what counts as no
    label: int = -1  # kind = classifier with several labels: the reward is the probability of this one; -1: one label
    input: Literal["auto", "ids", "chat", "text"] = "auto"  # kind = classifier: ids where its tokenizer is the policy's
    engine: str = "hf"  # kind = generative: like producers.engine
    device: str = "auto"  # like producers.device
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: model.dtype
    max_tokens: Positive = 4096  # longest text that it is given; a longer one is a failure
    max_new_tokens: Positive = 256  # longest answer
    temperature: Annotated[float, Meta(ge=0)] = 0.0  # of its answer; 0: greedy
    concurrency: Positive = 16  # samples that one process has under way at once
    max_requests_per_s: Annotated[float, Meta(ge=0)] = 0.0  # kind = url, of one process; 0: no limit
    attempts: Positive = 4  # kind = url: of one request, after 429, 5xx, a broken answer or none
    attempt_timeout_s: Annotated[float, Meta(ge=0)] = 0.0  # kind = url: of one attempt; 0: timeout_s
    hedge: bool = False  # kind = url: a call slower than 95 % of the others is asked a second time; first answer wins
    api_key_env: str = ""  # kind = url: environment variable that holds the key
    api_key_file: str = ""  # kind = url: or a file that only its owner can read

    @property
    def is_model(self) -> bool:
        """Whether a model gives the reward instead of functions."""
        return self.kind != "functions"


class Judge(msgspec.Struct, frozen=True):
    """A judge with all of its settings; `data_sources` of its rewards together, empty: all rows."""

    name: str
    count: int
    restarts: int
    timeout_s: float
    retries: int
    batch_samples: int
    memory_bytes: int
    rewards: tuple[RewardFunctionConfig, ...]
    data_sources: tuple[str, ...]
    table: JudgeConfig  # with the settings of a model

    @property
    def shown(self) -> str:
        """Its name for people."""
        return shown(self.name)


def shown(name: str) -> str:
    """A judge's name for people.

    >>> shown(""), shown("slow")
    ('default', 'slow')
    """
    return name or SHOWN_DEFAULT


def named(text: str) -> str:
    """The name behind what people write.

    >>> named("default"), named("slow")
    ('', 'slow')
    """
    return DEFAULT if text == SHOWN_DEFAULT else text


def judges_of(config: Config) -> tuple[Judge, ...]:
    """Every judge that has rewards: the default one first, then those of the file in its order."""
    tables = {DEFAULT: JudgeConfig(DEFAULT)} | {table.name: table for table in config.judge}
    found = []
    for name, table in tables.items():
        rewards = tuple(reward for reward in config.reward if reward.judge == name)
        if rewards:
            found.append(_filled(table, rewards, config))
    return tuple(found)


def judge_of(config: Config, name: str) -> Judge | None:
    """The judge of that name, where it has rewards."""
    return next((judge for judge in judges_of(config) if judge.name == name), None)


def _filled(table: JudgeConfig, rewards: tuple[RewardFunctionConfig, ...], config: Config) -> Judge:
    own = config.reward_workers
    everywhere = any(not reward.data_sources for reward in rewards)
    sources = {} if everywhere else dict.fromkeys(source for reward in rewards for source in reward.data_sources)
    return Judge(
        name=table.name,
        count=table.count or own.count,
        restarts=own.restarts if table.restarts < 0 else table.restarts,
        timeout_s=table.timeout_s or own.timeout_s,
        retries=own.retries if table.retries < 0 else table.retries,
        batch_samples=table.batch_samples or own.batch_samples,
        memory_bytes=table.memory_bytes or own.memory_bytes,
        rewards=rewards,
        data_sources=tuple(sources),
        table=table,
    )


def judges_for(source: str, rules: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
    """The judges, of `(name, data sources)` each, that are asked about a row of this source.

    >>> rules = (("", ("math",)), ("style", ()))
    >>> judges_for("math", rules), judges_for("code", rules), judges_for("code", rules[:1])
    (('', 'style'), ('style',), ('',))
    """
    asked = tuple(name for name, sources in rules if not sources or source in sources)
    return asked or tuple(name for name, _ in rules[:1])


def data_source_of(row: str) -> str:
    """The data source in the JSON of a row; empty where it names none.

    >>> data_source_of('{"data_source":"math","n":1}'), data_source_of('{}'), data_source_of('')
    ('math', '', '')
    """
    try:
        found: Any = msgspec.json.decode(row)
    except UNREADABLE:
        return ""
    return str((found.get("data_source") if isinstance(found, dict) else "") or "")


def problems(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Code, message and path of the key of every contradiction."""
    names = [table.name for table in config.judge]
    for index, table in enumerate(config.judge):
        path = ("judge", f"[{index}]", "name")
        if not re.fullmatch(NAME, table.name) or table.name == SHOWN_DEFAULT:
            yield (
                "config.conflict",
                f"judge.name = {table.name!r}: it begins with a letter, has letters, digits and "
                f"_ alone, and is not {SHOWN_DEFAULT!r}",
                path,
            )
        if table.name in names[:index]:
            yield "config.conflict", f"judge.name = {table.name!r} is there twice", path
        if not any(reward.judge == table.name for reward in config.reward):
            yield (
                "config.conflict",
                f"judge {table.name!r} has no reward: no [[reward]] says judge = {table.name!r}",
                path,
            )
    for index, reward in enumerate(config.reward):
        if reward.judge and reward.judge not in names:
            near = difflib.get_close_matches(reward.judge, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; add [[judge]] with name = {reward.judge!r}"
            yield (
                "config.conflict",
                f"reward.judge = {reward.judge!r} is no [[judge]]{hint}",
                ("reward", f"[{index}]", "judge"),
            )
