"""Another policy of the run, as an environment meets it: `chat.other(NAME)`.

Guarantees:
1. its turns are sampled with its own settings, tokenizer and limits, by the newest published weights that this producer
   has of it; nothing of them is trained here;
2. the sample records each of them: how many turns of its own it had by then, the policy, and the versions of the tokens
   (`wire.SampleHead.others`);
3. a conversation with it has its own context. It reads text; it has no tools.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from asyncrl.config import Config
from asyncrl.engine import Engine, GenDelta, GenRequest
from asyncrl.environment import EnvironmentFailure, Message, Observation, Turn
from asyncrl.versions import Runs
from producers.data.tokenizer import Tokenizer
from producers.environments.conversation import Conversation, Counts, Setting
from producers.environments.rendering import ChatTemplate, PlainText, Renderer, make_messages
from producers.rollout.session import SEEDS, TURN_SEED, Session
from producers.tools.base import make_toolbox
from producers.tools.turn_reader import TurnReader

CHAT_SEED = 0xD1B54A32D192ED03  # odd: conversations of a sample have seeds of their own


class OtherPolicy:
    """`config` and `tokenizer` are its own, `engine` holds its weights."""

    def __init__(self, name: str, config: Config, *, engine: Engine, tokenizer: Tokenizer) -> None:
        self.name = name
        self.config = config
        self.engine = engine
        self._tokenizer = tokenizer
        self._reader = TurnReader(config.environment, tokenizer)
        self._tools = make_toolbox((), {})

    def chat(self, group: GenRequest, session: Session, *, number: int, text: bool) -> OtherConversation:
        """The conversation of this number in the sample of a session. `text`: prompts are text, not messages."""
        data, sampling, environment = self.config.data, self.config.sampling, self.config.environment
        renderer = PlainText(self._tokenizer) if text else ChatTemplate(self._tokenizer, check=environment.template)
        setting = Setting(
            environment,
            self.engine,
            renderer,
            self._reader,
            self._tools,
            Counts(),  # the heartbeat counts the trained policy alone
            data.max_prompt_tokens,
            data.max_prompt_tokens + sampling.max_new_tokens,
            None,
        )
        request = GenRequest(
            f"{group.id}:{self.name}:{number}",
            np.zeros(0, np.int32),
            (session.index,),
            (group.seed + zlib.crc32(self.name.encode()) + number * CHAT_SEED) % SEEDS,
            sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_ids=self._tokenizer.eos_ids,
        )
        return OtherConversation(self.name, setting, request, session)


class OtherConversation:
    """`asyncrl.environment.OtherChat`. `session` is the sample that records the turns."""

    def __init__(self, name: str, setting: Setting, request: GenRequest, session: Session) -> None:
        self._name = name
        self._setting = setting
        self._request = request
        self._session = session
        self._turns = 0
        self._shown: list[Message] = []  # before the first turn
        self._conversation: _Recorded | None = None

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._shown) if self._conversation is None else self._conversation.messages

    @property
    def room(self) -> int:
        return self._request.max_new_tokens if self._conversation is None else self._conversation.room

    def show(self, observation: Observation) -> None:
        if self._conversation is None:
            self._shown += make_messages(observation)
        else:
            self._conversation.show(observation)

    def restart(self, prompt: str | Sequence[Message]) -> None:
        self._conversation = None
        self._shown = list(make_messages(prompt))

    async def say(self, observation: Observation = None, *, max_new_tokens: int = 0) -> Turn:
        self.show(observation)
        if self._turns >= self._setting.config.max_turns:
            return Turn(number=self._turns)
        conversation = self._conversation = self._conversation or self._open()
        turn = await conversation.say(max_new_tokens=max_new_tokens)
        number = self._turns
        if not turn.over:
            self._session.others.append((self._session.turns, self._name, conversation.runs))
            self._turns += 1
        return replace(turn, number=number)

    def _open(self) -> _Recorded:
        """The conversation that begins with what was shown so far."""
        renderer: Renderer = self._setting.renderer
        ids = renderer.prompt(self._shown)
        limit = self._setting.max_prompt_tokens
        if not 0 < len(ids) <= limit:
            what = f"a prompt of {len(ids)} tokens for policy {self._name}, 1 to {limit} are possible"
            raise EnvironmentFailure("too_long", what)
        seed = (self._request.seed + self._turns * TURN_SEED) % SEEDS  # of a restart
        request = replace(
            self._request,
            id=f"{self._request.id}:{self._turns}",
            prompt_ids=np.asarray(ids, np.int32),
            seed=seed,
        )
        return _Recorded(self._setting, request, index=self._session.index, prompt=self._shown)


class _Recorded(Conversation):
    """A conversation that keeps the versions of its last turn."""

    runs: Runs = ()

    def _turn(self, delta: GenDelta, number: int) -> Turn:
        self.runs = delta.runs
        return super()._turn(delta, number)
