"""Wrong configurations: all mistakes, no others, each on its line with its code; the right key is suggested.

The cases stand in wrong_configurations.txt. Beside them every key of the configuration is misspelled in six ways.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, get_origin, get_type_hints

import pytest
from quick_checks import no_parts_are_tried, same_imports_once

from asyncrl.cli import main
from asyncrl.config import Config, all_keys, parse
from asyncrl.config.suggestions import list_keys, list_sections, synonyms
from asyncrl.errors import CATALOGUE, ConfigErrors
from asyncrl.preflight.check import check_files

CASES = Path(__file__).with_name("wrong_configurations.txt")
assert no_parts_are_tried and same_imports_once  # fixtures
GOOD = {
    "model": '[model]\npath = "model"\n',
    "data": '[data]\npath = "rows.jsonl"\n',
    "reward": '[[reward]]\nfunction = "my_rewards:good"\n',
}
#: Sections that are lists of tables.
LISTS = {name for name, hint in get_type_hints(Config).items() if get_origin(hint) is tuple}
SHARE = 0.95  # of typos for which the right key must be suggested


class Expected(NamedTuple):
    code: str
    line: int  # 0: the whole file
    suggestion: str = ""


class Case(NamedTuple):
    title: str
    text: str
    expected: tuple[Expected, ...]


def cases() -> list[Case]:
    _, *blocks = CASES.read_text().split("\n== ")
    return [case_of(*block.partition("\n")[::2]) for block in blocks]


def case_of(title: str, body: str) -> Case:
    lines, expected = [], []
    left_out = {words[3:].removeprefix("no-") for words in body.splitlines() if words.startswith("#: no-")}
    for line in body.splitlines():
        if line.startswith("#! "):
            expected.append(Expected(line[3:].strip(), 0))
        elif not line.startswith("#:"):
            wrong = re.search(r"  # <- (\S+) ?(\S*)$", line)
            lines.append(line)
            if wrong:
                expected.append(Expected(wrong[1], len(lines), wrong[2]))
    text = "\n".join(lines) + "\n"
    text += "".join(block for name, block in GOOD.items() if name not in left_out and not opened(name, text))
    return Case(title, text, tuple(expected))


def opened(name: str, text: str) -> bool:
    return bool(re.search(rf"^\[\[?{name}\]", text, re.MULTILINE))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / "model" / name).write_text("{}")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    function = "(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    (folder / "my_rewards.py").write_text(f"def good{function}\n\ndef other{function}")
    return folder


def test_there_are_enough_of_every_kind() -> None:
    every = cases()
    codes = {one.code for case in every for one in case.expected}
    assert len(every) >= 126 and len({case.title for case in every}) == len(every)
    assert codes <= set(CATALOGUE) and len(codes) >= 11
    assert all(case.expected for case in every)
    assert sum(one.code == "config.unknown_key" for case in every for one in case.expected) >= 70


def test_what_they_are_made_of_is_right(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (place / "good.toml").write_text("".join(GOOD.values()))
    assert check_files(place / "good.toml")[1].errors == []


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.title.replace(" ", "-"))
def test_every_mistake_and_no_other_on_its_line(case: Case, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    Path("wrong.toml").write_text(case.text)
    errors = check_files(Path("wrong.toml"))[1].errors
    found = {(error.code, error.where) for error in errors}
    wanted = {(one.code, f"wrong.toml:{one.line}" if one.line else "wrong.toml") for one in case.expected}
    if any(not one.line for one in case.expected):  # of a whole file, or of its nearest table
        found = {
            (code, where if where in {at for _, at in wanted} else where.partition(":")[0]) for code, where in found
        }
    assert found == wanted, "\n".join(error.render() for error in errors)
    assert all(error.remedy and error.exit_code in (2, 69) for error in errors)
    if not any(one.code == "config.unknown_key" for one in case.expected):
        assert [error.suggestion for error in errors if error.suggestion] == [
            one.suggestion for one in case.expected if one.suggestion
        ]


def test_nearly_always_the_right_key_is_suggested(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    right = wrong = 0
    missed = []
    for case in cases():
        Path("wrong.toml").write_text(case.text)
        errors = {error.where: error for error in check_files(Path("wrong.toml"))[1].errors}
        for one in case.expected:
            if one.code == "config.unknown_key" and one.suggestion:
                error = errors[f"wrong.toml:{one.line}"]
                hit = error.suggestion == one.suggestion and one.suggestion in error.message
                right, wrong = right + hit, wrong + (not hit)
                missed += [] if hit else [f"{case.title}: {error.message}"]
    assert right >= SHARE * (right + wrong), missed


def test_the_command_prints_all_and_no_traceback(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    case = next(case for case in cases() if case.title == "mistakes of the file and of what it names at once")
    Path("wrong.toml").write_text(case.text)
    assert main(["check", "wrong.toml"]) == 2
    said = capsys.readouterr().err
    assert all(f"error[{one.code}] wrong.toml:{one.line}:" in said for one in case.expected)
    assert "Traceback" not in said and said.count("  -> ") == 3
    assert main(["check", "wrong.toml", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert {(error["code"], error["line"]) for error in told["errors"]} == {
        (one.code, one.line) for one in case.expected
    }


# ---------------------------------------------------------------- every key, misspelled


def drop(name: str, at: int) -> str:
    return name[:at] + name[at + 1 :]


def double(name: str, at: int) -> str:
    return name[:at] + name[at] + name[at:]


def swap(name: str, at: int) -> str:
    at = min(at, len(name) - 2)
    return name[:at] + name[at + 1] + name[at] + name[at + 2 :]


def other_letter(name: str, at: int) -> str:
    return name[:at] + ("x" if name[at] != "x" else "q") + name[at + 1 :]


def dash(name: str, at: int) -> str:
    return name.replace("_", "-")


MISSPELLINGS = (drop, double, swap, other_letter, dash)


def suggestion_for(section: str, name: str) -> str:
    """What is suggested for a key of this name in this section."""
    header, _, inner = section.partition(".")
    header = f"[[{header}]]" + f"\n[{section}]" * bool(inner) if header in LISTS else f"[{section}]"
    with pytest.raises(ConfigErrors) as caught:
        parse(f"{header}\n{name} = 1\n")
    [error] = [error for error in caught.value.errors if error.code == "config.unknown_key"]
    assert error.where == f"<toml>:{2 + header.count(chr(10))}"
    return error.suggestion


def typos() -> Iterator[tuple[str, str, str]]:
    """Section, misspelled name, and the key that was meant."""
    dice = random.Random(20)
    keys = set(all_keys())
    for key in all_keys():
        section, _, name = key.rpartition(".")
        for misspell in MISSPELLINGS:
            typo = misspell(name, dice.randrange(len(name)))
            if typo != name and typo and f"{section}.{typo}" not in keys and len(name) > 2:
                yield section, typo, key


def test_every_key_misspelled_is_recognized() -> None:
    every = list(typos())
    missed = [
        (section, typo, key, said) for section, typo, key in every if (said := suggestion_for(section, typo)) != key
    ]
    assert len(every) > 4 * len(all_keys())
    assert len(missed) <= (1 - SHARE) * len(every), missed


def test_every_key_in_a_wrong_section_is_found() -> None:
    """A name that several sections have may be found in any of them."""
    dice, keys, missed = random.Random(21), set(all_keys()), []
    sections = [section for section in list_sections(Config) if section not in LISTS]
    for key in sorted(keys):
        home, _, name = key.rpartition(".")
        away = dice.choice([section for section in sections if section != home and f"{section}.{name}" not in keys])
        if f"{away}.{name}" not in list_sections(Config):
            said = suggestion_for(away, name)
            missed += [] if said.rpartition(".")[2] == name else [(away, key, said)]
    assert len(missed) <= (1 - SHARE) * len(keys), missed


def test_names_of_other_frameworks_lead_to_settings_that_exist() -> None:
    assert set(synonyms("settings").values()) <= set(list_keys(Config))
    assert set(synonyms("sections").values()) <= set(list_sections(Config))
    assert len(synonyms("settings")) > 100
