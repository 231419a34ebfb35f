"""The configuration: all mistakes at once, with their place; overrides; round trip; shipped files."""

import re
from pathlib import Path

import pytest

from asyncrl import config
from asyncrl.errors import ConfigErrors

GOOD = '[model]\npath = "m"\n[data]\npath = "p.jsonl"\n[[reward]]\nfunction = "a:b"\n'
ROOT = Path(__file__).parents[2]


def errors_of(text: str, *overrides: str) -> list[tuple[str, str, str]]:
    with pytest.raises(ConfigErrors) as caught:
        config.parse(text, file="run.toml", overrides=overrides)
    return [(error.code, error.where, error.message) for error in caught.value.errors]


def test_all_mistakes_at_once_with_line_and_suggestion() -> None:
    text = (
        '[model]\npath = "x"\ndtyp = "float32"\n[buffer]\nmax_stalness = 3\nstore = "redsi"\n'
        'batch_groups = -1\n[learner.optim]\nlr = "a"\n[[reward]]\nfunctio = "a:b"\n'
    )
    found = errors_of(text)
    assert [(code, where) for code, where, _ in found] == [
        ("config.unknown_key", "run.toml:3"),
        ("config.unknown_key", "run.toml:5"),
        ("config.type", "run.toml:6"),
        ("config.type", "run.toml:7"),
        ("config.type", "run.toml:9"),
        ("config.unknown_key", "run.toml:11"),
        ("config.data", "run.toml"),
    ]
    messages = "\n".join(message for _, _, message in found)
    assert "did you mean model.dtype?" in messages
    assert "did you mean buffer.max_staleness?" in messages
    assert "did you mean 'redis'?" in messages
    assert "reward[0].functio is not a setting; did you mean reward.function?" in messages


def test_key_in_the_wrong_table_is_told_where_it_belongs() -> None:
    [(_, _, message)] = errors_of(GOOD + "[learner]\ngroup_size = 3\n")
    assert message == "learner.group_size is not a setting; did you mean sampling.group_size? it stands in [sampling]"


def test_overrides_win_and_are_named_in_errors() -> None:
    parsed = config.parse(GOOD, overrides=["buffer.store=redis", "learner.optim.lr=3e-4", "run.dir=/tmp/x"])
    assert (parsed.buffer.store, parsed.learner.optim.lr, parsed.run.dir) == ("redis", 3e-4, "/tmp/x")
    [(code, where, _)] = errors_of(GOOD, "buffer.store=mem")
    assert (code, where) == ("config.type", "--set buffer.store")
    assert [code for code, _, _ in errors_of(GOOD, "nonsense", "buffer.nope=1")] == ["usage", "config.unknown_key"]


def test_broken_toml_and_missing_file() -> None:
    assert errors_of("[model\n")[0][0] == "config.file"
    with pytest.raises(ConfigErrors) as caught:
        config.load(Path("/nonexistent/run.toml"))
    assert caught.value.errors[0].code == "config.file"


@pytest.mark.parametrize(
    ("extra", "code", "part"),
    [
        ("[buffer]\nmax_staleness = 1\npipeline_depth = 2\n", "config.conflict", "pipeline_depth = 2 is above"),
        ("[sampling]\ngroup_size = 1\n", "config.conflict", "at least 2"),
        ("[producers]\ncheckpoint_tokens = 3\n", "config.conflict", "1024: at least 4 is needed"),
        ("[learner]\nmicro_batch_tokens = 10\n", "config.conflict", "the longest sample would not fit"),
        ('[network]\nbuffer = "tcp://0.0.0.0:5555"\n', "config.network", "key_file is empty"),
        ('[network]\nbuffer = "udp://x"\n', "config.network", "is not auto"),
    ],
)
def test_conflicts(extra: str, code: str, part: str) -> None:
    [(found, where, message)] = errors_of(GOOD + extra)
    assert found == code
    assert part in message
    assert where.startswith("run.toml:")


def test_missing_data_and_reward() -> None:
    assert {code for code, _, _ in errors_of('[model]\npath = "m"\n')} == {"config.data", "config.missing"}
    assert errors_of(GOOD.replace("a:b", "ab"))[0][0] == "config.reward"


def test_derived_numbers_and_round_trip() -> None:
    parsed = config.parse(GOOD + "[buffer]\nmax_staleness = 3\nbatch_groups = 5\n[learner]\nsteps = 7\n")
    assert parsed.buffer.depth == 3
    assert parsed.buffer.max_in_flight_groups == (3 + 1) * 5
    assert parsed.total_groups == 35
    assert parsed.producers.groups_in_flight(8) == 16
    assert config.parse(config.dump(parsed)) == parsed


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_configurations_parse(path: Path) -> None:
    parsed = config.load(path)
    assert config.parse(config.dump(parsed)) == parsed


def test_schema_names_every_section() -> None:
    text = str(config.schema())
    for key in config.all_keys():
        assert key.rpartition(".")[2] in text


def test_every_setting_has_a_reader() -> None:
    """A key that nobody reads is a lie to the user: each name stands in the code of a role."""
    sources = [
        path.read_text()
        for package in ("asyncrl", "buffers", "weightsync", "producers", "learners")
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("config.py", "algorithm_config.py", "learner_config.py")
    ]
    text = "\n".join(sources)
    derived = {
        "max_groups_in_flight": "groups_in_flight(",
        "pipeline_depth": ".depth",
        "name": ".label",
        **dict.fromkeys(("chosen_key", "rejected_key", "completion_key", "response_key"), "answer_keys("),
        **dict.fromkeys(("advantage_options", "loss_options", "correction_options"), "_options"),
    }
    unread = [
        key
        for key in config.all_keys()
        if not re.search(rf"\.{key.rpartition('.')[2]}\b", text)
        and derived.get(key.rpartition(".")[2], "\0") not in text
    ]
    assert unread == []


def test_more_groups_ahead_of_the_learner_than_fit_are_refused() -> None:
    [(code, _, message)] = errors_of(GOOD, "buffer.max_staleness=99999", "buffer.batch_groups=512")
    assert code == "config.conflict" and "at most 1000000 are supported" in message
