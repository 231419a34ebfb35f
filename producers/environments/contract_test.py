"""The contract test for authors of environments: does it keep the contract of `asyncrl.environment`?

Run as `python -m producers.environments.contract_test` by `asyncrl test-env`, and by
`asyncrl.testing.check_environment` in tests. It plays the environment with an engine that gives fixed texts; no model
is loaded. Guarantees: each finding has its observation; nothing runs longer than the limits of `[environment]`; without
a model folder a substitute tokenizer (bytes, ChatML) renders the messages."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.sections.environment import agent_name
from asyncrl.errors import UNREADABLE, AsyncRLError, ConfigError
from asyncrl.images.decoding import ImageProblem
from asyncrl.images.digests import IMAGES, image_digests
from asyncrl.images.rows import Normalised, normalise_row, takes_images
from producers.data.tokenizer import Tokenizer
from producers.environments.multi_turn import Turns, make_rollout
from producers.environments.scripted_play import Line, Played, ScriptedEngine, make_request, play_row

CANCEL_S = 3.0
LOOKED = 256  # rows
DIFFER = (
    "two plays differ: take chance from the row (gymnasium: its column `seed`), not from a clock or a global generator"
)
#: Default answers of the policy: some that fit, and some that do not.
SAYINGS = (
    "1",
    "I do not know.",
    '<tool_call>{"name": "none", "arguments": {}}</tool_call>',
    "<tool_call>{oops",
    "",
    "é 東",
)


#: Failures with their own line in the table, by the beginning of their reason.
KINDS = {"observation": "environment.observation", "template": "environment.template", "timeout": "environment.timeout"}


class Finding(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    kept: bool
    detail: str = ""


class ByteTokenizer:
    """A substitute for a model's tokenizer: a token per byte, ChatML."""

    eos_ids = (256,)
    end_id = 256

    def encode(self, text: str) -> list[int]:
        """Bytes; the marks of ChatML are tokens."""
        ids: list[int] = []
        for number, part in enumerate(text.split("<|im_end|>")):
            ids += ([256] if number else []) + list(part.encode())
        return ids

    encode_part = encode

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        return self.encode(self.render_chat(messages, opened=True))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, opened: bool, tools: Sequence[Any] = ()) -> str:
        shown = "".join(f"<|im_start|>{one['role']}\n{one.get('content') or ''}<|im_end|>\n" for one in messages)
        return shown + ("<|im_start|>assistant\n" if opened else "")

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


def check_environment(
    config: Config,
    row: Mapping[str, Any],
    *,
    says: Sequence[str] = (),
    transcript: list[Line] | None = None,
) -> list[Finding]:
    """All findings about the environment of a configuration, played with this row, which may hold images. The turns of
    the first sample are added to `transcript`.
    """
    found = Normalised(dict(row), {})
    if takes_images(config.model.path):
        keys = {"prompt_key": config.data.prompt_key, "image_key": config.data.image_key}
        try:
            found = normalise_row(found.row, **keys, folder=Path())
        except ImageProblem as problem:
            raise ConfigError("config.data", problem.reason, where="the row") from None
    images = tuple(found.images[digest] for digest in image_digests(found.row) if found.images)
    return asyncio.run(_Contract(config, found.row, images, tuple(says), transcript).findings())


class _Contract:
    def __init__(
        self,
        config: Config,
        row: dict[str, Any],
        images: tuple[bytes, ...],
        says: tuple[str, ...],
        transcript: list[Line] | None,
    ) -> None:
        self._config, self._row, self._says, self._transcript = config, row, says, transcript
        self._images = images
        known = bool(config.model.path) and Path(config.model.path).is_dir()
        model = config.model
        self._tokenizer: Any = (
            Tokenizer(model.path, trust_remote_code=model.trust_remote_code) if known else ByteTokenizer()
        )
        self._environment: Any = None

    async def findings(self) -> list[Finding]:
        name = self._config.environment.name
        if self._config.environment.is_single_turn:
            return [Finding("it can be used", False, "single_turn has nothing to test")]
        try:
            self._environment = Turns(self._config, self._tokenizer, make_rollout(self._config))
            await self._environment.open()
        except AsyncRLError as error:
            return [Finding("it can be used", False, f"{error.message} ({error.where})")]
        try:
            return [Finding("it can be used", True, name), *await self._all()]
        finally:
            await self._environment.close()

    async def _all(self) -> list[Finding]:
        scripts, left_out = self._scripts()
        played = [await self._play(script) for script in scripts]
        if self._transcript is not None:
            self._transcript += played[0].transcript(self._tokenizer.decode)
        again = [await self._play(script) for script in scripts]
        failures = [f"{script[0]!r}: {one.failure}" for script, one in zip(scripts, played, strict=True) if one.failure]
        kinds = {word: next((text for text in failures if f": {code}" in text), "") for word, code in KINDS.items()}
        other = next((text for text in failures if text not in kinds.values()), "")
        turns = [one.turns for one in played]
        most = self._config.environment.max_turns
        limit = sum(count >= most for count in turns)
        pauses = [pause for one in played for pause in one.pauses_s]
        same = all(_alike(one, other_one) for one, other_one in zip(played, again, strict=True))
        slowest = max(pauses, default=0.0)
        return [
            Finding("it survives what a policy says", not other, other or f"{len(scripts)} scripts{left_out}"),
            Finding("the same answers give the same sample", same, "played twice" if same else DIFFER),
            Finding(
                "it ends",
                not kinds["timeout"],
                kinds["timeout"]
                or f"after {min(turns)} to {max(turns)} turns"
                + (f"; {limit} of {len(turns)} at environment.max_turns = {most}" if limit else ""),
            ),
            Finding("observations can be encoded", not kinds["observation"], kinds["observation"] or "as text"),
            Finding(
                "the chat template can show them", not kinds["template"], kinds["template"] or self._renderer_name()
            ),
            Finding("rewards", *self._rewards(played)),
            await self._check_cancellation(scripts[0]),
            Finding(
                "time per step",
                slowest <= self._config.environment.step_timeout_s,
                f"mean {np.mean(pauses) * 1e3:.2f} ms, longest {slowest * 1e3:.2f} ms" if pauses else "no step",
            ),
        ]

    def _scripts(self) -> tuple[list[tuple[str, ...]], str]:
        """The texts of the policy, play by play, and a note about texts that this tokenizer cannot encode."""
        if not self._says:
            scripts: list[tuple[str, ...]] = [(say,) for say in SAYINGS if self._can_say(say)]
            missing = len(SAYINGS) - len(scripts)
            return scripts, f"; {missing} more that the tokenizer has no tokens for" if missing else ""
        for say in self._says:
            if not self._can_say(say):
                raise ConfigError("usage", f"the tokenizer has no tokens for {say!r}", where="--say")
        return [self._says], ""

    def _can_say(self, text: str) -> bool:
        try:
            self._tokenizer.encode_part(text)
        except Exception:  # the tokenizers package raises plain Exception
            return False
        return True

    def _renderer_name(self) -> str:
        return "by a stand-in: give a model folder" if isinstance(self._tokenizer, ByteTokenizer) else "strictly"

    @staticmethod
    def _rewards(played: Sequence[Played]) -> tuple[bool, str]:
        found = [one.reward for one in played if not one.failure]
        given = [reward for reward in found if reward is not None]
        if not found:
            return False, "no sample was finished"
        if given and len(given) < len(found):
            return False, f"only {len(given)} of {len(found)} samples have one"
        return True, f"{min(given):g} to {max(given):g}" if given else "none: reward workers score"

    async def _play(self, says: Sequence[str]) -> Played:
        return await play_row(self._environment, self._config, self._tokenizer, self._row, says, images=self._images)

    async def _check_cancellation(self, says: Sequence[str]) -> Finding:
        """Whether it ends when its lease is lost: during a turn, and in the middle of a step."""
        found = []
        request = make_request(self._row, self._config, self._tokenizer, self._environment, images=self._images)
        for hangs_at in (0, 1):
            engine = ScriptedEngine(self._tokenizer, says, hangs_at=hangs_at)

            async def consume(engine: ScriptedEngine = engine) -> None:
                async for _ in self._environment.play(engine, request, self._row):
                    pass

            task = asyncio.create_task(consume())
            hanging = asyncio.create_task(engine.hanging.wait())  # bounded: cancelled after CANCEL_S
            await asyncio.wait([task, hanging], timeout=CANCEL_S, return_when=asyncio.FIRST_COMPLETED)
            hanging.cancel()
            task.cancel()
            began = time.monotonic()
            ended, _ = await asyncio.wait([task], timeout=CANCEL_S)
            if not ended:
                return Finding("cancellation ends it", False, f"it still runs {CANCEL_S:g} s after it")
            if not task.cancelled():
                task.exception()  # retrieved: another finding names it
            found.append(time.monotonic() - began)
        return Finding("cancellation ends it", True, f"within {max(found) * 1e3:.1f} ms")


def _alike(one: Played, other: Played) -> bool:
    return msgspec.structs.replace(one, pauses_s=()) == msgspec.structs.replace(other, pauses_s=())


# ---------------------------------------------------------------- command line


def config_for(name: str, *, args: Mapping[str, Any], model: str = "", base: Config | None = None) -> Config:
    """The configuration of a test: `base`, or defaults, with this environment."""
    if base is None:
        tree: dict[str, Any] = {
            "model": {"path": model},
            "data": {"path": "rows.jsonl"},
            "reward": [{"function": "none:none"}],
        }
        base = msgspec.convert(tree, Config)
    setting = next((one for one in base.row_environment if one.agent_name == name), base.environment)
    if name and setting is base.environment and name != setting.name:
        setting = msgspec.structs.replace(setting, name=name, args={})
    if args:
        setting = msgspec.structs.replace(setting, args=dict(args))
    policy = base.model
    if model and model != policy.path:  # the permission of the file is for its own folder
        policy = msgspec.structs.replace(policy, path=model, trust_remote_code=False)
    return msgspec.structs.replace(base.replace_environment(setting), model=policy)


def table(findings: Sequence[Finding], transcript: Sequence[Line] = ()) -> str:
    """The findings as lines of text, after what was said."""
    said = "".join(f"{line}\n" for line in transcript)
    width = max(len(one.name) for one in findings)
    lines = [f"{'kept  ' if one.kept else 'BROKEN'}  {one.name:{width}}  {one.detail}" for one in findings]
    return (f"{said}\n" if said else "") + "\n".join(
        [*lines, f"{sum(one.kept for one in findings)} of {len(findings)} kept"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0 if everything is kept, 1 if something is not, 2 if it could not be tested."""
    from asyncrl.config import load

    parser = argparse.ArgumentParser(prog="producers.environments.contract_test", description=__doc__)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--args", default="{}")
    parser.add_argument("--row", default="")
    parser.add_argument("--say", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    try:
        base = load(given.config) if given.config else None
        config = config_for(given.name, args=_object(given.args, "--args"), model=given.model, base=base)
        row = _object(given.row, "--row") if given.row else _first_row(config, base)
        transcript: list[Line] = []
        findings = check_environment(config, row, says=given.say, transcript=transcript if given.say else None)
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(json.dumps([msgspec.structs.asdict(one) for one in findings]) if given.json else table(findings, transcript))
    return 0 if all(one.kept for one in findings) else 1


def _first_row(config: Config, base: Config | None) -> dict[str, Any]:
    """The first row of the data; of a `[[row_environment]]` the first that names it, among `LOOKED` of them."""
    if base is None:
        return {config.data.prompt_key: [{"role": "user", "content": "Begin."}]}
    from producers.data.prompts import Prompts

    prompts = Prompts(config.data, seed=config.run.seed, sees=takes_images(config.model.path))
    name = agent_name(config.environment)
    named = (row for row in prompts.sample(LOOKED) if isinstance(row, dict) and row.get("agent_name") == name)
    row = next(named, None) if name else prompts.row_for(0)
    if row is None:
        where = f"data.path = {config.data.path!r}"
        raise ConfigError("config.data", f"no row has the agent_name {name!r}: give --row", where=where)
    if not (images := prompts.images_of(row)):
        return row
    return {name: value for name, value in row.items() if name != IMAGES} | {config.data.image_key: list(images)}


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError("usage", f"no JSON object: {error}", where=where) from None


if __name__ == "__main__":
    sys.exit(main())
