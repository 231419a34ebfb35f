"""Judges: which reward workers score which rewards.

A `[[reward]]` without `judge` belongs to the default judge, which has the settings of `[reward_workers]`; a `[[judge]]`
table inherits the settings that it leaves out. Guarantees:
1. the judges of a row depend only on its data source and the settings (`judges_for`): all that have a reward for it, in
   the order of the file, or the first one if none has (its workers report the reason);
2. every judge is returned with all its settings; the default one only if a reward belongs to it;
3. a `[[teacher]]` is a judge too, after all others: it is asked like one, about rows of training alone, and answers
   with log-probs and the reward 0.

Example: `[[judge]]` with `name = "slow"`, `count = 8`, `timeout_s = 120`, and `[[reward]]` with `function = "my:deep"`,
`judge = "slow"`: a worker of the default judge and one of `slow` score a sample in parallel; its reward is the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.config.sections.reward import DEFAULT, SHOWN_DEFAULT, JudgeConfig
from asyncrl.config.sections.teacher import TeacherConfig
from asyncrl.errors import UNREADABLE
from asyncrl.evaluation.ids import SOURCE_CHARS

if TYPE_CHECKING:
    from asyncrl.config.sections.reward import RewardFunctionConfig
    from asyncrl.config.tree import Config


class Judge(msgspec.Struct, frozen=True):
    """A judge with all its settings. `data_sources`: of all its rewards; empty: all rows."""

    name: str
    count: int
    restarts: int
    timeout_s: float
    retries: int
    batch_samples: int
    memory_bytes: int
    rewards: tuple[RewardFunctionConfig, ...]
    data_sources: tuple[str, ...]
    table: JudgeConfig  # including the settings of a model
    teacher: TeacherConfig | None = None  # None: it gives rewards

    @property
    def display_name(self) -> str:
        return display_name(self.name)

    @property
    def env(self) -> tuple[str, ...]:
        """Environment variables that its processes need: those of its rewards, and the key of its server."""
        names = [name for reward in self.rewards for name in reward.env]
        return (*names, self.table.api_key_env) if self.table.api_key_env else tuple(names)


def display_name(name: str) -> str:
    """Display name of a judge.

    >>> display_name(""), display_name("slow")
    ('default', 'slow')
    """
    return name or SHOWN_DEFAULT


def parse_display_name(text: str) -> str:
    """The judge behind a display name.

    >>> parse_display_name("default"), parse_display_name("slow")
    ('', 'slow')
    """
    return DEFAULT if text == SHOWN_DEFAULT else text


def list_judges(config: Config) -> tuple[Judge, ...]:
    """Every judge that has rewards: the default one first, then in the order of the file; then the teachers."""
    tables = {DEFAULT: JudgeConfig(DEFAULT)} | {table.name: table for table in config.judge}
    found = []
    for name, table in tables.items():
        rewards = tuple(reward for reward in config.reward if reward.judge == name)
        if rewards:
            found.append(_fill_judge(table, rewards, config))
    return (*found, *map(_judge_of, config.teacher))


def list_teachers(config: Config) -> tuple[Judge, ...]:
    """The teachers as judges, in the order of the file."""
    return tuple(judge for judge in list_judges(config) if judge.teacher is not None)


def teacher_of(config: Config, source: str) -> str:
    """The teacher of rows of a data source; empty if they have none."""
    mine = (one.name for one in config.teacher if not one.data_sources or source in one.data_sources)
    return next(mine, "")


def find_judge(config: Config, name: str) -> Judge | None:
    """The judge of that name if it has rewards."""
    return next((judge for judge in list_judges(config) if judge.name == name), None)


def _fill_judge(table: JudgeConfig, rewards: tuple[RewardFunctionConfig, ...], config: Config) -> Judge:
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


def _judge_of(teacher: TeacherConfig) -> Judge:
    """A teacher as a judge. `table` has the settings that it shares with judges that are models."""
    return Judge(
        name=teacher.name,
        count=teacher.count,
        restarts=teacher.restarts,
        timeout_s=teacher.timeout_s,
        retries=teacher.retries,
        batch_samples=teacher.batch_samples,
        memory_bytes=0,
        rewards=(),
        data_sources=teacher.data_sources,
        table=JudgeConfig(
            teacher.name,
            kind="url" if teacher.url else "classifier",
            model=teacher.model,
            trust_remote_code=teacher.trust_remote_code,
            url=teacher.url,
            device=teacher.device,
            dtype=teacher.dtype,
            max_tokens=teacher.max_tokens,
            concurrency=teacher.concurrency,
            attempts=teacher.attempts,
            api_key_env=teacher.api_key_env,
            api_key_file=teacher.api_key_file,
        ),
        teacher=teacher,
    )


def judges_for(source: str, rules: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
    """The judges, given as `(name, data sources)`, that score a row of this source.

    >>> rules = (("", ("math",)), ("style", ()))
    >>> judges_for("math", rules), judges_for("code", rules), judges_for("code", rules[:1])
    (('', 'style'), ('style',), ('',))
    """
    asked = tuple(name for name, sources in rules if not sources or source in sources)
    return asked or tuple(name for name, _ in rules[:1])


def row_data_source(row: str) -> str:
    """The data source in the JSON of a row; empty if it has none.

    >>> row_data_source('{"data_source":"math","n":1}'), row_data_source('{}'), row_data_source('')
    ('math', '', '')
    """
    try:
        found: Any = msgspec.json.decode(row)
    except UNREADABLE:
        return ""
    return str((found.get("data_source") if isinstance(found, dict) else "") or "")[:SOURCE_CHARS]
