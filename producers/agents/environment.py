"""`[environment] name = "agent"`: a program that knows nothing about training plays the samples.

Each sample is a session of an agent that talks to the policy through an endpoint with the interfaces of OpenAI and
Anthropic: a command (any language) or an async function. Guarantees:
1. the sample holds the policy's answers as they were sampled, with log-probs and versions (`dialogue`);
2. the reward is the one posted to `/v1/reward`, else the result of the agent, else that of reward workers;
3. a session fails with a reason, and the prompt is tried again: `timeout` (environment.episode_timeout_s), `crashed`
   (the agent's exit code or exception), `abandoned` (it ended without a request). After a request was refused for lack
   of room a crash is the end of the sample instead: most agents do not handle that, and the earlier answers count;
4. at most `max_processes` sessions run at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from asyncrl.config import Config
from asyncrl.engine import Engine, GenRequest
from asyncrl.environment import EnvironmentFailure, Row
from asyncrl.errors import AsyncRLError
from asyncrl.plugins import load_object
from asyncrl.runtime.user_errors import format_user_error
from producers.agents.dialogue import Dialogue, Setting
from producers.agents.endpoint import Endpoint, Session
from producers.agents.processes import Agent, anthropic_url
from producers.data.tokenizer import Tokenizer
from producers.environments.multi_turn import Turns, split_reward
from producers.rollout.rollout import Finished


class Connection(NamedTuple):
    """Argument of an agent function: `openai.AsyncOpenAI(base_url=c.base_url, api_key=c.api_key)`."""

    base_url: str
    api_key: str
    model: str

    @property
    def anthropic_base_url(self) -> str:
        """For `anthropic.AsyncAnthropic(base_url=c.anthropic_base_url, api_key=c.api_key)`."""
        return anthropic_url(self.base_url)


Function = Callable[[Connection, dict[str, Any]], Awaitable[Any]]


class Agents(Turns):
    takes_images = False

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer, self._session)  # type: ignore[arg-type]
        setting = config.environment.agent
        self._agent = Agent(setting, env=config.environment.env)
        self._function: Function | None = None
        if setting.function:
            self._function = load_object(setting.function, code="config.environment", where="environment.agent")
        self._endpoint = Endpoint(model=setting.model, tokenizer=tokenizer, port=setting.port)
        self._room = asyncio.Semaphore(setting.max_processes)

    async def open(self) -> None:
        await super().open()
        await self._endpoint.open()
        print(f"agents ask {self._endpoint.url}", flush=True)

    async def close(self) -> None:
        """End the agents, then stop listening."""
        await self._agent.close()
        await self._endpoint.close()
        await super().close()

    def chats(self, engine: Engine, request: GenRequest, prompt: Any) -> list[Any]:
        """The dialogues of a group's samples."""
        setting = Setting(
            engine,
            self._tokenizer,
            self._reader,
            self.counts,
            self._config.data.max_prompt_tokens,
            self._config.data.max_prompt_tokens + request.max_new_tokens,
            self._config.environment.max_turns,
            self._config.environment.template,
            self._tokenizer.has_template(),
            self._config.environment.agent.reasoning,
        )
        return [Dialogue(setting, request, index=index) for index in request.indices]

    async def _sample(self, chat: Any, row: Row) -> Finished | EnvironmentFailure | None:
        async with self._room:  # its time starts inside. bounded: each of the others has its time
            return await super()._sample(chat, row)

    async def _session(self, dialogue: Dialogue, row: Row) -> dict[str, Any] | None:
        """Play one session; its reward and parts."""
        session = self._endpoint.begin(dialogue)
        playing = asyncio.ensure_future(self._play_session(session, row))
        # bounded: it is cancelled below, at the end of the session
        stopped = asyncio.ensure_future(session.changed.wait())
        try:
            # bounded: by the episode's time limit, which cancels this
            await asyncio.wait({playing, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if dialogue.fatal is not None:
                raise dialogue.fatal
            result = await playing  # bounded: it has ended
        except EnvironmentFailure as failure:
            if failure.reason.startswith("environment.crashed") and dialogue.cut and dialogue.session.turns:
                result = None
            else:
                raise
        finally:
            self._endpoint.end(session)
            for task in (playing, stopped):
                task.cancel()
            await asyncio.gather(playing, stopped, return_exceptions=True)  # bounded: they were cancelled
        if not dialogue.session.turns:
            raise EnvironmentFailure("abandoned", f"the agent ended after {session.asks} requests and no answer")
        return _final_reward(session, result)

    async def _play_session(self, session: Session, row: Row) -> Any:
        url, key = self._endpoint.url, session.key
        if self._function is None:
            return await self._agent.play(row, url=url, key=key)
        try:
            return await self._function(Connection(url, key, self._endpoint.model), dict(row))
        except (EnvironmentFailure, AsyncRLError):
            raise
        except Exception as error:  # the agent's own code may raise anything: a failure with its name, never a reward
            raise EnvironmentFailure("crashed", f"the agent raised {format_user_error(error)}") from None


def _final_reward(session: Session, result: Any) -> dict[str, Any] | None:
    """The posted reward, else the result of the agent."""
    if session.reward is not None:
        return {**session.parts, "reward": session.reward}
    value, parts = split_reward(result)
    return None if value is None else {**parts, "reward": value}
