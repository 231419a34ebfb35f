"""What sessions of several turns rest on, on every engine: environments and agents, played by the producer's own code.

Part of the contract suite (`test_engine_contract`), which imports these tests and runs them on its engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from engine_lab import LIMIT, VOCAB, Bench, config_of, kept_logprobs, plain_logprobs, request, stage, tokens_made

from asyncrl.config import Config
from asyncrl.config.sections.environment import AgentConfig, EnvironmentConfig
from asyncrl.engine import Engine, GenDelta, GenRequest
from asyncrl.versions import expand
from producers.agents.environment import Agents, Connection
from producers.data.tokenizer import Tokenizer
from producers.environments.multi_turn import Turns
from producers.rollout.rollout import Environment, Finished

SAMPLES = 4
TURNS = (8, 40, 8)  # tokens of each
SHOWN = ([9, 8, 7], [6])  # between them
TRIES = 8  # to meet samples in their middle
#: Two blocks of a prefix cache of 128 tokens, so that every turn finds the context of the one before in it.
PROMPT = [(7 * n + 3) % VOCAB for n in range(280)]


def words(ids: list[int]) -> str:
    """The text of these tokens."""
    return "".join(f" t{token}" for token in ids)


class Noted:
    """An engine, and what it was asked and said for each sample."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turns: dict[int, list[tuple[GenRequest, list[GenDelta]]]] = {}

    async def generate(self, wanted: GenRequest) -> AsyncIterator[GenDelta]:
        said: list[GenDelta] = []
        self.turns.setdefault(wanted.indices[0], []).append((wanted, said))
        async with aclosing(self.engine.generate(wanted)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                said.append(delta)
                yield delta


def settings(bench: Bench, **environment: Any) -> tuple[Config, Tokenizer]:
    """The engine's configuration with an environment, and the tokenizer of its model."""
    engine: Any = bench.engine
    folder = Path(engine._config.model.path)
    config = config_of(folder, engine="hf", kv="keep")
    whole = msgspec.structs.replace(config, environment=EnvironmentConfig(**environment))
    return whole, Tokenizer(folder, trust_remote_code=False)


async def play(environment: Environment, engine: Any, wanted: GenRequest) -> dict[int, Finished]:
    """The finished samples of a group, by index."""
    found: dict[int, Finished] = {}
    await environment.open()
    try:
        async for item in environment.play(engine, wanted, {"prompt": words(PROMPT)}):
            assert isinstance(item, Finished)
            found[item.sample.index] = item
    finally:
        await environment.close()
    return found


def check_tokens(item: Finished, turns: list[tuple[GenRequest, list[GenDelta]]], shown: tuple[list[int], ...]) -> None:
    """Token in, token out: every turn was asked with the very tokens before it, and the sample holds just these."""
    context = list(PROMPT)
    response: list[int] = []
    mask: list[int] = []
    for number, (asked, said) in enumerate(turns):
        assert asked.prompt_ids.tolist() == context
        new = [token for delta in said for token in delta.token_ids.tolist()]
        new = (
            new[: int(item.mask[len(response) :].sum())] if number == len(turns) - 1 and item.mask is not None else new
        )
        between = shown[number] if number < len(turns) - 1 else []
        context += [*new, *between]
        response += [*new, *between]
        mask += [1] * len(new) + [0] * len(between)
    assert item.sample.token_ids.tolist() == response
    assert item.mask is not None and item.mask.tolist() == mask
    assert (item.sample.logprobs[item.mask == 0] == 0).all()


def test_new_weights_in_a_session(bench: Bench, case: tuple[Any, str]) -> None:
    """Between its turns and within one: each token has the log-prob of the weights that its version names. A turn that
    begins after an update uses no K/V of the turns before it: its log-probs are a plain forward's of the new weights.
    """
    mixed = 0
    for _ in range(TRIES):
        mixed += _session_under_new_weights(bench, case[1])
        if mixed:
            return
        bench.push(1)
    raise AssertionError("the swaps came after the turns had ended")


def _session_under_new_weights(bench: Bench, kv: str) -> int:
    """Weights 1 for the first turn, then 2, from the middle of the second turn on 3; how many turns have both."""
    first = bench.version
    config, tokenizer = settings(bench)
    engine = Noted(bench.engine)

    async def session() -> dict[int, Finished]:
        said, go = asyncio.Barrier(SAMPLES + 1), asyncio.Barrier(SAMPLES + 1)

        async def rollout(chat: Any, _row: Any) -> float:
            await chat.say(max_new_tokens=TURNS[0])
            await said.wait()
            await go.wait()
            await chat.say(words(SHOWN[0]), max_new_tokens=TURNS[1])
            await chat.say(words(SHOWN[1]), max_new_tokens=TURNS[2])
            return 1.0

        wanted = request(bench.name(), PROMPT, tuple(range(SAMPLES)), max_new_tokens=64)
        playing = asyncio.create_task(play(Turns(config, tokenizer, rollout), engine, wanted))
        await said.wait()
        await stage(bench.engine, 2, first + 1)
        await bench.engine.commit_update()
        await stage(bench.engine, 3, first + 2)
        made = asyncio.create_task(tokens_made(bench.engine, SAMPLES * 8))
        await go.wait()
        await made
        await bench.engine.commit_update()
        return await playing

    samples = bench.run(session())
    bench.version += 2
    assert sorted(samples) == list(range(SAMPLES))
    return sum(_check_session(samples[index], engine.turns[index], first, kv) for index in samples)


def _check_session(item: Finished, turns: list[tuple[GenRequest, list[GenDelta]]], first: int, kv: str) -> bool:
    """Whether its second turn has tokens of two versions."""
    check_tokens(item, turns, SHOWN)
    starts = (0, TURNS[0] + len(SHOWN[0]), TURNS[0] + len(SHOWN[0]) + TURNS[1] + len(SHOWN[1]))
    versions, logprobs = expand(item.sample.runs) - first, item.sample.logprobs
    assert len(versions) == len(logprobs) == starts[2] + TURNS[2]
    assert (versions[: starts[1]] == 0).all() and (versions[starts[2] :] == 2).all(), "shown: of the token before"
    tokens = item.sample.token_ids
    for number, seed in ((0, 1), (2, 3)):
        turn = slice(starts[number], starts[number] + TURNS[number])
        context = turns[number][0].prompt_ids.tolist()
        assert np.abs(plain_logprobs(seed, context, tokens[turn]) - logprobs[turn]).max() < LIMIT
    turn, context = slice(starts[1], starts[1] + TURNS[1]), turns[1][0].prompt_ids.tolist()
    cut = int((versions[turn] == 1).sum())
    assert versions[turn].tolist() == [1] * cut + [2] * (TURNS[1] - cut)
    before = plain_logprobs(2, context, tokens[turn])
    assert np.abs(before - logprobs[turn])[:cut].max(initial=0.0) < LIMIT
    if not 0 < cut < TURNS[1]:
        return False
    after = (
        kept_logprobs(2, 3, context, tokens[turn], cut) if kv == "keep" else plain_logprobs(3, context, tokens[turn])
    )
    assert np.abs(after - logprobs[turn])[cut:].max() < LIMIT
    return True


# ---------------------------------------------------------------- agents

STOP = "t1"  # a third of all tokens: t1, t10 to t19, t100 to t127
TEMPERATURE = 0.8


async def agent(endpoint: Connection, row: dict[str, Any]) -> dict[str, Any]:
    """The OpenAI client: a turn as it is, a stream with a stop, and one more."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        first = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=TURNS[0], temperature=0.1, logprobs=True
        )
        logprobs = [entry.logprob for entry in first.choices[0].logprobs.content]  # type: ignore[union-attr]
        messages += [first.choices[0].message, {"role": "user", "content": words(SHOWN[0])}]
        text, finish = "", None
        stream: Any = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=TURNS[1], stop=STOP, stream=True
        )
        async for part in stream:
            text += part.choices[0].delta.content or ""
            finish = part.choices[0].finish_reason or finish
        assert STOP not in text and finish in ("stop", "length")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": words(SHOWN[1])}]
        last = await client.chat.completions.create(model="policy", messages=messages, max_tokens=TURNS[2])
        assert last.choices[0].message.content
        return {"reward": 1.0, "first": sum(logprobs), "stopped": float(finish == "stop")}


def test_an_agent_plays_a_session(bench: Bench) -> None:
    """The sampling of the run, whatever a request asks; a stop gives the rest of a turn up, here and in the engine."""
    config, tokenizer = settings(bench, name="agent", agent=AgentConfig(function=f"{__name__}:agent"))
    engine = Noted(bench.engine)
    wanted = request(bench.name(), PROMPT, tuple(range(SAMPLES)), max_new_tokens=64, temperature=TEMPERATURE, top_p=0.9)

    async def session() -> dict[int, Finished]:
        found = await play(Agents(config, tokenizer), engine, wanted)
        async with asyncio.timeout(20):  # a turn that was stopped is given up at once, or soon
            while bench.engine.health().running + bench.engine.health().waiting:
                await asyncio.sleep(0.05)
        return found

    samples = bench.run(session())
    assert sorted(samples) == list(range(SAMPLES))
    assert any(item.parts["stopped"] for item in samples.values())
    for index, item in samples.items():
        _check_agent(item, engine.turns[index], bench.version, tokenizer)


def _check_agent(
    item: Finished, turns: list[tuple[GenRequest, list[GenDelta]]], version: int, tokenizer: Tokenizer
) -> None:
    tokens, logprobs, mask = item.sample.token_ids, item.sample.logprobs, item.mask
    assert item.sample.runs == ((version, len(tokens)),) and mask is not None
    shown = np.flatnonzero(mask == 0)
    assert tokens[shown].tolist() == SHOWN[0] + SHOWN[1] and shown[:3].tolist() == [8, 9, 10]
    second = slice(11, int(shown[3]))
    text = tokenizer.decode(tokens[second].tolist())
    if item.parts["stopped"]:
        assert STOP in text and STOP not in tokenizer.decode(tokens[second].tolist()[:-1])
    else:
        assert STOP not in text and len(tokens[second]) == TURNS[1]
    asked = [turn[0].prompt_ids.tolist() for turn in turns]
    whole = [*PROMPT, *tokens.tolist()]
    assert all(whole[: len(context)] == context for context in asked), "nothing that was said is encoded anew"
    assert [len(context) - len(PROMPT) for context in asked] == [0, 11, int(shown[3]) + 1]
    said = mask == 1
    plain = plain_logprobs(1, PROMPT, tokens, temperature=TEMPERATURE)
    assert np.abs(plain - logprobs)[said].max() < LIMIT and (logprobs[~said] == 0).all()
    assert abs(item.parts["first"] - float(logprobs[:8].sum())) < LIMIT
