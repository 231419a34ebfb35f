"""Adapters: environments of gymnasium, and of verifiers where that is installed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from env_lab import SayingEngine, config_of, tokenizer_in

from asyncrl.engine import GenRequest
from asyncrl.environment import EnvironmentFailure, Turn
from asyncrl.errors import ConfigError
from producers.data.prompts import encode_prompt
from producers.environments.gymnasium import GymEnvironment, last_number
from producers.environments.multi_turn import Turns, make_rollout
from producers.environments.verifiers import continues, plain_message
from producers.rollout.rollout import Finished

ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "2*3"}]}


def played(folder: Path, text: str, script: Any, row: dict[str, Any]) -> tuple[Finished, SayingEngine]:
    tokenizer = tokenizer_in(folder)
    config = config_of(folder, text, reward=False, room=600)
    environment = Turns(config, tokenizer, make_rollout(config))
    engine = SayingEngine(tokenizer, script)
    prompt = encode_prompt(row, config.data, tokenizer)

    async def run() -> list[Any]:
        request = GenRequest("7:1", prompt, (0,), 5, config.sampling.max_new_tokens)
        return [item async for item in environment.play(engine, request, row)]  # type: ignore[arg-type]

    (done,) = asyncio.run(asyncio.wait_for(run(), 60))
    return done, engine


def whole(tokenizer_folder: Path, done: Finished) -> str:
    from producers.data.tokenizer import Tokenizer

    return Tokenizer(tokenizer_folder, trust_remote_code=False).decode(done.sample.token_ids.tolist())


def seen_as_text(observation: Any) -> str:
    return f"square {int(observation)}"


# ---------------------------------------------------------------- gymnasium

LAKE = (
    f'name = "gymnasium"\nargs = {{id = "FrozenLake-v1", is_slippery = false, intro = "Go. ", '
    f'observe = "{__name__}:seen_as_text"}}\n'
)


def test_a_gymnasium_environment(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    way = ["down", "1", "I go 1", "2", "2", "1", "2"]  # to the goal of the 4x4 lake, after a word that is no action
    done, engine = played(tmp_path, LAKE, lambda _i, turn, _c: way[turn], {**ROW, "seed": 1})
    text = whole(tmp_path, done)
    assert "Go. square 0" in text and "not an action: no number in it" in text and "square 8" in text
    assert done.reward == 1.0
    assert len(engine.asked) == 7  # the lake ended it
    assert done.turns == ((len(done.sample.token_ids) - 1, 1.0),)


@pytest.mark.parametrize(("text", "number"), [("I go to 2.", 2), ("-3", -3), ("1 or 2", 2)])
def test_actions_are_read_from_text(text: str, number: int) -> None:
    assert last_number(text) == number


def test_actions_outside_the_space_are_answered() -> None:
    pytest.importorskip("gymnasium")

    async def run() -> Any:
        environment = GymEnvironment("FrozenLake-v1")
        await environment.reset({"seed": 3})
        step = await environment.step(Turn("9", (1,), "stop"))
        await environment.close()
        deep = GymEnvironment("FrozenLake-v1", act="json:loads")
        assert "not an action: maximum recursion" in (await deep.step(Turn("[" * 9999, (1,), "stop"))).observation
        await deep.close()
        return step

    step = asyncio.run(asyncio.wait_for(run(), 60))
    assert (step.reward, step.done) == (0.0, False)
    assert "9 is not in Discrete(4)" in step.observation
    with pytest.raises(ConfigError, match="NoSuchThing"):
        GymEnvironment("NoSuchThing-v0")


# ---------------------------------------------------------------- verifiers


def test_which_messages_go_on_from_those_that_were_seen() -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant"}
    said = {"role": "assistant", "content": "b"}
    assert continues([user, answer], [user, said, {"role": "user", "content": "c"}])
    assert not continues([user, answer], [{"role": "user", "content": "x"}, said])
    assert not continues([user, answer], [user])


def test_messages_of_the_package_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = SimpleNamespace(model_dump=lambda **_: {"role": "user", "content": parts})
    assert plain_message(message) == {"role": "user", "content": "ab"}
    with pytest.raises(EnvironmentFailure, match="more than text"):
        plain_message({"role": "user", "content": [{"type": "image_url"}]})


def load_environment(**_: Any) -> Any:
    """Three turns; the reward is how often the model said "yes"."""
    import verifiers
    from datasets import Dataset

    class Three(verifiers.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [{"role": "user", "content": f"again {len(state['trajectory'])}"}]

    def yes(completion: Any) -> float:
        return float(sum("yes" in (message.content or "") for message in completion if message.role == "assistant"))

    rows = Dataset.from_list([{"prompt": ROW["prompt"], "answer": "x"}])
    return Three(max_turns=3, dataset=rows, rubric=verifiers.Rubric(funcs=[yes]))


def test_an_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifiers = pytest.importorskip("verifiers", reason="pip install 'verifiers>=0.1.14,<0.2'")
    try:
        verifiers.MultiTurnEnv  # noqa: B018 - the package imports it here
    except AttributeError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(
        verifiers, "load_environment", lambda _id, **options: load_environment(**options), raising=False
    )
    said = ["yes", "no", "yes!"]
    done, engine = played(
        tmp_path,
        'name = "verifiers"\nargs = {id = "three"}\n',
        lambda _i, turn, _c: said[turn],
        {**ROW, "answer": "x", "example_id": 0},
    )
    assert done.reward == 2.0 and done.parts["yes"] == 2.0
    assert done.rows == () and len(engine.asked) == 3  # one row: what was said stayed as it was
    assert "again 2" in whole(tmp_path, done)
