"""Checks what a producer builds before its engine: tokenizer, prompts, environments. Shows lengths and the first row.

`asyncrl check` runs it as `python -m producers.start_check [--play]`, with the resolved configuration on standard
input, in the environment of a producer. Guarantees:
1. it builds the parts by the functions that a producer calls, and reports every error with the setting that is wrong;
2. it encodes up to `SAMPLE` rows, spread over the data: none that can be used is an error, some that cannot a note;
3. `--play`: the first row goes through environment and rewards with a fixed answer, and a row of every other
   environment through that; what they say is shown, and is never an error: the answer is none of the policy's;
4. no model is loaded. Each result is printed when it is known, so that a limit of time keeps the earlier ones.
Output as in `asyncrl.runtime.start_report`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.config import Config
from asyncrl.config.judges import judges_for, list_judges
from asyncrl.config.mode import streams
from asyncrl.config.sections.environment import AGENT, EnvironmentConfig, agent_name
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.images.digests import image_digests
from asyncrl.images.model_inputs import open_inputs
from asyncrl.images.rows import takes_images
from asyncrl.runtime.start_report import read_settings, say, say_error
from producers.data.evaluation_prompts import HeldOutPrompts
from producers.data.prompt_forms import split_prompt
from producers.data.prompts import BadPrompt, Prompts, Row, encode_prompt
from producers.data.tokenizer import Tokenizer
from producers.engines.dataset import encode_row
from producers.environments.by_row import UNKNOWN, Environments, errors_at, require_environment, table_of
from producers.environments.multi_turn import Turns, make_rollout
from producers.environments.scripted_play import play_row
from producers.rewards.build import make_scorer
from producers.rewards.pipe import Result
from producers.rewards.sample import RewardSample

SAMPLE = 256  # rows whose lengths are shown
SHOWN = 60  # characters of a text
NAME_REMEDY = "correct the column agent_name, or add a [[row_environment]] with this agent_name"


class StartCheck:
    """One pass over the parts of a producer."""

    def __init__(self, config: Config, *, play: bool) -> None:
        self.config = config
        self.play = play
        self.row: Row | None = None
        self.images: dict[str, bytes] = {}  # of the row, by digest
        self.tokenizer: Tokenizer | None = None
        self.environments: Environments | None = None
        self.firsts: dict[str, tuple[Row, dict[str, bytes]]] = {}  # the first row of each environment, by agent_name

    def run(self) -> None:
        model = self.config.model
        try:
            self.tokenizer = Tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        except AsyncRLError as error:
            say_error(error, f"model.path = {model.path!r}")
        prompts = self.find_prompts()
        if streams(self.config):
            self.look_at_lengths(prompts)
        else:
            asyncio.run(self.look_at_environments(prompts))
            if self.play and self.row is not None and self.tokenizer is not None:
                self.play_rewards(self.row, self.tokenizer)

    def find_prompts(self) -> Prompts | None:
        """The prompts of training, after those of evaluations; None if they cannot be read."""
        config, found = self.config, None
        evaluation = config.evaluation
        try:
            for row in HeldOutPrompts(config).sample(SAMPLE if config.row_environment else 0):
                if not isinstance(row, BadPrompt):
                    require_environment(config, row)
        except BadPrompt as problem:
            say("error", "config.environment", problem.reason, "evaluation", NAME_REMEDY)
        except AsyncRLError as error:
            say_error(error, f"evaluation.{'source' if evaluation.source else 'path'} = {error.where!r}")
        try:
            found = Prompts(config.data, seed=config.run.seed, sees=takes_images(config.model.path))
            with suppress(BadPrompt):  # reported with the other rows
                row = found.row_for(0)
                self.images = dict(zip(image_digests(row), found.images_of(row), strict=True))
                self.row = row
        except AsyncRLError as error:
            key = "source" if config.data.source else "path"
            say_error(error, f"data.{key} = {getattr(config.data, key)!r}")
        except Exception as error:  # the user's source may raise anything
            say("error", "config.data", f"{type(error).__name__}: {error}", f"data.source = {config.data.source!r}", "")
        return found

    async def look_at_environments(self, prompts: Prompts | None) -> None:
        """Build and open them, encode prompts with their tools, play the first row of each, close them."""
        config = self.config
        opened: list[tuple[EnvironmentConfig, Turns]] = []
        setting = config.environment
        try:
            for setting in config.environments if self.tokenizer is None else ():
                if not setting.is_single_turn and setting.name != AGENT:
                    make_rollout(config.replace_environment(setting))
            if self.tokenizer is None:
                return
            self.environments = Environments(config, self.tokenizer)
            for setting, environment in self.environments.each:
                if setting.name == AGENT:  # its endpoint opens with the run
                    self.look_at_agent(setting)
                elif isinstance(environment, Turns):
                    opened.append((setting, environment))
                    with errors_at(config, setting):
                        await environment.open()
            self.look_at_lengths(prompts)
            for setting, environment in opened if self.play else ():
                if (found := self.firsts.get(agent_name(setting))) is not None:
                    await self.play_environment(setting, environment, *found)
        except AsyncRLError as error:
            say_error(error, f"{table_of(config, setting)}.name = {setting.name!r}")
        except Exception as error:  # the user's environment may raise anything
            where = f"{table_of(config, setting)}.name = {setting.name!r}"
            say("error", "config.environment", f"{type(error).__name__}: {error}", where, "")
        finally:
            for _, environment in opened:
                await environment.close()

    def look_at_agent(self, setting: EnvironmentConfig) -> None:
        if setting.agent.command and not shutil.which(setting.agent.command[0]):
            what = f"there is no program {setting.agent.command[0]!r}"
            where = f"{table_of(self.config, setting)}.agent.command"
            say("error", "config.environment", what, where, "name a program on the PATH")

    def tools_for(self, row: Row) -> Sequence[Mapping[str, Any]]:
        """The schemas of the tools of a row's environment. Raises `BadPrompt`."""
        return () if self.environments is None else self.environments.find(row).tools

    def look_at_lengths(self, prompts: Prompts | None) -> None:
        """Encode a sample of the rows; report what cannot be used."""
        if prompts is None or self.tokenizer is None:
            return
        data, limit = self.config.data, self.config.sampling.max_new_tokens
        where = f"data.{'source' if data.source else 'path'} = {data.source or data.path!r}"
        if self.row is not None and (first := self.config.environment_for(self.row)) is not None:
            self.firsts[agent_name(first)] = (self.row, self.images)
        lengths: list[int] = []
        answers: list[int] = []
        bad: list[str] = []
        for row in prompts.sample(SAMPLE):
            if isinstance(row, BadPrompt):
                bad.append(row.reason)
                continue
            try:
                images = prompts.images_of(row)
                prompt, texts = self.encode(row, images)
                found = dict(zip(image_digests(row), images, strict=True))
                self.firsts.setdefault(agent_name(require_environment(self.config, row)), (row, found))
            except BadPrompt as problem:
                bad.append(problem.reason)
                continue
            except AsyncRLError as error:  # of the whole data set
                say_error(error, where)
                return
            except Exception as error:  # the package of tokenizers raises bare Exception
                bad.append(f"prompt: {error}")
                continue
            if not self.tokenizer.has_ids(prompt):
                what = "the tokenizer has ids that the model has no rows for (vocab_size of config.json)"
                say(
                    "error",
                    "config.tokenizer",
                    what,
                    f"model.path = {self.config.model.path!r}",
                    "use its own tokenizer",
                )
                return
            lengths.append(len(prompt))
            answers += texts
        total = len(lengths) + len(bad)
        if lengths:
            limits = f"max_prompt_tokens {data.max_prompt_tokens}; of {total} rows"
            say("finding", "prompt lengths", _spread(lengths), limits)
        if answers:
            say("finding", "answer lengths", _spread(answers), f"max_new_tokens {limit}")
        self.report_bad(bad, total, where)
        if self.row is not None and not bad[:1]:
            self.show_first(self.row)

    def encode(self, row: Row, images: Sequence[bytes]) -> tuple[Sequence[int], list[int]]:
        """The ids of the prompt, and the lengths of the answers of a data set. Raises `BadPrompt`."""
        assert self.tokenizer is not None
        given: dict[str, Any] = {"inputs": open_inputs(self.config), "images": images}
        if not streams(self.config):
            return encode_prompt(row, self.config.data, self.tokenizer, self.tools_for(row), **given).tolist(), []
        prompt, answers = encode_row(row, self.config, self.tokenizer, **given)
        return prompt.tolist(), [len(answer) for answer in answers]

    def report_bad(self, bad: Sequence[str], total: int, where: str) -> None:
        """Rows that a run would set aside: an error if all of them are."""
        if not bad:
            return
        longest = [
            int(reason.split()[1]) for reason in bad if reason.startswith("too_long: ") and reason.split()[1].isdigit()
        ]
        unknown = [reason for reason in bad if reason.startswith(UNKNOWN)]
        if unknown:
            say("error", "config.environment", f"{len(unknown)} of {total} rows: {unknown[0]}", where, NAME_REMEDY)
        elif len(bad) == total:
            remedy = f"data.max_prompt_tokens = {max(longest)} takes them all" if longest else ""
            code = "config.template" if all(reason.startswith("template: ") for reason in bad) else "config.data"
            say("error", code, f"none of {total} rows can be used: {bad[0]}", where, remedy)
        else:
            say("note", f"{len(bad)} of {total} rows would be set aside; the first: {bad[0]}")

    def show_first(self, row: Row) -> None:
        """The first prompt as the policy reads it."""
        assert self.tokenizer is not None
        ids, _ = self.encode(row, tuple(self.images[digest] for digest in image_digests(row)))
        prompt, own = split_prompt(row.get(self.config.data.prompt_key))
        text = (
            prompt
            if isinstance(prompt, str)
            else self.tokenizer.render_chat(prompt or [], opened=True, tools=(*self.tools_for(row), *own))
        )
        say("finding", "first prompt", _short(text), f"{len(ids)} tokens")

    async def play_environment(
        self, setting: EnvironmentConfig, environment: Turns, row: Row, images_by_digest: Mapping[str, bytes]
    ) -> None:
        answer = answer_of(row)
        images = tuple(images_by_digest[digest] for digest in image_digests(row))
        played = await play_row(environment, self.config, self.tokenizer, row, [answer], images=images)
        code, _, message = played.failure.partition(": ")
        if code in ("environment.template", "config.tokenizer"):  # every sample would fail
            code = code.replace("environment.", "config.")
            say("error", code, message, f"{table_of(self.config, setting)}.name = {setting.name!r}", "")
        elif played.failure:
            said = f"the first row with the answer {_short(answer)} failed: {played.failure}"
            say("note", f"environment {setting.name}: {said}")
        else:
            reward = "no reward of its own" if played.reward is None else f"reward {played.reward:g}"
            name = f"first episode {agent_name(setting)}".strip()
            say("finding", name, f"{played.turns} turns, {reward}", f"the policy says {_short(answer)}")

    def play_rewards(self, row: Row, tokenizer: Tokenizer) -> None:
        """What every judge that is no model says to an answer to the first row."""
        answer = answer_of(row)
        prompt = row.get(self.config.data.prompt_key)
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        try:
            ids = [tokenizer.encode_part(part) for part in (text, answer)]
        except Exception:  # it has no tokens for the answer
            ids = [[], []]
        source = str(row.get("data_source") or "")
        judges = list_judges(self.config)
        asked = judges_for(source, [(judge.name, judge.data_sources) for judge in judges])
        for judge in judges:
            if judge.name not in asked or judge.table.is_model:
                continue
            if judge.env:
                say(
                    "note",
                    f"rewards of judge {judge.display_name} were not played: {', '.join(judge.env)} is theirs alone",
                )
                continue
            results: list[Result] = []
            scorer = make_scorer(self.config, judge)
            try:
                scorer.start()
                sample = RewardSample.from_row(
                    row, prompt=text, response=answer, prompt_ids=ids[0], response_ids=ids[1], finish="stop"
                )
                scorer.score([sample], results.append, self.images)
            except ConfigError as error:  # `check_rewards` reports it
                say("note", f"rewards of judge {judge.display_name}: {error.message}")
                return
            finally:
                scorer.close()
            names = " + ".join(reward.label for reward in judge.rewards)
            [result] = results
            if result.reason:
                say(
                    "note",
                    f"{names}: {result.reason} for the answer {_short(answer)} to the first row: {result.detail}",
                )
            else:
                say("finding", "first reward", f"{result.reward:g}", f"{names} of the answer {_short(answer)}")


def answer_of(row: Row) -> str:
    """The answer that the row names, else "1"."""
    bare = RewardSample.from_row(row, prompt="", response="", prompt_ids=[], response_ids=[], finish="stop")
    known = next((row[name] for name in ("response", "completion", "solution", "label") if row.get(name)), None)
    truth = bare.ground_truth if bare.ground_truth is not None else known
    return "1" if truth is None else truth if isinstance(truth, str) else json.dumps(truth)


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _spread(lengths: Sequence[int]) -> str:
    return f"{min(lengths)} to {max(lengths)} tokens, median {statistics.median(lengths):g}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="producers.start_check", description=__doc__)
    parser.add_argument("--play", action="store_true", help="play the first row")
    args = parser.parse_args(argv)
    StartCheck(read_settings(), play=args.play).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
