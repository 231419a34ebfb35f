"""`asyncrl init`: five questions, then a commented TOML that `asyncrl check` accepts.

Guarantees:
1. without a terminal nothing is asked: answers come from flags or from `--answers FILE.toml`; a missing one is an error
   that names it;
2. no file is overwritten without `--force`; the written file is checked, and mistakes are shown;
3. every written setting has its meaning as a comment, from the configuration's source;
4. without a reward function, a file with one is written: an exact match with the answer;
5. limits, batch and learning rate follow the model, the rows and this machine (`asyncrl.configure.proposal`);
6. `--from` translates the settings of a run of another trainer, and names the rest (`asyncrl.configure.translate`).
   A model or data set that is not on disk is no error: its name is written, and the check says what to put there;
7. a name on a hub is written as it is. Its rows, and of a model all but its weights, are fetched first; a note says if
   that cannot be done.

Example: `asyncrl init --model models/m --data rows.jsonl --reward my_rewards:exact --preset dapo --name first`
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from asyncrl.config import Config, parse, presets
from asyncrl.config.json_schema import meanings
from asyncrl.config.suggestions import list_keys
from asyncrl.configure.proposal import Located, find_files, proposed_settings, read_facts
from asyncrl.configure.translate import Translation, translate
from asyncrl.errors import UNREADABLE, ConfigError, ConfigErrors
from asyncrl.preflight.check import check_files
from asyncrl.preflight.machine import Machine, look_at_machine

REWARD_FILE = "my_rewards.py"
REWARD_CODE = '''"""Rewards of this run: a number for a response; `asyncrl check` tries to import them."""


def exact(data_source, solution_str, ground_truth, extra_info=None):
    """1 where the response ends with the answer."""
    return float(solution_str.strip().endswith(str(ground_truth).strip()))
'''


#: Settings that are answers.
ANSWERED = ("model.path", "data.path", "reward.function", "run.name")
#: Settings that others give way to.
MAIN = (
    "data.max_prompt_tokens", "learner.algorithm.advantage", "learner.backend", "learner.lora.rank", "learner.ranks",
    "producers.engine", "sampling.group_size", "sampling.max_new_tokens", "sampling.temperature",
)  # fmt: skip


class Question(NamedTuple):
    """One of the five questions: its name (also the flag and the key of the answers), its text, and the default."""

    name: str
    text: str
    default: str


QUESTIONS = (
    Question("model", "folder of the model (config.json, *.safetensors, tokenizer)", ""),
    Question("data", "file with the prompts (.parquet, .jsonl, .json, or a folder that `datasets` saved)", ""),
    Question("reward", f"reward function, 'module:function' (empty: one is written to {REWARD_FILE})", ""),
    Question("preset", f"algorithm: {', '.join(presets.names()[:6])}, ... (docs/algorithms.md)", "grpo_decoupled"),
    Question("name", "name of the run", "first"),
)
REQUIRED = ("model", "data")
#: What `--from` writes if the other trainer's file names none.
PLACEHOLDERS = {"model": "models/your-model", "data": "data/train.parquet"}


def init_command(
    out: Path | None,
    given: Mapping[str, str],
    *,
    answers: Path | None = None,
    force: bool = False,
    ask: Callable[[str], str] | None = None,
    theirs: Path | None = None,
) -> int:
    """Ask for missing answers, write the file, check it. Returns 0, or the exit code of the first remaining mistake.

    `theirs`: a script, Python file or TOML of another trainer, whose settings are translated.
    """
    translation = translate(theirs) if theirs else Translation("", {}, [])
    flags = {name: value for name, value in given.items() if value}
    known = known_answers(translation) | read_answers(answers) | flags
    if theirs and ask is None:
        known = PLACEHOLDERS | known
    answered = complete(known, ask or (_ask if sys.stdin.isatty() and not answers else None))
    path = out or Path(f"{answered['name']}.toml")
    if path.exists() and not force:
        raise ConfigError("usage", "the file exists", where=str(path), remedy="give another name, or --force")
    if not answered["reward"]:
        answered["reward"] = _own_reward(Path(REWARD_FILE))
    located = find_files(answered, hub=str(translation.settings.get("model.hub", "")))
    path.write_text(fit_foreign(answered, look_at_machine(Path.cwd()), translation, located), encoding="utf-8")
    print(
        f"written: {path}" + (f", with {len(translation.settings)} settings of {translation.trainer}" if theirs else "")
    )
    for note in translation.notes:
        print(f"  left out: {note}")
    for error in located.errors:
        print(f"note: limits, learning rate and chat template are defaults: {error.where}: {error.message}")
    for name, place in PLACEHOLDERS.items() if theirs else ():
        if answered[name] == place:
            print(f"  missing: {theirs} names no {name}: put it at {place}, or change {name}.path")
    checked = check_files(path)[1]
    if checked.errors:
        raise ConfigErrors(checked.errors)
    for what in checked.missing:
        print(f"note: {what}")
    print(f"next: asyncrl check {path}, then asyncrl launch all {path}")
    return 0


def fit_foreign(answers: Mapping[str, str], machine: Machine, translation: Translation, located: Located) -> str:
    """The text of the file. A translated setting that contradicts others is left out, with the reason as a note."""
    settings = dict(translation.settings)
    while True:  # bounded: each round leaves out a setting
        text = format_toml(answers, machine, settings, located=located)
        try:
            fitted = parse(text)
        except ConfigErrors as wrong:
            key, why = find_contradiction(settings, [error.message for error in wrong.errors])
        else:
            asked = settings.get("learner.micro_batch_tokens", 0)
            if asked and fitted.learner.micro_batch_tokens != asked:
                translation.notes.append(f"learner.micro_batch_tokens = {asked}: raised to hold the longest sample")
            return text
        if not key:
            return text  # the check says what is wrong
        translation.notes.append(f"{key} = {settings.pop(key)!r}: {why}")


def find_contradiction(settings: Mapping[str, object], said: Sequence[str]) -> tuple[str, str]:
    """The setting that an error message names, and the message; one of the main settings only if it names no other."""
    found = []
    for why in said:
        for key in settings:
            parts = key.split(".")
            names = "|".join(re.escape(".".join(parts[first:])) for first in range(len(parts) - 1))
            if key not in ANSWERED and re.search(rf"(?<![\w.])(?:{names})(?![\w.])", why):
                found.append((key, why))
    return min(found, key=lambda one: one[0] in MAIN, default=("", ""))


def known_answers(translation: Translation) -> dict[str, str]:
    """Answers that another trainer's settings contain."""
    keys = {"model": "model.path", "data": "data.path", "reward": "reward.function", "name": "run.name"}
    return {name: str(value) for name, key in keys.items() if (value := translation.settings.get(key))}


def _own_reward(path: Path) -> str:
    """The function of the file that is written without a given reward. Raises `usage` if another function is there."""
    if path.exists() and path.read_text(encoding="utf-8") != REWARD_CODE:
        raise ConfigError(
            "usage",
            f"no reward is given, and there is another {path}",
            where="init",
            remedy="give --reward module:function, or move the file",
        )
    path.write_text(REWARD_CODE, encoding="utf-8")
    print(f"written: {path}, a reward to change")
    return f"{path.stem}:exact"


def read_answers(path: Path | None) -> dict[str, str]:
    """Answers of a TOML file: `model = "..."` and so on. Raises `config.file`, or `usage` for other names."""
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config.file", error.strerror or str(error), where=str(path)) from None
    except UNREADABLE as error:
        raise ConfigError("config.file", str(error), where=str(path)) from None
    names = [question.name for question in QUESTIONS]
    for name, value in found.items():
        if name not in names or not isinstance(value, str):
            raise ConfigError("usage", f"{name}: answers are texts named {', '.join(names)}", where=str(path))
    return found


def complete(known: Mapping[str, str], ask: Callable[[str], str] | None) -> dict[str, str]:
    """All answers. Raises `usage` if a required one is missing and there is no terminal."""
    answers = dict(known)
    for question in QUESTIONS:
        if question.name in answers:
            continue
        if ask is not None:
            shown = f" [{question.default}]" if question.default else ""
            answers[question.name] = ask(f"{question.text}{shown}: ").strip() or question.default
        else:
            answers[question.name] = question.default
    missing = [f"--{name}" for name in REQUIRED if not answers[name]]
    if missing:
        raise ConfigError(
            "usage",
            f"no answer for {', '.join(missing)}",
            where="init",
            remedy="give it as a flag, in --answers FILE.toml, or on a terminal",
        )
    return answers


def _ask(text: str) -> str:
    try:
        return input(text)  # bounded: the user answers or ends the command
    except EOFError:
        return ""


def merge_foreign(settings: Mapping[str, object], theirs: Mapping[str, object]) -> dict[str, object]:
    """Merge translated settings with ours, in the order of the configuration. Flags override both."""
    both = dict(settings) | {key: value for key, value in theirs.items() if key not in ANSWERED}
    if "data.epochs" in theirs:
        both.pop("learner.steps", None)
    row = int(str(both["data.max_prompt_tokens"])) + int(str(both["sampling.max_new_tokens"]))
    both["learner.micro_batch_tokens"] = max(int(str(both["learner.micro_batch_tokens"])), row)
    order = {key: place for place, key in enumerate(list_keys(Config))}
    return dict(sorted(both.items(), key=lambda item: order[item[0]]))


def format_toml(
    answers: Mapping[str, str],
    machine: Machine,
    theirs: Mapping[str, object] | None = None,
    *,
    located: Located | None = None,
) -> str:
    """The text of the file; `theirs`: translated settings; `located`: the answers with files that are here."""
    here = located.answers if located else answers
    means = meanings(Config)
    lines = [
        "# Written by `asyncrl init`. All settings: docs/configuration.md, or `asyncrl explain SECTION`.",
        "# Check it: asyncrl check FILE. Start it, and go on with it: asyncrl launch all FILE.",
    ]
    section = ""
    facts = read_facts(here["model"], here["data"])
    if str(facts):
        lines.append(f"# Limits and learning rate follow the files: {facts}.")
    adapters = bool((theirs or {}).get("learner.lora.rank"))
    settings = proposed_settings(here, machine, adapters=adapters, facts=facts)
    settings |= {"model.path": answers["model"], "data.path": answers["data"]}
    settings = merge_foreign(settings, theirs) if theirs else settings
    width = max(len(f"{key.rpartition('.')[2]} = {_toml(value)}") for key, value in settings.items())
    for key, value in settings.items():
        table, _, leaf = key.rpartition(".")
        if table != section:
            section = table
            lines += ["", f"[[{table}]]" if table == "reward" else f"[{table}]"]
        lines.append(f"{f'{leaf} = {_toml(value)}':<{min(width, 48)}}  # {means[key]}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return (
            f"{{ {', '.join(f'{_toml_key(key)} = {_toml(item)}' for key, item in value.items() if item is not None)} }}"
        )
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)
