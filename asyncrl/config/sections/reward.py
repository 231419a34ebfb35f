"""`[[reward]]`, `[reward_workers]` and `[[judge]]`: rewards, and the processes that score.

The rewards of one judge are scored together, by its own worker processes: functions, or a model. `function` names a
reward in one of four ways:

    my_rewards:exact                a module on the Python path, and a name in it
    rewards/gsm8k.py:compute_score  a file, from the folder of the launch, and a name in it
    builtin:gsm8k                   a scorer that ships (docs/rewards.md)
    http://host:5000/get_reward     a server that answers POST {"query", "prompts", "labels"} with {"rewards"}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta, field

from asyncrl.config.sections.base import Count, Positive, Seconds, Section

Kind = Literal["module", "file", "builtin", "url", ""]
FORMS = "'module:name', 'path/file.py:name', 'builtin:name' or an http address"
ANY_NUMBER = r"(-?\d+(?:\.\d+)?)"


def reward_kind(function: str) -> Kind:
    """Which of the four ways it is; empty: none."""
    if function.startswith(("http://", "https://")):
        return "url" if urlsplit(function).hostname else ""
    if re.fullmatch(r"builtin:\w+", function):
        return "builtin"
    if re.fullmatch(r"[^:]*\.py:[\w.]+", function):
        return "file"
    return "module" if re.fullmatch(r"[\w.]+:[\w.]+", function) else ""


def reward_label(function: str) -> str:
    """A short name for metrics: the part after the colon; for an address its last part, or its host."""
    if reward_kind(function) != "url":
        return function.rpartition(":")[2]
    address = urlsplit(function)
    return address.path.rstrip("/").rpartition("/")[2] or address.hostname or function


def reward_components(names: Iterable[str]) -> list[str]:
    """The names of rewards among those of parts, sorted; numbers that a reward reports besides (`exact/length`) are
    logged alone.

    >>> reward_components(["style", "exact/length", "exact"])
    ['exact', 'style']
    """
    known = set(names)
    return sorted(name for name in known if not any(name.startswith(f"{other}/") for other in known))


def match_components(found: Iterable[str], configured: Iterable[str], weights: Any = None) -> list[str]:
    """The components that the `weights` of gdpo are for: those that a batch has, or all configured rewards if there are
    as many weights, because no sample of a batch may have one of them.

    >>> match_components(["exact"], ["style", "exact"], [1.0, 0.5])
    ['exact', 'style']
    """
    found = set(found)
    every = reward_components({*found, *configured})
    return every if isinstance(weights, list | tuple) and len(weights) == len(every) else reward_components(found)


class RewardFunctionConfig(Section, frozen=True):
    """`[[reward]]`: one reward function; several are summed by weight."""

    function: str = ""  # module:name, path/file.py:name, builtin:name, an address; empty if its judge is a model
    name: str = ""  # empty: the function's name, or the judge's
    weight: float = 1.0  # factor in the sum
    data_sources: tuple[str, ...] = ()  # score only rows of these; empty: all
    judge: str = ""  # name of the [[judge]] whose workers score it; empty: reward_workers
    args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the function, class or scorer
    env: tuple[str, ...] = ()  # environment variables that its process gets in addition, such as a key of an API

    @classmethod
    def also_required(cls, tree: Mapping[str, Any]) -> tuple[str, ...]:
        """Without a judge, which may be a model, a function is required."""
        return () if "judge" in tree else ("function",)

    @property
    def label(self) -> str:
        """The name in metrics: `name`, or the last part of `function`, or the judge's name."""
        return self.name or reward_label(self.function) or self.judge


class RewardWorkersConfig(Section, frozen=True):
    """`[reward_workers]`: processes that score."""

    count: Positive = 1  # processes on this host
    timeout_s: Seconds = 30.0  # time limit of one call
    retries: Count = 2  # on other workers; then the group is quarantined with the reason
    batch_samples: Positive = 64  # samples leased at once
    memory_bytes: Count = 0  # limit of one process that runs functions; 0: half of the machine's memory
    max_processes: Positive = 512  # processes that the functions of one worker may start; more fails the sample
    max_failed_groups: Count = 64  # failed groups of the run, each by rewards, filters or environments; then it ends
    max_reward: Annotated[float, Meta(gt=0)] = 1e6  # largest absolute reward or part; beyond it a sample is refused
    restarts: Count = 5  # in 10 minutes


DEFAULT = ""  # name of the default judge
SHOWN_DEFAULT = "default"  # its display name; no other judge may have it
_OrInherited = Annotated[int, Meta(ge=-1)]


class JudgeConfig(Section, frozen=True):
    """`[[judge]]`: separate worker processes for the rewards that name it."""

    name: str  # letters, digits and _; `judge` of a `[[reward]]` refers to it
    count: Count = 0  # processes on this host; 0: reward_workers.count
    restarts: _OrInherited = -1  # in 10 minutes; -1: reward_workers.restarts
    timeout_s: Annotated[float, Meta(ge=0)] = 0.0  # time limit of one call; 0: reward_workers.timeout_s
    retries: _OrInherited = -1  # on other workers of this judge; -1: reward_workers.retries
    batch_samples: Count = 0  # samples leased at once; 0: reward_workers.batch_samples
    memory_bytes: Count = 0  # limit of one process that runs functions; 0: reward_workers.memory_bytes
    kind: Literal["functions", "classifier", "generative", "url"] = "functions"  # functions of its rewards, or a model
    model: str = ""  # folder of the model; kind = url: its name on the server
    trust_remote_code: bool = False  # run code that is part of its model folder
    url: str = ""  # kind = url: an OpenAI-compatible server, such as http://127.0.0.1:8000/v1
    prompt: str = ""  # question with {prompt} {response} {ground_truth} {images} {column}; generative and url
    system: str = ""  # system message
    answer: Literal["pattern", "yes_no"] = "pattern"  # a number in its text, or the probability of yes against no
    pattern: str = ANY_NUMBER  # regular expression; the first group of its last match is the number
    range: tuple[float, ...] = ()  # lowest and highest valid number; others are failures; empty: all are valid
    yes: tuple[str, ...] = ("yes", "Yes", "YES")  # answer = yes_no: words for yes
    no: tuple[str, ...] = ("no", "No", "NO")  # answer = yes_no: words for no
    label: int = -1  # kind = classifier with several labels: the reward is the probability of this one; -1: one label
    input: Literal["auto", "ids", "chat", "text"] = "auto"  # kind = classifier: ids if it has the policy's tokenizer
    engine: str = "hf"  # kind = generative: like producers.engine
    device: str = "auto"  # like producers.device
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: model.dtype
    max_tokens: Positive = 4096  # longest input; a longer one is a failure
    max_new_tokens: Positive = 256  # longest answer
    temperature: Annotated[float, Meta(ge=0)] = 0.0  # of its answer; 0: greedy
    concurrency: Positive = 16  # simultaneous samples of one process
    max_requests_per_s: Annotated[float, Meta(ge=0)] = 0.0  # kind = url: of one process; 0: no limit
    attempts: Positive = 4  # kind = url: attempts of a request after 429, 5xx, an invalid answer or none
    attempt_timeout_s: Annotated[float, Meta(ge=0)] = 0.0  # kind = url: time limit of one attempt; 0: timeout_s
    hedge: bool = False  # kind = url: repeat a call slower than 95 % of the others; the first answer counts
    api_key_env: str = ""  # kind = url: environment variable of the key
    api_key_file: str = ""  # kind = url: or a file that only its owner can read

    @property
    def is_model(self) -> bool:
        """Whether a model gives the reward instead of functions."""
        return self.kind != "functions"

    @property
    def sees_images(self) -> bool:
        """Whether its question shows the images of a sample."""
        return self.kind in ("generative", "url") and "images" in template_fields(self.prompt)


FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def template_fields(template: str) -> tuple[str, ...]:
    """The names in braces; other braces, such as those of JSON, are text.

    >>> template_fields('{prompt} and {response}, as {"score": 3}')
    ('prompt', 'response')
    """
    return tuple(FIELD.findall(template))
