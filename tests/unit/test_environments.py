"""Environments of several turns: deltas of chat templates, token-in / token-out, limits, errors, rewards."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import env_lab
import numpy as np
import pytest
from env_lab import SayingEngine, config_of, tokenizer_in

from asyncrl.config import Config, parse
from asyncrl.engine import GenRequest
from asyncrl.environment import EnvironmentFailure, Step
from asyncrl.errors import ConfigError, ConfigErrors
from asyncrl.runtime.host_facts import child_pids, is_alive
from producers.data.prompts import encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.environments.conversation import shorten
from producers.environments.multi_turn import Turns, make_environment, make_rollout
from producers.environments.rendering import MARK, ChatTemplate, PlainText, make_messages
from producers.environments.single_turn import SingleTurn
from producers.rollout.rollout import Finished

ROW = {"prompt": [{"role": "user", "content": "2*3"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return tokenizer_in(folder)


def played(
    config: Config,
    tokenizer: Tokenizer,
    script: Callable[[int, int, str], Any],
    row: dict[str, Any] = ROW,
    *,
    samples: int = 1,
    rollout: Any = None,
) -> tuple[list[Finished], SayingEngine, EnvironmentFailure | None]:
    """The finished samples of a group, by index, the engine, and the failure that came out at the end."""
    environment = Turns(config, tokenizer, rollout or make_rollout(config))
    engine = SayingEngine(tokenizer, script)
    done, failure = env_lab.play(environment, engine, config, tokenizer, row, samples=samples, limit_s=60)
    return done, engine, failure


def text_of(tokenizer: Tokenizer, item: Finished, masked: int = 1) -> str:
    """What was said (1) or shown (0), with special tokens."""
    ids = item.sample.token_ids[item.mask == masked].tolist()
    return str(tokenizer._fast.decode(ids, skip_special_tokens=False))  # type: ignore[union-attr]


def call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


# ---------------------------------------------------------------- deltas


def test_a_delta_begins_behind_the_stop_token_that_was_sampled(tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.eos_ids
    template = ChatTemplate(tokenizer)
    shown = [{"role": "tool", "content": "6"}]
    whole = "<eos>\n<bos>tool\n6<eos>\n<bos>assistant\n"
    assert template.delta(shown, last_token=eos) == tokenizer.encode_part(whole)[1:]
    assert template.delta(shown, last_token=eos + 9) == tokenizer.encode_part(whole)  # it was cut: the template ends it
    assert template.delta([], last_token=eos) == tokenizer.encode_part("\n<bos>assistant\n")


@pytest.mark.parametrize("roles", [["user"], ["tool"], ["tool", "tool"], ["tool", "user"]])
def test_prompt_answer_and_delta_are_what_the_template_makes_of_the_whole(
    tokenizer: Tokenizer, roles: list[str]
) -> None:
    template = ChatTemplate(tokenizer)
    prompt, shown = ROW["prompt"], [{"role": role, "content": f"it says {role}"} for role in roles]
    said = [*tokenizer.encode_part("a new answer"), *tokenizer.eos_ids]
    pieces = [*template.prompt(prompt), *said, *template.delta(shown, last_token=said[-1])]
    assert pieces == template.prompt([*prompt, {"role": "assistant", "content": "a new answer"}, *shown])


def test_a_template_that_hides_earlier_reasoning_is_named(tmp_path: Path) -> None:
    tokenizer = tokenizer_in(tmp_path, env_lab.REASONING)
    strict, tail = ChatTemplate(tokenizer), ChatTemplate(tokenizer, check="tail")
    tool, user = [{"role": "tool", "content": "6"}], [{"role": "user", "content": "why?"}]
    (eos,) = tokenizer.eos_ids
    assert strict.delta(tool, last_token=eos) == tokenizer.encode_part("\n<bos>tool\n6<eos>\n<bos>assistant\n")
    with pytest.raises(ConfigError, match="a message of user follows") as error:
        strict.delta(user, last_token=eos)
    assert error.value.code == "config.template"
    assert 'environment.template = "tail"' in error.value.remedy
    assert tail.delta(user, last_token=eos) == tokenizer.encode_part("\n<bos>user\nwhy?<eos>\n<bos>assistant\n")


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m.role }}:{% endfor %}", "0 times"),
        ("{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ';' }}{% endfor %}", "cannot be continued"),
        ("{{ raise_exception('alternate') if messages | length > 2 else messages[-1].content }}", "refuses the mess"),
    ],
)
@pytest.mark.parametrize("check", ["strict", "tail"])
def test_templates_that_cannot_be_continued_are_errors(tmp_path: Path, template: str, why: str, check: Any) -> None:
    with pytest.raises(ConfigError, match=why):
        ChatTemplate(tokenizer_in(tmp_path, template), check=check).delta(
            [{"role": "user", "content": "x"}], last_token=0
        )


def test_text_prompts_have_no_template(tokenizer: Tokenizer) -> None:
    plain = PlainText(tokenizer)
    assert plain.delta(make_messages("more"), last_token=1) == tokenizer.encode_part("more")
    assert plain.delta([], last_token=1) == []


@pytest.mark.parametrize("wrong", [[3], [{"content": "no role"}], {"role": 3}])
def test_what_is_no_observation_is_said(wrong: Any) -> None:
    with pytest.raises(EnvironmentFailure, match=r"environment\.observation: no message with a role"):
        make_messages(wrong)


def test_what_the_tokenizer_does_not_know_is_said(tmp_path: Path) -> None:
    plain = PlainText(tokenizer_in(tmp_path, characters="ab"))
    with pytest.raises(EnvironmentFailure, match=r"environment\.observation: the tokenizer cannot encode it"):
        plain.delta(make_messages("c"), last_token=1)


# ---------------------------------------------------------------- tools


def test_two_turns_with_a_tool(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, 'name = "tools"\ntools = ["calculator"]\n')
    (done,), engine, failure = played(config, tokenizer, lambda _i, turn, _c: [call("2*3"), "6"][turn])
    assert failure is None and done.reward is None
    assert text_of(tokenizer, done, 0) == "\n<bos>tool\n6<eos>\n<bos>assistant\n"
    assert text_of(tokenizer, done, 1) == f"{call('2*3')}<eos>6<eos>"
    assert (done.sample.logprobs[done.mask == 0] == 0).all()  # nothing of an observation can be trained
    assert (done.sample.logprobs[done.mask == 1] == -0.25).all()
    assert (done.sample.finish, done.rows) == ("stop", ())
    first, second = (request.prompt_ids for request in engine.asked)
    assert second[: len(first)].tolist() == first.tolist()
    assert engine.asked[0].seed != engine.asked[1].seed


def test_nothing_that_was_said_is_ever_made_of_text_again(tmp_path: Path) -> None:
    """What a policy says need not be what a tokenizer would make of its text: the tokens stay."""
    tokenizer = tokenizer_in(tmp_path)
    config = config_of(tmp_path, 'name = "chat"\n')
    first = [*tokenizer.encode_part("a"), *tokenizer.encode_part("b"), 0, 1, 1, *tokenizer.eos_ids]  # specials inside
    encoded: list[str] = []
    encode = tokenizer.encode_part
    tokenizer.encode_part = lambda text: encoded.append(text) or encode(text)  # type: ignore[method-assign, func-returns-value]
    said = [first, [*encode("zz9"), 0], "end"]
    row = {**ROW, "followups": ["go on", "and?"]}
    (done,), engine, _ = played(config, tokenizer, lambda _i, turn, _c: said[turn], row)
    assert done.sample.token_ids[: len(first)].tolist() == first
    assert engine.asked[1].prompt_ids.tolist()[len(engine.asked[0].prompt_ids) :][: len(first)] == first
    assert engine.asked[2].prompt_ids.tolist()[: len(engine.asked[1].prompt_ids)] == engine.asked[1].prompt_ids.tolist()
    assert not any("zz9" in text or "ab" in text for text in encoded), encoded  # of the answers nothing was encoded
    assert sum("go on" in text for text in encoded) == 1


def test_an_interpreter_of_a_sample_ends_with_it(folder: Path, tokenizer: Tokenizer) -> None:
    """Two samples count, each in its own interpreter; then no process is left."""
    config = config_of(
        folder,
        'name = "tools"\ntools = ["python"]\ntool_args.python = {keep_state = true}\n[sandbox]\nkind = "none"\n',
        room=900,
    )

    def program(code: str) -> str:
        return f'<tool_call>{{"name": "python", "arguments": {{"code": "{code}"}}}}</tool_call>'

    before = set(child_pids(os.getpid()))
    said = [program("x = 41"), program("x + 1"), "42"]
    both, _, failure = played(config, tokenizer, lambda _i, turn, _c: said[turn], samples=2)
    assert failure is None and [text_of(tokenizer, one, 0).count("tool\n42") for one in both] == [1, 1]
    assert not {pid for pid in set(child_pids(os.getpid())) - before if is_alive(pid)}


def test_unreadable_calls_unknown_tools_and_bad_arguments_are_answered(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, 'name = "tools"\ntools = ["calculator"]\nmax_turns = 6\n', room=900)
    said = [
        "<tool_call>{oops}</tool_call>",
        '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"number": 3}}</tool_call>',
        call("1/0"),
        "I give up",
    ]
    (done,), _, failure = played(config, tokenizer, lambda _i, turn, _c: said[turn])
    shown = text_of(tokenizer, done, 0)
    assert failure is None
    assert "error: the call is no JSON object" in shown
    assert "error: no tool 'none'; there are: calculator" in shown
    assert "error: calculator: Object" in shown
    assert "error: division by zero" in shown


def test_calls_of_a_turn_have_a_limit(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, 'name = "tools"\ntools = ["calculator"]\nmax_parallel_calls = 2\n', room=900)
    (done,), _, _ = played(config, tokenizer, lambda _i, turn, _c: [call("1+1") + call("2+2") + call("3+3"), "x"][turn])
    shown = text_of(tokenizer, done, 0)
    assert shown.count("<bos>tool") == 3
    assert "\n2<eos>" in shown and "\n4<eos>" in shown and "\n6<eos>" not in shown
    assert "only 2 calls at once" in shown


def test_calls_without_end_are_answered_by_few_messages(folder: Path, tokenizer: Tokenizer) -> None:
    answers: list[Any] = []

    async def rollout(chat: Any, row: Any) -> float:
        answers.extend(await chat.call(await chat.say()))
        return 0.0

    config = config_of(folder, f'name = "{__name__}:edits"\nmax_parallel_calls = 2\n', reward=False, room=1700)
    played(config, tokenizer, lambda *_: "<tool_call>" * 100, rollout=rollout)
    assert [item["role"] for item in answers] == ["tool"] * 3
    assert answers[-1]["content"] == "error: and 98 more calls that were not run"


def test_turns_and_room_end_a_sample(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, 'name = "tools"\ntools = ["calculator"]\nmax_turns = 2\n')
    (done,), engine, _ = played(config, tokenizer, lambda *_: call("1+1"))
    assert len(engine.asked) == 2 and done.sample.finish == "stop"
    config = config_of(folder, 'name = "chat"\nmax_turns = 99\n')
    row = {**ROW, "followups": ["x" * 40] * 50}
    (done,), engine, _ = played(config, tokenizer, lambda *_: "y" * 30, row)
    assert done.sample.finish == "length"
    assert len(done.sample.token_ids) <= 300
    assert done.mask[-1] == 1  # what nothing was said after is not kept
    (done,), _, _ = played(config, tokenizer, lambda *_: "y" * 400, row)
    assert (done.sample.finish, len(done.sample.token_ids)) == ("length", 300)


@pytest.mark.parametrize(("side", "kept"), [("left", ("", "9")), ("right", ("0", "")), ("middle", ("0", "9"))])
def test_long_answers_of_tools_are_cut(tokenizer: Tokenizer, side: str, kept: tuple[str, str]) -> None:
    text = "0" * 50 + "9" * 50
    found = shorten(text, limit=25, side=side, renderer=PlainText(tokenizer))
    assert len(found) == 25 and " ... " in found
    assert found.startswith(kept[0]) and found.endswith(kept[1])
    assert shorten(text, limit=100, side=side, renderer=PlainText(tokenizer)) == text
    assert shorten(text, limit=0, side=side, renderer=PlainText(tokenizer)) == text
    assert len(shorten(text, limit=2, side=side, renderer=PlainText(tokenizer))) <= 2 + len(" ... ")
    asked: list[int] = []

    class Watched(PlainText):
        def text_tokens(self, text: str) -> list[int]:
            asked.append(len(text))
            return super().text_tokens(text)

    huge = text[:40] + "+" * 1_000_000 + text[-40:]
    found = shorten(huge, limit=25, side=side, renderer=Watched(tokenizer))
    assert found == shorten(huge[:200] + huge[-200:], limit=25, side=side, renderer=PlainText(tokenizer))
    assert max(asked) < 2000


# ---------------------------------------------------------------- environments of one's own


class Guess:
    """Guess a number: a reward of 0.25 for a number at all, 1 more for the right one."""

    closed = 0

    def __init__(self, number: int = 7) -> None:
        self.number = number

    async def reset(self, row: Any) -> str | None:
        return row.get("ask")

    async def step(self, action: Any) -> Step | tuple[Any, ...]:
        if not action.text.strip().isdigit():
            return ("a number, please", 0.0)
        right = int(action.text) == self.number
        return Step("higher" if int(action.text) < self.number else "lower", 0.25 + right, right, {"parts": {"b": 1.0}})

    async def close(self) -> None:
        Guess.closed += 1


def test_reset_and_step(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, f'name = "{__name__}:Guess"\nargs = {{number = 5}}\n', reward=False)
    before = Guess.closed
    script = {0: ["hm", "9", "5"], 1: ["5"]}
    (one, other), _, failure = played(config, tokenizer, lambda index, turn, _c: script[index][turn], samples=2)
    assert failure is None and Guess.closed == before + 2
    assert (one.reward, other.reward) == (1.5, 1.25)
    assert [reward for _, reward in one.turns] == [0.25, 1.25]
    assert [int(one.sample.token_ids[place]) for place, _ in one.turns] == [tokenizer.eos_ids[0]] * 2
    assert one.parts == {"turns": 1.5, "b": 1.0}
    assert "<bos>user\na number, please<eos>" in text_of(tokenizer, one, 0)


class Rated:
    """Gives parts by the names that a result has its reward under."""

    async def reset(self, row: Any) -> None:
        return None

    async def step(self, action: Any) -> Step:
        return Step(None, 1.0, True, {"parts": {"score": 0.5, "style": 2.0}})


def test_a_part_is_no_second_reward(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, f'name = "{__name__}:Rated"\n', reward=False)
    (done,), _, failure = played(config, tokenizer, lambda *_: "a")
    assert failure is None and done.reward == 1.0
    assert done.parts == {"turns": 1.0, "score": 0.5, "style": 2.0}


def test_an_environment_with_a_prompt_of_its_own(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, f'name = "{__name__}:Guess"\n', reward=False)
    (done,), engine, _ = played(config, tokenizer, lambda *_: "7", {**ROW, "ask": "which number?"})
    asked = tokenizer.encode_part("<bos>user\nwhich number?<eos>\n<bos>assistant\n")
    assert engine.asked[0].prompt_ids.tolist() == asked
    assert done.rows == ((0, len(asked)),)
    assert done.mask.tolist() == [0] * len(asked) + [1, 1]


async def edits(chat: Any, row: Any) -> dict[str, float]:
    """Two conversations: the second one with an edited history."""
    first = await chat.say()
    chat.reward(0.5)
    chat.restart(
        [*row["prompt"], {"role": "assistant", "content": first.text.upper()}, {"role": "user", "content": "?"}]
    )
    second = await chat.say()
    assert [message["role"] for message in chat.messages] == ["user", "assistant", "user", "assistant"]
    return {"reward": float(second.text), "style": 0.25}


def test_an_edited_history_is_a_row_of_its_own(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, f'name = "{__name__}:edits"\n', reward=False)
    (done,), engine, _ = played(config, tokenizer, lambda _i, turn, _c: ["abc", "2"][turn])
    ((start, prompt),) = done.rows
    assert start == len("abc") + 1 and prompt == len(engine.asked[1].prompt_ids)
    assert done.reward == 2.5 and done.parts == {"turns": 0.5, "final": 2.0, "style": 0.25}
    assert text_of(tokenizer, done, 1) == "abc<eos>2<eos>"
    assert "ABC" in text_of(tokenizer, done, 0)


def failing(what: str) -> Any:
    async def rollout(chat: Any, row: Any) -> Any:
        turn = await chat.say()
        if chat.session.index == 0 and what == "raises":
            raise ValueError("broken")
        if chat.session.index == 0 and what == "cancels":
            raise asyncio.CancelledError
        if chat.session.index == 0 and what == "hangs":
            await asyncio.sleep(3600)
        if chat.session.index == 0 and what == "repeats":
            await chat.say(f"the template does not tell {MARK} from an answer")
        return {"nan": float("nan"), "text": "good", "none": None}.get(what, len(turn.text))

    return rollout


@pytest.mark.parametrize(
    ("what", "reason", "finished"),
    [
        ("raises", "environment.raised: ValueError: broken (test_environments.py:", 2),
        ("cancels", "environment.raised: CancelledError without a cancellation", 2),
        ("hangs", "environment.timeout: a sample took longer than 0.5 s", 2),
        ("repeats", "environment.template: it shows an answer 2 times", 2),
        ("nan", "environment.not_finite", 0),
        ("text", "environment.result: a reward is a str", 0),
        ("none", "environment.no_reward", 0),
    ],
)
def test_a_failed_sample_has_a_reason_and_the_others_are_finished(
    folder: Path, tokenizer: Tokenizer, what: str, reason: str, finished: int
) -> None:
    config = config_of(folder, f'name = "{__name__}:edits"\nepisode_timeout_s = 0.5\n', reward=False)
    done, _, failure = played(config, tokenizer, lambda *_: "a", samples=3, rollout=failing(what))
    assert failure is not None and failure.reason.startswith(reason)
    assert [item.sample.index for item in done] == [1, 2][:finished]


def test_without_a_reward_of_its_own_reward_workers_score(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, f'name = "{__name__}:edits"\n')
    (done,), _, failure = played(config, tokenizer, lambda *_: "a", rollout=failing("none"))
    assert failure is None and done.reward is None and done.parts == {}


def test_cancelling_gives_the_turns_up_at_the_engine(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, 'name = "chat"\n')
    environment = Turns(config, tokenizer, make_rollout(config))
    engine = SayingEngine(tokenizer, lambda *_: None)
    prompt = encode_prompt(ROW, config.data, tokenizer)

    async def run() -> None:
        async def consume() -> None:
            async for _ in environment.play(engine, GenRequest("7:1", prompt, (0, 1), 5, 9), ROW):  # type: ignore[arg-type]
                pass

        task = asyncio.create_task(consume())
        while len(engine.asked) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=30)
        assert task.cancelled()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sorted(engine.given_up) == ["7:1:0:0", "7:1:1:0"]


# ---------------------------------------------------------------- settings


async def strange(chat: Any) -> None:
    """Takes no row."""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f'name = "{__name__}:strange"', r"async def rollout\(chat, row"),
        (f'name = "{__name__}:ROW"', "neither a class with reset and step nor"),
        (f'name = "{__name__}:Guess"\nargs = {{colour = 1}}', "colour"),
        (f'name = "{__name__}:nothing"', "has no 'nothing'"),
        ('name = "no_such"', "one of agent, chat, gymnasium, nemo_gym, openenv, single_turn, tools, verifiers"),
        ('name = "tools"\ntools = ["no_such"]', "one of browser, calculator, mcp, python, search, shell"),
        ('name = "chat"\nparser = "no_such"', "one of hermes, json, qwen3"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_generated(
    folder: Path, tokenizer: Tokenizer, text: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        make_environment(config_of(folder, text + "\n"), tokenizer)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('name = "tools"', "without environment.tools"),
        ('tools = ["calculator"]', "single_turn"),
        ('name = "a b:c"', "is not 'module:name'"),
        ('name = "tools"\ntools = ["calculator", "calculator"]', "twice"),
        ('name = "tools"\ntools = ["calculator"]\ntool_args = {search = {}}', "no tool of that name"),
    ],
)
def test_contradictions_are_named(folder: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigErrors, match=why):
        config_of(folder, text + "\n")


def test_an_environment_may_be_all_that_scores(folder: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigErrors, match="no \\[\\[reward\\]\\]"):
        config_of(folder, reward=False)
    assert isinstance(make_environment(config_of(folder), tokenizer), SingleTurn)
    whole = '[model]\npath="m"\n[data]\npath="d.jsonl"\n[[reward]]\nfunction="m:f"\n[producers]\ncheckpoint_tokens=64\n'
    parse(whole + '[environment]\nname = "chat"\n')
    with pytest.raises(ConfigErrors, match="keeps turns without the experts"):
        parse(whole + '[environment]\nname = "chat"\n[learner]\nrouter_replay = true\n')


def test_masks_are_bytes(folder: Path, tokenizer: Tokenizer) -> None:
    config = config_of(folder, 'name = "chat"\n')
    (done,), _, _ = played(config, tokenizer, lambda *_: "a", {**ROW, "followups": ["b"]})
    assert done.mask.dtype == np.uint8 and len(done.mask) == len(done.sample.token_ids)
