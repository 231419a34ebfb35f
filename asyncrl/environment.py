"""The contract between producers and environments: what happens between a prompt and a finished sample.

Implemented by `producers.environments` and by third parties: `[environment] name = "module:name"`, or a name of the
entry-point group `asyncrl.environments`. Two forms are known:

    class Guess:                                          # a new one for every sample
        async def reset(self, row): ...                   # what the policy sees first; None: the row's prompt
        async def step(self, action: Turn) -> Step: ...   # what it sees next, a reward, and whether that was all

    async def play(chat: Chat, row) -> float | dict | None: ...   # a function of its own over an engine handle

Guarantees to both:
1. tokens are never made twice: what the policy says reaches training as it was sampled, whatever text becomes of it;
   what an environment shows is encoded once, gets no loss, and stands in the sample where it was seen;
2. every call has a time limit, every sample one on its whole; cancellation (a lost lease) arrives as `CancelledError`;
3. what an environment raises, or a limit that it passes, fails this sample with a reason; the prompt is tried again
   elsewhere like after a lost lease, and set aside with the reason after `buffer.max_reissue` attempts. It never
   becomes a reward of 0;
4. a sample without a reward of its environment goes to the reward workers.
It imports nothing heavy, so that an environment can be written and tested anywhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Union

import msgspec

Message = Mapping[str, Any]  # role, content, and what else the model's template knows
#: Text (a user message where prompts are chat messages), messages, or nothing.
Observation = Union[str, Message, Sequence[Message], None]
Row = Mapping[str, Any]
#: Why an environment failed, the first word of a reason after `environment.`.
REASONS = ("raised", "timeout", "observation", "too_long", "no_reward", "not_finite", "result", "crashed", "abandoned")


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the policy wrote."""

    name: str
    arguments: dict[str, Any]


class Turn(msgspec.Struct, frozen=True):
    """What the policy said. `finish`: stop, length (it was cut), or empty where it was not asked at all, because no
    room or no turn was left: then nothing else is set and the session is over."""

    text: str = ""  # without special tokens
    token_ids: tuple[int, ...] = ()
    finish: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # what is wrong with calls that cannot be read
    number: int = 0  # of the session's turns, from 0

    @property
    def over(self) -> bool:
        """Nothing was said: no room or no turn was left."""
        return not self.finish


class Step(NamedTuple):
    """The answer of an environment to a turn. `reward` None: it has no opinion of this turn; where no step has one,
    reward workers score the sample. Numbers of `info["parts"]` are kept as parts of the reward."""

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = {}


class Chat(Protocol):
    """The engine handle of one sample."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far; with a text prompt its texts as messages. For reading only."""

    @property
    def room(self) -> int:
        """Tokens that the conversation may still grow by."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of the configured tools."""

    async def say(self, observation: Observation = None, *, max_new_tokens: int = 0) -> Turn:
        """Show something, then let the policy speak (0: as long as there is room)."""

    def show(self, observation: Observation) -> None:
        """To be seen before the next turn."""

    def restart(self, prompt: str | Sequence[Message]) -> None:
        """Another conversation in the same sample: an edited history, a helper's. It is trained as a sequence of its
        own and shares the sample's reward."""

    def reward(self, value: float, *, turn: int = -1) -> None:
        """Credit a turn that was taken (-1: the last one). The sample's reward is the sum of these and the result."""

    async def call(self, turn: Turn) -> list[Message]:
        """Run the tool calls of a turn, within their limits; one message for each, errors among them."""


class Environment(Protocol):
    """See the module. `close` may be left out."""

    async def reset(self, row: Row) -> Observation:
        """Begin; None: the policy sees the row's prompt."""

    async def step(self, action: Turn) -> Step:
        """What follows a turn."""


Rollout = Callable[[Chat, Row], Awaitable[Union[float, Mapping[str, Any], None]]]


class EnvironmentFailure(Exception):
    """A sample whose environment failed; `reason` begins with `environment.` and a word of `REASONS`."""

    def __init__(self, word: str, what: str) -> None:
        assert word in REASONS, word
        super().__init__(f"environment.{word}: {what}")
        self.reason = f"environment.{word}: {what}"
