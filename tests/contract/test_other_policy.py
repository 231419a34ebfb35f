"""`chat.other(NAME)`: conversations with another policy; its turns are recorded and never trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_lab import ASCII, SayingEngine, config_of, play, tokenizer_in
from msgspec.structs import replace

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.environment import EnvironmentFailure, Turn
from asyncrl.errors import WorkError
from producers.data.tokenizer import Tokenizer
from producers.environments.multi_turn import Turns
from producers.environments.other_policy import OtherPolicy
from producers.other_policies import OtherPolicies
from producers.rollout.rollout import Finished, submit_fields

Lab = tuple[Config, Tokenizer, OtherPolicy, SayingEngine]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """The configuration of policy `me`; the tokenizer of both; policy `you`, which echoes what it reads in brackets."""
    tokenizer = tokenizer_in(tmp_path / "me", template="", characters=ASCII)
    config = config_of(tmp_path / "me", 'name = "m:f"', reward=False)
    config = replace(config, run=replace(config.run, policy="me", other_policies={"you": str(tmp_path)}))
    theirs = replace(config, sampling=replace(config.sampling, temperature=0.5, max_new_tokens=40))
    theirs = replace(theirs, environment=replace(theirs.environment, max_turns=3))
    engine = SayingEngine(tokenizer, lambda index, turn, context: f"[{context}]")
    engine.version = 20
    return config, tokenizer, OtherPolicy("you", theirs, engine=engine, tokenizer=tokenizer), engine  # type: ignore[arg-type]


def run(lab: Lab, game: Any, *, samples: int = 1, prompt: str = "hi") -> list[Finished]:
    config, tokenizer, other, _ = lab
    environment = Turns(config, tokenizer, game)
    environment.others = {"you": other}
    mine = SayingEngine(tokenizer, lambda index, turn, context: f"my {turn}")
    mine.capabilities = lambda: type("Able", (), {"image_turns": False})  # type: ignore[attr-defined]
    done, failure = play(environment, mine, config, tokenizer, {"prompt": prompt}, samples=samples, limit_s=30)
    if failure is not None:
        raise failure
    return done


def test_turns_of_another_policy_are_recorded_and_not_trained(lab: Lab) -> None:
    _, tokenizer, _, engine = lab

    async def game(chat: Any, row: Any) -> float:
        assert chat.policy == "me"
        other = chat.other("you")
        heard = await other.say("a?")
        mine = await chat.say(heard.text)
        await other.say(mine.text)
        await chat.say("end")
        return 1.0

    [found] = run(lab, game)
    assert found.others == ((0, "you", ((20, 5),)), (1, "you", ((21, 13),)))  # "[a?]", "[a?[a?]my 0]", <eos>
    text = tokenizer.decode(found.sample.token_ids.tolist())
    assert text == "[a?]my 0endmy 1" and found.reward == 1.0
    sampled = tokenizer.decode(found.sample.token_ids[found.mask == 1].tolist())
    assert sampled == "my 0my 1"  # nothing that the other policy said has a loss
    assert [tokenizer.decode(asked.prompt_ids.tolist()) for asked in engine.asked] == ["a?", "a?[a?]my 0"]
    assert {asked.temperature for asked in engine.asked} == {0.5}
    assert engine.asked[0].max_new_tokens == 40 and engine.asked[0].delta_tokens == 0


def test_the_record_travels_with_the_sample(lab: Lab) -> None:
    async def game(chat: Any, row: Any) -> float:
        await chat.other("you").say("a?")
        await chat.say()
        return 0.0

    [found] = run(lab, game)
    fields = submit_fields([found])
    assert fields["others"] == {0: ((0, "you", ((20, 5),)),)}
    head = wire.SampleHead(0, 1, "stop", ((3, 1),), others=fields["others"][0])
    message = wire.Samples("p", 1, 1, (head,), {}, (), "", 1)
    assert wire.decode_header(wire.encode_header(message)).samples == (head,)


@pytest.mark.parametrize(
    "others", [((-1, "you", ((1, 1),)),), ((0, "", ((1, 1),)),), ((0, "you", ()),), ((0, "you", ((1, 0),)),)]
)
def test_a_record_that_cannot_be_is_refused(others: Any) -> None:
    head = wire.SampleHead(0, 1, "stop", ((0, 1),), others=others)
    arrays = {
        "prompt": ("i4", [np.ones(1, "<i4")]),
        "response": ("i4", [np.ones(1, "<i4")]),
        "logprobs": ("f4", [np.zeros(1, "<f4")]),
    }
    fields, payload = wire.pack_parts(arrays)
    message = wire.Samples("p", 1, 1, (head,), {}, fields, "", 1)
    assert wire.validate_samples(message, payload, group_size=1).startswith("others: ")


def test_conversations_are_separate_and_drawn_separately(lab: Lab) -> None:
    *_, engine = lab

    async def game(chat: Any, row: Any) -> float:
        one, two = chat.other("you"), chat.other("you")
        await one.say("1")
        await two.say("2")
        one.restart("3")
        assert [message["content"] for message in one.messages] == ["3"]
        await one.say()
        await chat.say()
        return 0.0

    done = run(lab, game, samples=2)
    assert [len(found.others) for found in done] == [3, 3]
    mine = [asked for asked in engine.asked if asked.indices == (0,)]
    assert len({asked.seed for asked in mine}) == 3 and len({asked.id for asked in engine.asked}) == 6
    again = run(lab, game, samples=2)
    assert [asked.seed for asked in engine.asked if asked.indices == (0,)] == [asked.seed for asked in mine] * 2
    assert len(again) == 2


def test_its_own_limits_end_a_conversation(lab: Lab) -> None:
    turns: list[Turn] = []

    async def game(chat: Any, row: Any) -> float:
        other = chat.other("you")
        for _ in range(4):
            turns.append(await other.say("x", max_new_tokens=2))
        await chat.say()
        return 0.0

    [found] = run(lab, game)
    assert [turn.over for turn in turns] == [False, False, False, True]  # its max_turns is 3
    assert [turn.number for turn in turns] == [0, 1, 2, 3] and len(found.others) == 3
    assert all(len(turn.token_ids) == 2 for turn in turns[:3])


@pytest.mark.parametrize(
    ("name", "shown", "reason"),
    [
        ("they", "x", "the other policies of this run are: you"),
        ("you", "x" * 201, "201 tokens for policy you"),
        ("you", None, "0 tokens"),
    ],
)
def test_what_fails_a_sample(lab: Lab, name: str, shown: str | None, reason: str) -> None:
    async def game(chat: Any, row: Any) -> float:
        await chat.other(name).say(shown)
        return 0.0

    with pytest.raises(EnvironmentFailure, match=reason):
        run(lab, game)


def test_the_wait_for_the_weights_of_another_policy_is_visible_ends_and_has_a_limit(lab: Lab) -> None:
    """Its run has not started. A producer that is asked to leave waits no longer."""
    config, told = lab[0], list[str]()

    def leave_after(looks: int) -> dict[str, OtherPolicy]:
        def note(missing: str) -> bool:
            told.append(missing)
            return len(told) < looks

        return asyncio.run(OtherPolicies(config, name="producer-0").wait_ready(0.3, note))

    assert leave_after(2) == {}
    assert told[0].startswith("the run of policy you") and told[-1] == ""
    with pytest.raises(WorkError, match=r"waited 0\.3 s for the run of policy you"):
        leave_after(1_000_000)
