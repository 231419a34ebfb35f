"""`[[judge]]`: reward workers with settings of their own.

The rewards of one judge are scored together, by its own worker processes: functions, or a model.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from asyncrl.config.sections.base import Count, Positive, Section

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
    url: str = ""  # kind = url: an OpenAI-compatible server, such as http://127.0.0.1:8000/v1
    prompt: str = ""  # question with {prompt} {response} {ground_truth} and {column}; generative and url
    system: str = ""  # system message
    answer: Literal["pattern", "yes_no"] = "pattern"  # a number in its text, or the probability of yes against no
    pattern: str = r"(-?\d+(?:\.\d+)?)"  # regular expression; the first group of its last match is the number
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


FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def template_fields(template: str) -> tuple[str, ...]:
    """The names in braces; other braces, such as those of JSON, are text.

    >>> template_fields('{prompt} and {response}, as {"score": 3}')
    ('prompt', 'response')
    """
    return tuple(FIELD.findall(template))
