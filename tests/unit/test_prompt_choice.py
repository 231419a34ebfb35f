"""Prompts chosen by difficulty: the choice, its rows in the store, its lines in the history, and their audit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.audit.reader import Reader
from asyncrl.config import DataConfig, parse
from asyncrl.errors import ConfigError, ConfigErrors, HandshakeError
from asyncrl.prompt_choice import CANDIDATES, CHANCE, MOST, PromptChoice
from asyncrl.wire import LeaseReturn, SampleHead, Samples
from buffers.groups.machine import GroupMachine, finish_group
from buffers.groups.prompt_table import CHUNK
from buffers.groups.records import Ledger, Record, Settings
from buffers.groups.transaction import SampleEvent
from producers.data import show_prompt
from producers.data.prompts import BadPrompt, Prompts

SETTINGS = Settings(
    group_size=2, batch_groups=1, max_staleness=20, depth=20, total_groups=1000, seed=7, chooses=True, max_reissue=1
)


# ---------------------------------------------------------------- the choice


def taught(rows: int, mixed: range) -> PromptChoice:
    """A table in which all groups of the rows `mixed` had different rewards, those of the others never."""
    choice = PromptChoice(rows, seed=7)
    for row in range(rows):
        for _ in range(MOST):
            choice.observe(row, mixed=row in mixed)
    return choice


def test_choices_are_the_same_on_every_machine() -> None:
    assert [PromptChoice(100, seed=7).choose(group) for group in range(8)] == CHOSEN
    assert [taught(100, range(10)).choose(group) for group in range(8)] == TAUGHT


CHOSEN = [25, 53, 14, 2, 34, 14, 46, 64]
TAUGHT = [5, 6, 2, 9, 4, 14, 7, 4]


def test_rows_without_outcomes_are_drawn_alike() -> None:
    counts = Counter(PromptChoice(10, seed=3).choose(group) for group in range(5000))
    assert all(abs(counts[row] - 500) < 100 for row in range(10))


def test_no_row_is_forgotten_and_none_takes_all() -> None:
    groups = 8000
    counts = Counter(taught(100, range(10)).choose(group) for group in range(groups))
    by_chance = groups / 100
    assert min(counts[row] for row in range(10, 100)) > 0.5 * by_chance / CHANCE
    assert max(counts.values()) < CANDIDATES * by_chance
    assert sum(counts[row] for row in range(10)) > 0.6 * groups, "a tenth of the rows teaches, and gets most groups"


def test_old_outcomes_fade() -> None:
    choice = taught(1, range(0))
    for _ in range(MOST):
        choice.observe(0, mixed=True)
    assert choice.mixed[0] > 2 * choice.same[0] and choice.mixed[0] + choice.same[0] <= MOST


def test_numbers_stay_when_rows_are_added() -> None:
    choice = taught(3, range(1))
    choice.resize(5)
    assert (list(choice.mixed), list(choice.same)) == ([MOST, 0, 0, 0, 0], [0, MOST, MOST, 0, 0])
    choice.resize(1)
    assert len(choice) == 1


def test_where_few_rows_teach_an_unknown_one_is_tried_less() -> None:
    few, hopeful = taught(40, range(2)), taught(40, range(2))
    for choice in (few, hopeful):
        choice.resize(80)
    hopeful._all_same = hopeful._all_mixed  # as if half of the groups had taught
    chosen = [[choice.choose(group) for group in range(2000)] for choice in (few, hopeful)]
    known, unknown = ([sum(row in rows for row in one) for one in chosen] for rows in (range(2), range(40, 80)))
    assert known[0] > 1.5 * known[1] and unknown[0] < unknown[1]
    copy = PromptChoice(80, seed=7)
    copy.mixed[:], copy.same[:] = few.mixed, few.same
    copy.count()
    assert [copy.choose(group) for group in range(50)] == [few.choose(group) for group in range(50)]


# ---------------------------------------------------------------- in the buffer


class Lab:
    """A machine, the rows that a store would hold and the history that it would write."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.stored: dict[str, bytes] = {}
        self.events: list[dict[str, Any]] = []
        self.epoch = 0
        self.requests = 0
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.machine = GroupMachine(self.settings, epoch=self.epoch)
        self.machine.load(self.stored.items())
        self.machine.note_start(0.0)
        self.save()

    def register(self, rows: int = 40) -> None:
        self.machine.register(name="l", pid=1, host="h", step=0, ledger=Ledger(), takeover=True, now=0.0)
        self.machine.prompts.greet("p", rows)
        self.save()

    def save(self) -> None:
        changes = self.machine.take()
        for row in changes.rows:
            if row.value is None:
                self.stored.pop(row.key, None)
            else:
                self.stored[row.key] = row.value
        for event in changes.events:
            line = event
            if isinstance(event, SampleEvent):
                line = {name: getattr(event, name) for name in event.__struct_fields__} | {"e": "sample"}
            self.events.append(line)  # type: ignore[arg-type]
        self.machine.check()

    def lease(self, groups: int = 1) -> list[Any]:
        self.requests += 1
        found = self.machine.lease("p", engine_version=0, max_groups=groups, request=self.requests, now=0.0)
        self.save()
        return list(found)

    def play(self, groups: int) -> None:
        """Groups of even rows have different rewards."""
        for lease in self.lease(groups):
            group = self.machine.table.groups[lease.group]
            finish_group(self.machine, lease.group, now=0.0, reward=1.0) if lease.row % 2 else self.mix(group)
            self.save()

    def mix(self, group: Any, indices: tuple[int, ...] = (0, 1)) -> None:
        heads = tuple(SampleHead(index, 1, "stop", ((0, 1),)) for index in indices)
        head = Samples(
            "p", group.id, group.token, heads, {}, (), "", 1, rewards={index: float(index) for index in indices}
        )
        self.machine.samples(head, checksum=1, invalid=str, keep=lambda: Record(0, 0, 0, 0, 1), now=0.0)

    def violations(self) -> list[str]:
        reader = Reader(keeps_batches=True)
        for event in self.events:
            reader.take(json.loads(json.dumps({**event, "t": 0.0})))
        return [text for text in reader.found.violations if text.startswith("choice")]


def test_a_group_keeps_its_row_and_the_store_holds_the_table() -> None:
    lab = Lab()
    lab.register()
    lab.play(15)
    [lease] = lab.lease()
    table = bytes(lab.machine.prompts.choice.mixed)
    assert sum(table) > 0 and set(lab.stored) >= {"prompts", "prompts0", f"row{lease.group}"}
    lab.start()  # the service is killed
    assert bytes(lab.machine.prompts.choice.mixed) == table
    lab.machine.hello("producer", "p", pid=2, host="h", now=0.0)  # its lease is lost
    lab.machine.prompts.greet("p", 40)
    [again] = lab.lease()
    assert (again.group, again.row) == (lease.group, lease.row) and again.token != lease.token
    lab.play(5)
    assert lab.violations() == [] and sum(event["e"] == "outcome" for event in lab.events) == 20


def test_rows_that_teach_are_chosen_more_and_more() -> None:
    lab = Lab()
    lab.register()
    for _ in range(20):
        lab.play(1)
    # the learner takes no batch, so groups pile up until admission ends; choices go on as a pure function
    chosen = Counter(lab.machine.prompts.choice.choose(group) % 2 for group in range(1000, 2000))
    assert chosen[0] > chosen[1]


def test_a_row_leaves_the_store_with_its_group() -> None:
    lab = Lab()
    lab.register()
    [lease] = lab.lease()
    back = LeaseReturn("p", ((lease.group, lease.token),), "too_long", dead=True)
    lab.machine.give_back(back, now=0.0)
    lab.save()
    assert f"row{lease.group}" not in lab.stored and lab.machine.prompts.choice.same[lease.row] == 1
    assert lab.violations() == []


def test_a_store_that_went_back_begins_with_an_empty_table() -> None:
    lab = Lab()
    lab.register()
    lab.play(5)
    earlier = dict(lab.stored)
    lab.play(5)
    lab.stored = earlier
    lab.start()
    lab.machine.recovery.note_state_lost()
    lab.register()
    assert sum(lab.machine.prompts.choice.mixed) + sum(lab.machine.prompts.choice.same) == 0
    lab.play(5)
    assert lab.violations() == []


def test_an_emptied_store_hears_the_number_of_rows_again() -> None:
    lab = Lab()
    lab.register()
    lab.play(5)
    lab.stored = {}
    lab.start()
    lab.machine.recovery.note_state_lost()
    lab.register()
    assert lab.lease()[0].row >= 0 and lab.violations() == []


def test_a_store_that_lost_everything_gets_all_rows() -> None:
    lab = Lab()
    lab.register(rows=CHUNK + 5)
    lab.play(5)
    [lease] = lab.lease()
    again = GroupMachine(SETTINGS, epoch=9)
    again.load([(change.key, change.value or b"") for change in lab.machine.rows()])
    assert again.prompts.by_group[lease.group] == lease.row
    assert (again.prompts.choice.mixed, again.prompts.choice.same) == (
        lab.machine.prompts.choice.mixed,
        lab.machine.prompts.choice.same,
    )


def test_producers_read_the_same_number_of_rows() -> None:
    lab = Lab()
    lab.register()
    with pytest.raises(HandshakeError, match="other reads 41 rows of data, this run 40"):
        lab.machine.prompts.greet("other", 41)
    with pytest.raises(HandshakeError, match="old reads 0 rows"):
        lab.machine.prompts.greet("old", 0)
    lab.start()
    lab.machine.prompts.greet("p", 50)  # the data grew between two services
    lab.save()
    assert len(lab.machine.prompts.choice) == 50 and lab.violations() == []


def test_without_the_setting_nothing_is_written() -> None:
    lab = Lab(Settings(group_size=2, batch_groups=1, max_staleness=20, depth=20, total_groups=1000))
    lab.register(rows=0)
    lab.play(5)
    assert not [key for key in lab.stored if key.startswith(("prompts", "row"))]
    assert not {event["e"] for event in lab.events} & {"choose", "outcome", "prompts"}
    assert [lease.row for lease in lab.lease()] == [-1]


def test_a_group_that_has_samples_of_its_own_row_keeps_it_when_the_setting_comes() -> None:
    lab = Lab(replace(SETTINGS, chooses=False))
    lab.register(rows=0)
    begun, untouched = lab.lease(2)
    lab.mix(lab.machine.table.groups[begun.group], indices=(0,))
    lab.save()
    lab.settings = SETTINGS
    lab.start()
    lab.machine.prompts.greet("p", 40)
    lab.machine.hello("producer", "p", pid=2, host="h", now=0.0)
    rows = {lease.group: lease.row for lease in lab.lease(2)}
    assert rows[begun.group] == -1 and rows[untouched.group] >= 0 and lab.violations() == []


# ---------------------------------------------------------------- audit


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("choose", lambda event: {"row": (event["row"] + 1) % 40}, "the outcomes before it choose"),
        ("outcome", lambda event: {"mixed": not event["mixed"]}, "counts as one with"),
        ("outcome", lambda event: {"row": (event["row"] + 1) % 40}, "which it did not get"),
        ("prompts", lambda event: {"seed": 8}, "the outcomes before it choose"),
        ("prompts", lambda event: {"rows": 1 << 40}, "rows to choose from"),
    ],
)
def test_a_changed_history_is_found(name: str, changed: Any, said: str) -> None:
    lab = Lab()
    lab.register()
    lab.play(10)
    place = next(number for number, event in enumerate(lab.events) if event["e"] == name)
    lab.events[place] = {**lab.events[place], **changed(lab.events[place])}
    assert any(said in text for text in lab.violations())


# ---------------------------------------------------------------- rows of the data


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(5)))
    return path


def test_the_chosen_row_is_read(data: Path) -> None:
    prompts = Prompts(DataConfig(path=str(data), sampler="difficulty"), seed=0)
    assert prompts.chosen_among == 5 and prompts.row_for(99, 3) == {"prompt": "p3"}
    with pytest.raises(BadPrompt, match="row: 5 was chosen, the data has 5 rows"):
        prompts.row_for(99, 5)
    assert Prompts(DataConfig(path=str(data)), seed=0).chosen_among == 0


def test_rows_without_a_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("def rows():\n    yield {'prompt': 'p'}\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="gives no sequence"):
        Prompts(DataConfig(source="endless.py:rows", sampler="difficulty"), seed=0)


def test_a_trace_reads_the_chosen_row(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[model]\npath = "m"\n[data]\npath = "{data}"\n[[reward]]\nfunction = "m:f"\n')
    assert show_prompt.main(["--config", str(config), "--group", "0", "--row", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["row"] == {"prompt": "p4"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('sampler = "hard"', "Invalid value 'hard'; one of difficulty"),
        ('sampler = "difficulty"\npath = "a.jsonl,b.jsonl"\nratios = [1, 1]', "use either data.ratios or data.sampler"),
        ('sampler = "difficulty"\n[producers]\nengine = "dataset"\n[learner]\nmode = "sft"', "this run has none"),
    ],
)
def test_wrong_settings_are_said(text: str, said: str) -> None:
    path = "" if "path" in text else 'path = "rows.jsonl"\n'
    with pytest.raises(ConfigErrors, match=said.replace("(", r"\(")):
        parse(f'[model]\npath = "m"\n[[reward]]\nfunction = "m:f"\n[data]\n{path}{text}\n')
