"""A server of the real OpenEnv, for tests/unit/test_openenv.py: `python openenv_server.py PORT [LONGEST]` in its
environment. Words of more than LONGEST letters (12) are no actions."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

LONGEST = int(sys.argv[2]) if len(sys.argv) > 2 else 12


class Guess(Action):  # type: ignore[misc]
    word: str = Field(max_length=LONGEST)


class Seen(Observation):  # type: ignore[misc]
    hint: str = ""


class Guessing(Environment):  # type: ignore[misc]
    """A word to guess: `apple` with seed 1, `plum` otherwise; reward 1 and the end for it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._word = ""
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, letters: int = 0, **_: Any) -> Seen:
        self._word = "apple" if seed == 1 else "plum"
        return Seen(hint=f"a fruit of {letters or len(self._word)} letters")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Seen:
        if action.word == "crash":
            raise RuntimeError("the environment broke")
        right = action.word == self._word
        return Seen(hint="yes" if right else f"not {action.word}", reward=1.0 if right else 0.0, done=right)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Seen, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
