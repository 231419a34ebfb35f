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
#: Text (a user message if prompts are chat messages), messages, or nothing.
Observation = Union[str, Message, Sequence[Message], None]
Row = Mapping[str, Any]
#: Why an environment failed: the first word of a reason after `environment.`.
REASONS = (
    "raised", "timeout", "observation", "template", "too_long", "no_reward", "not_finite", "result", "crashed",
    "abandoned",
)  # fmt: skip


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call that the policy wrote."""

    name: str
    arguments: dict[str, Any]


class Turn(msgspec.Struct, frozen=True):
    """One turn of the policy. `finish`: stop, length (truncated), or empty if the policy was not asked because no room
    or no turn was left; then nothing else is set and the session is over.
    """

    text: str = ""  # without special tokens
    token_ids: tuple[int, ...] = ()
    finish: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()  # why calls cannot be parsed
    number: int = 0  # number of the turn in the session, from 0
    answer: str = ""  # the text without reasoning (environment.reasoning_parser) and calls

    @property
    def over(self) -> bool:
        """Whether the session is over: no room or no turn was left."""
        return not self.finish


class Step(NamedTuple):
    """The answer of an environment to a turn. `reward` None: no reward for this turn; if no step has one, reward
    workers score the sample. Numbers in `info["parts"]` are kept as parts of the reward.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = {}


class Chat(Protocol):
    """The engine handle of one sample."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far; with a text prompt, its texts as messages. Read-only."""

    @property
    def room(self) -> int:
        """Number of tokens that the conversation may still grow by."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of the configured tools and of those in the row's prompt."""

    async def say(self, observation: Observation = None, *, max_new_tokens: int = 0) -> Turn:
        """Show something, then let the policy speak (0: up to the room that is left)."""

    def show(self, observation: Observation) -> None:
        """Add text that the policy sees before its next turn."""

    def restart(self, prompt: str | Sequence[Message]) -> None:
        """Start another conversation in the same sample: an edited history, or a helper's. It is trained as a separate
        sequence and shares the sample's reward.
        """

    def reward(self, value: float, *, turn: int = -1) -> None:
        """Reward a past turn (-1: the last one). The sample's reward is the sum of these rewards and the result."""

    async def call(self, turn: Turn, *, tools: Mapping[str, Any] = {}) -> list[Message]:
        """Run the tool calls of a turn within their limits; one message per call, errors included. `tools`: those that
        the environment has for this sample by name, each with `async def call(arguments) -> str`.
        """

    @property
    def policy(self) -> str:
        """Name of the trained policy in a run of several (`[policies]`); else empty."""

    def other(self, name: str) -> OtherChat:
        """A new conversation with another policy of the run. Its turns are not trained; the sample records them."""


class OtherChat(Protocol):
    """A conversation with another policy of the run: its newest published weights, under its own settings."""

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far. Read-only."""

    @property
    def room(self) -> int:
        """Number of tokens that the conversation may still grow by."""

    async def say(self, observation: Observation = None, *, max_new_tokens: int = 0) -> Turn:
        """Show something, then let the other policy speak (0: up to the room that is left)."""

    def show(self, observation: Observation) -> None:
        """Add text that the other policy sees before its next turn."""

    def restart(self, prompt: str | Sequence[Message]) -> None:
        """Forget the conversation and begin another one."""


class Environment(Protocol):
    """An environment with steps. `close` is optional."""

    async def reset(self, row: Row) -> Observation:
        """Begin an episode; None: the policy sees the row's prompt."""

    async def step(self, action: Turn) -> Step:
        """Respond to a turn."""


Rollout = Callable[[Chat, Row], Awaitable[Union[float, Mapping[str, Any], None]]]


class EnvironmentFailure(Exception):
    """A sample whose environment failed; `reason` begins with `environment.` and a word of `REASONS`."""

    def __init__(self, word: str, what: str) -> None:
        assert word in REASONS, word
        super().__init__(f"environment.{word}: {what}")
        self.reason = f"environment.{word}: {what}"
