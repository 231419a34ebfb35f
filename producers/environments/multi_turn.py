"""All samples of a group in a multi-turn environment: in parallel, each at its own pace.

Guarantees:
1. every sample has its own conversation and environment object; the samples leave as they finish;
2. a sample whose environment fails does not end the others: when they are done its `EnvironmentFailure` is raised, and
   the producer gives the lease back with the reason;
3. cancelling ends all of them, and their turns at the engine;
4. a reward is the sum of the turns' rewards and the result; without any of these reward workers score the sample, and
   in a run without them the sample fails (`environment.no_reward`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from asyncrl.config import Config
from asyncrl.config.sections.environment import AGENT
from asyncrl.config.sections.sandbox import SandboxConfig
from asyncrl.engine import Engine, GenDelta, GenRequest
from asyncrl.environment import EnvironmentFailure, Rollout, Row, Step, Turn
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.images.model_inputs import ImageInputs, open_inputs
from asyncrl.plugins import find, load_object
from asyncrl.runtime.user_errors import format_user_error
from producers.data.prompt_forms import split_prompt
from producers.data.tokenizer import Tokenizer
from producers.environments.conversation import Conversation, Counts, GivenUp, Setting, require_number
from producers.environments.images import open_row
from producers.environments.other_policy import OtherPolicy
from producers.environments.rendering import make_renderer
from producers.environments.single_turn import SingleTurn
from producers.rollout.rollout import Environment, Finished
from producers.sandbox import Sandbox, configured_limits, open_sandbox
from producers.tools.base import make_toolbox
from producers.tools.turn_reader import TurnReader

T = TypeVar("T")
SANDBOXES = 4  # programs of one producer that run at once
#: Environments of servers that may reward the last step alone: an episode that ended before it has 0.
REWARD_LAST = ("openenv", "nemo_gym")
LOOK_S = 5.0  # every sample wakes the wait at its end: only a safety net


class Turns:
    """A multi-turn environment. `play_one` is the rollout of one sample."""

    takes_images = True  # in prompts
    others: Mapping[str, OtherPolicy] = {}  # that samples of this policy may meet

    def __init__(self, config: Config, tokenizer: Tokenizer, play_one: Rollout) -> None:
        self.counts = Counts()
        self._config = config
        self._tokenizer = tokenizer
        self._play_one = play_one
        self.inputs = open_inputs(config)
        self._scored_by_workers = bool(config.reward)
        self._reader = TurnReader(config.environment, tokenizer)
        self._tools = make_toolbox(
            config.environment.tools,
            config.environment.tool_args,
            sandbox=lambda: make_sandbox(config.sandbox),
            env=config.environment.env,
        )

    async def open(self) -> None:
        """Connect the tools and the environment, before the first prompt is encoded."""
        try:
            await asyncio.wait_for(self._open(), self._config.environment.episode_timeout_s)
        except TimeoutError:
            raise ConfigError(
                "config.environment",
                "the tools, or the environment, did not open in environment.episode_timeout_s",
                where="environment.tools",
            ) from None

    async def _open(self) -> None:
        await self._tools.open()
        if (opening := getattr(self._play_one, "open", None)) is not None:
            await opening()

    async def close(self) -> None:
        await self._tools.close()

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        return self._tools.schemas

    def chats(self, engine: Engine, request: GenRequest, prompt: Any) -> list[Conversation]:
        """The engine handles of a group's samples."""
        prompt, own = split_prompt(prompt)
        tools = [*self._tools.schemas, *own]
        renderer = make_renderer(prompt, self._tokenizer, tools=tools, check=self._config.environment.template)
        longest = self._config.data.max_prompt_tokens + request.max_new_tokens
        setting = Setting(
            self._config.environment,
            engine,
            renderer,
            self._reader,
            self._tools,
            self.counts,
            self._config.data.max_prompt_tokens,
            longest,
            self._inputs_for(engine),
            self._config.run.policy,
            self.others,
            own,
        )
        return [Conversation(setting, request, index=index, prompt=prompt or "") for index in request.indices]

    def _inputs_for(self, engine: Engine) -> ImageInputs | None:
        """None if the model or the engine reads text alone in later turns."""
        return self.inputs if self.inputs is not None and engine.capabilities().image_turns else None

    async def play(self, engine: Engine, request: GenRequest, row: Row) -> AsyncIterator[Finished | GenDelta]:
        """The samples of the request, each as it finishes."""
        if request.images and not (self.takes_images and self._inputs_for(engine)):
            raise EnvironmentFailure("observation", "the prompt has images, which turns of this kind do not hold")
        chats = self.chats(engine, request, row.get(self._config.data.prompt_key))
        tasks = [asyncio.create_task(self._sample(chat, open_row(row, request.images))) for chat in chats]
        failure: EnvironmentFailure | None = None
        try:
            waiting = set(tasks)
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    result = task.result()
                    if isinstance(result, Finished):
                        yield result
                    failure = failure or (result if isinstance(result, EnvironmentFailure) else None)
            if failure is not None:
                raise failure
        finally:
            for task in tasks:
                task.cancel()
            # Errors have come out above. bounded: they were cancelled
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, chat: Conversation, row: Row) -> Finished | EnvironmentFailure | None:
        """One sample, or the failure of its environment; None if the engine aborted it."""
        limit_s = self._config.environment.episode_timeout_s
        try:
            result = await asyncio.wait_for(self._play_one(chat, dict(row)), limit_s)
            return self._finish(chat, result)
        except GivenUp:
            return None
        except EnvironmentFailure as found:
            failure = found
        except TimeoutError:
            failure = EnvironmentFailure("timeout", f"a sample took longer than {limit_s:g} s")
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            failure = EnvironmentFailure("raised", "CancelledError without a cancellation")
        except AsyncRLError as error:
            if error.code != "config.template":
                raise  # an error of the engine or the configuration
            failure = EnvironmentFailure("template", error.message)  # of these messages: others may be shown
        except (
            Exception
        ) as error:  # the environment's own code may raise anything: a failure with its name, never a reward
            failure = EnvironmentFailure("raised", format_user_error(error))
        finally:
            await chat.end()
        self.counts.failed_episodes += 1
        return failure

    def _finish(self, chat: Conversation, result: Any) -> Finished:
        final, parts = split_reward(result)
        if not chat.session.turns:
            raise EnvironmentFailure("result", "it ended before the policy said anything")
        rewards = [chat.turn_rewards.get(number, 0.0) for number in range(chat.session.turns)]
        if chat.turn_rewards:
            parts = {"turns": sum(rewards), **({} if final is None else {"final": final}), **parts}
        reward = final if not chat.turn_rewards else sum(rewards) + (final or 0.0)
        if reward is None and not self._scored_by_workers:
            if self._config.environment.name not in REWARD_LAST:
                raise EnvironmentFailure("no_reward", "it returned none, and the run has no [[reward]]")
            reward = 0.0
        # Parts are dropped if reward workers score: their own parts would replace them.
        return chat.session.finish(
            reward,
            rewards if chat.turn_rewards else (),
            finish="length" if chat.cut else "",
            parts=parts if reward is not None else None,
        )


def _is_cancelled() -> bool:
    """Whether this task was cancelled, as opposed to a `CancelledError` that the environment raised itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def split_reward(result: Any) -> tuple[float | None, dict[str, float]]:
    """The reward of a rollout's result and its parts. Raises `EnvironmentFailure`."""
    if result is None:
        return None, {}
    if not isinstance(result, Mapping):
        return require_number(result), {}
    key = next((name for name in ("reward", "score") if name in result), None)
    value = None if key is None or result[key] is None else require_number(result[key])
    return value, {str(name): require_number(part) for name, part in result.items() if name != key and part is not None}


# ---------------------------------------------------------------- reset and step


def step_rollout(make: Callable[..., Any], args: Mapping[str, Any], *, step_timeout_s: float) -> Rollout:
    """A rollout over an environment object, new for each sample."""

    async def rollout(chat: Any, row: Row) -> dict[str, Any] | None:
        environment = make(**args)
        try:
            shown = await _limit(environment.reset(row), "reset", step_timeout_s)
            if shown is not None:
                chat.restart(shown)
            return await _steps(environment, chat, step_timeout_s)
        finally:
            close = getattr(environment, "close", None)
            if close is not None:
                await _limit(close(), "close", step_timeout_s)

    return rollout


async def _steps(environment: Any, chat: Any, step_timeout_s: float) -> dict[str, Any] | None:
    """Turn by turn; the parts of the reward, if there is one."""
    parts: dict[str, Any] = {}
    rewarded = False
    turn: Turn = await chat.say()
    while not turn.over:
        step = await _limit(environment.step(turn), "step", step_timeout_s)
        if not isinstance(step, tuple) or not 1 <= len(step) <= 4:
            what = f"step gave a {type(step).__name__}, not (observation, reward, done, info)"
            raise EnvironmentFailure("result", what)
        step = Step(*step)
        if step.reward is not None:
            chat.reward(step.reward, turn=turn.number)
            rewarded = True
        parts |= step.info.get("parts") or {}
        if step.done:
            break
        turn = await chat.say(step.observation)
    return (
        {**parts, "reward": None} if rewarded else None
    )  # the turns hold the whole reward: a part named score stays a part


async def _limit(call: Awaitable[T] | T, what: str, limit_s: float) -> T:
    """The result of a method, `async` or not."""
    if not inspect.isawaitable(call):
        return call  # type: ignore[return-value]
    try:
        return await asyncio.wait_for(call, limit_s)
    except TimeoutError:
        raise EnvironmentFailure("timeout", f"{what} took longer than {limit_s:g} s") from None


# ---------------------------------------------------------------- by name


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """The sandbox of `[sandbox]`."""
    return open_sandbox(config.kind, configured_limits(config), workers=SANDBOXES)


def make_environment(config: Config, tokenizer: Tokenizer) -> Environment:
    """The configured environment. Raises `config.environment`."""
    if config.environment.is_single_turn:
        return SingleTurn()
    if config.environment.name == AGENT:
        agents: Environment = find("asyncrl.environments", AGENT)(config, tokenizer)
        return agents
    return Turns(config, tokenizer, make_rollout(config))


def make_rollout(config: Config) -> Rollout:
    """The rollout of one sample in the configured environment. Raises `config.environment`."""
    setting = config.environment
    where = f"environment.name = {setting.name!r}"
    found: Any
    if ":" in setting.name:
        found = load_object(setting.name, code="config.environment", where="environment.name")
    else:
        found = find("asyncrl.environments", setting.name)
    if inspect.iscoroutinefunction(found):
        return _bind_args(found, setting.args, where)
    if callable(found) and callable(getattr(found, "reset", None)) and callable(getattr(found, "step", None)):
        _check_args(found, setting.args, where)
        return step_rollout(found, setting.args, step_timeout_s=setting.step_timeout_s)
    if inspect.isclass(found) and inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        return _make_object(found, setting.args, where)
    raise ConfigError(
        "config.environment", "it is neither a class with reset and step nor an async function", where=where
    )


def _make_object(kind: Any, args: Mapping[str, Any], where: str) -> Rollout:
    """An object with `async def __call__(chat, row)`: a rollout with state between samples. `async def open()`, if it
    has one, runs before the first sample."""
    _check_args(kind, args, where)
    made: Rollout = kind(**args)
    return made


def _bind_args(function: Any, args: Mapping[str, Any], where: str) -> Rollout:
    try:
        inspect.signature(function).bind(None, None, **args)
    except TypeError as error:
        what = f"async def rollout(chat, row, **environment.args): {error}"
        raise ConfigError("config.environment", what, where=where) from None

    async def rollout(chat: Any, row: Row) -> Any:
        return await function(chat, row, **args)

    return rollout


def _check_args(found: Any, args: Mapping[str, Any], where: str) -> None:
    try:
        inspect.signature(found).bind(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError("config.environment", f"environment.args: {error}", where=where) from None
