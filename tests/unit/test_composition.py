"""Several TOML files make one configuration, from left to right; a mistake names the file whose value counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.config.locations import Places, keys_in, parse_dotted
from asyncrl.errors import ConfigErrors

BASE = """
[model]
path = "m"
[data]
path = "p.jsonl"
[[reward]]
function = "a:b"
[[reward]]
function = "a:c"
weight = 0.5
[learner]
steps = 10
[learner.optim]
lr = 1e-6
weight_decay = 0.1
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("base.toml").write_text(BASE)
    return Path("base.toml")


def write(name: str, text: str) -> Path:
    Path(name).write_text(text)
    return Path(name)


def wrong(*paths: Path, overrides: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    with pytest.raises(ConfigErrors) as caught:
        config.load(paths, overrides)
    return [(error.code, error.where) for error in caught.value.errors]


def test_tables_merge_and_the_last_file_wins(base: Path) -> None:
    more = write("more.toml", "[learner]\nsteps = 20\n[learner.optim]\nlr = 1e-5\n[buffer]\nbatch_groups = 4\n")
    last = write("last.toml", "[learner.optim]\nlr = 3e-5\n")
    made = config.load([base, more, last])
    assert (made.learner.steps, made.learner.optim.lr, made.learner.optim.weight_decay) == (20, 3e-5, 0.1)
    assert (made.buffer.batch_groups, len(made.reward)) == (4, 2)
    assert config.load([last, more, base]).learner.optim.lr == 1e-6


def test_a_list_of_tables_replaces_another(base: Path) -> None:
    more = write("more.toml", '[[reward]]\nfunction = "x:y"\n')
    assert [reward.function for reward in config.load([base, more]).reward] == ["x:y"]
    bad = write("bad.toml", '\n[[reward]]\nfunction = "x"\n')
    assert wrong(base, bad) == [("config.reward", "bad.toml:3")]


def test_command_line_and_preset_stand_above_all_files(base: Path) -> None:
    more = write("more.toml", '[learner.algorithm]\npreset = "dapo"\nclip_high = 0.4\n')
    assert config.load([base, more]).learner.algorithm.clip_high == 0.4
    assert config.load([base, more], ["learner.algorithm.clip_high=0.5"]).learner.algorithm.clip_high == 0.5
    on_top = config.load([base, more], ["learner.algorithm.preset=grpo"])
    assert on_top.learner.algorithm.preset == "grpo"


def test_a_mistake_names_the_file_and_line_whose_value_counts(base: Path) -> None:
    more = write("more.toml", "# a comment\n[learner]\nsteps = 0\n")
    assert wrong(base, more) == [("config.type", "more.toml:3")]
    assert wrong(more, base, overrides=("learner.steps=-1",)) == [("config.type", "--set learner.steps")]
    assert config.load([more, base]).learner.steps == 10  # what is overridden is not looked at
    unknown = write("unknown.toml", "[learner]\nstep = 1\n")
    assert wrong(unknown, base) == [("config.unknown_key", "unknown.toml:2")]


def test_a_contradiction_between_files_stands_where_its_setting_does(base: Path) -> None:
    first = write("first.toml", "[buffer]\npipeline_depth = 4\n")
    second = write("second.toml", "[buffer]\nmax_staleness = 1\n")
    assert wrong(base, first, second) == [("config.conflict", "first.toml:2")]


def test_every_file_that_cannot_be_read_is_named(base: Path) -> None:
    broken, latin = write("broken.toml", "[a\n"), Path("latin.toml")
    latin.write_bytes(b'x = "\xe9"\n')
    assert wrong(base, Path("none.toml"), latin) == [("config.file", "none.toml"), ("config.file", "latin.toml")]
    assert wrong(base, broken, write("bad2.toml", "\n\nx = \n")) == [
        ("config.file", "broken.toml:1"),
        ("config.file", "bad2.toml:3"),
    ]


def test_a_table_in_one_file_and_a_value_in_the_other(base: Path) -> None:
    assert ("config.type", "flat.toml:1") in wrong(base, write("flat.toml", "learner = 3\n"))


def test_places_of_values_of_several_lines() -> None:
    text = 'a = """\nb = 1\n"""\n[t]\nlist = [\n  "x = 1",  # y\n  2,\n]\nc = 3\n"quoted" = 4\nd.e = 5\n'
    assert dict(keys_in(text)) == {"a": 1, "t": 4, "t.list": 5, "t.c": 9, "t.quoted": 10, "t.d.e": 11}


def test_nearest_place() -> None:
    places = Places()
    places.add("f.toml", "[learner]\nsteps = 1\n[[reward]]\nfunction = 'a:b'\n[[reward]]\n")
    keys = ("learner.steps", "learner.optim.lr", "reward[1].weight", "reward[0].function", "reward", "run.dir")
    where = {key: places.where(parse_dotted(key)) for key in keys}
    assert where == {
        "learner.steps": "f.toml:2",
        "learner.optim.lr": "f.toml:1",
        "reward[1].weight": "f.toml:5",
        "reward[0].function": "f.toml:4",
        "reward": "f.toml:3",
        "run.dir": "f.toml",
    }
