"""`asyncrl trace`: one group's story from the log, also over restarts, and of groups that never trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_run import START, good_history, issue, register, train, write_run

from asyncrl import wire
from asyncrl.cli import main
from asyncrl.errors import ConfigError
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.history import load_letters
from asyncrl.trace.render import story_text
from asyncrl.trace.story import Story, load_story
from buffers.payloads.dead_letters import DeadLetters


def made(folder: Path, events: list[dict[str, object]]) -> RunDir:
    """A run folder with this history, one event per second."""
    run = write_run(folder)
    lines = [json.dumps({"t": START + second, **event}, separators=(",", ":")) for second, event in enumerate(events)]
    run.history.write_text("\n".join(lines) + "\n")
    return run


def told(run: RunDir, group: int) -> Story:
    return load_story(run, group, prompt=False)


def test_a_trained_group(tmp_path: Path) -> None:
    run = made(tmp_path / "run", good_history())
    (run.metrics / "groups.jsonl").write_text(
        '{"t":1.0,"step":2,"replayed":false,"groups":[{"g":2,"indexes":[0,1],"advantages":[0.5,-0.5],'
        '"tokens":[5,4],"weights":[1.25,null]},{"g":3,"indexes":[],"advantages":[],"tokens":[],"weights":[]}]}\n'
    )
    story = told(run, 2)
    assert (story.state, story.bound, [sample.index for sample in story.samples]) == ("retired", 2, [0, 1])
    (training,) = story.training
    assert (training.step, training.version, training.lag, training.superseded) == (2, 1, 1, False)
    assert story.issued_at < story.unscored_at < story.ready_at < training.claimed_at < training.committed_at
    text = story_text(story)
    assert "group 2: RETIRED (bound 2)" in text and "lag 1 of 2" in text and "v0x5; reward 0.5 by reward-0" in text
    assert "#0: advantage +0.5000, 5 tokens, mean importance weight 1.2500" in text
    assert "#1: advantage -0.5000, 4 tokens, mean importance weight -" in text


def test_a_lost_lease_a_drop_and_a_death(tmp_path: Path) -> None:
    first, rest = issue(0, version=0)[:3], issue(0, version=0)[1:]
    events = [
        {"e": "service", "service_epoch": 1}, register(1, 0), *first,
        {"e": "lost", "g": 0, "token": 1, "producer": "producer-0", "why": "silent"},
        {"e": "discard", "g": 0, "i": 1, "why": "stale", "tokens": 512}, rest[0],
        {"e": "continue", "g": 0, "token": 1, "producer": "producer-1", "tokens": {"0": 1024}}, *rest[1:],
        *issue(1, version=0), {"e": "drop", "g": 1, "reason": "late"},
        *issue(2, version=0)[:2], {"e": "dead", "g": 2, "reason": "poison:logprobs", "detail": "logprobs: NaN at 3"},
    ]  # fmt: skip
    run = made(tmp_path / "run", events)
    story = told(run, 0)
    assert (story.leases[0].token, story.leases[0].lost, story.state) == (1, "silent", "ready")
    text = story_text(story)
    assert "goes on with #0 after 1024 tokens" in text
    assert "not continued by the next one: #1 after 512 tokens: stale" in text
    assert (told(run, 1).state, told(run, 1).reason) == ("dropped", "late")
    dead = told(run, 2)
    assert (dead.state, dead.reason, dead.detail) == ("dead", "poison:logprobs", "logprobs: NaN at 3")
    with pytest.raises(ConfigError, match="group 9 was never issued"):
        told(run, 9)


def test_samples_that_were_given_up_stay_in_the_story(tmp_path: Path) -> None:
    again = [{"e": "lost", "g": 0, "token": 1, "producer": "producer-0", "why": "late"}, *issue(0, version=3)[1:]]
    run = made(tmp_path / "run", [{"e": "service", "service_epoch": 1}, *issue(0, version=0), *again])
    story = told(run, 0)
    assert [sample.runs for sample in story.samples] == [[(3, 5)], [(3, 5)]]
    assert [sample.given_up for sample in story.given_up] == ["late", "late"]
    assert "given up: late" in story_text(story)


def test_what_a_restart_took_back_is_superseded(tmp_path: Path) -> None:
    events = [
        {"e": "service", "service_epoch": 1},
        register(1, 0),
        *issue(0, version=0),
        *train(1, [0]),
        register(2, 0),
        *train(1, [0], epoch=2, replayed=True),
    ]
    story = told(made(tmp_path / "run", events), 0)
    assert [(t.epoch, t.superseded, t.replayed) for t in story.training] == [(1, True, False), (2, False, True)]
    assert story.state == "trained" and "superseded" in story_text(story)


def test_a_log_that_is_being_written_and_a_damaged_line(tmp_path: Path) -> None:
    run = made(tmp_path / "run", good_history())
    with run.history.open("ab") as file:
        file.write(b'{"t":1,"e":"drop","g":2,garbage}\n{"t":1,"e":"drop","g":2,"reas')
    assert told(run, 2).state == "retired"


def test_dead_letters_say_what_is_wrong(tmp_path: Path) -> None:
    run = made(tmp_path / "run", [{"e": "service", "service_epoch": 1}, *issue(7, version=0)])
    letters = DeadLetters(run.dead)
    fields, payload = wire.pack_arrays({})
    message = wire.Samples("producer-3", 7, 4, (wire.SampleHead(0, 3, "stop", ((0, 3),)),), {}, fields, "", 0)
    letters.put(group=7, token=4, header=wire.encode_header(message), payload=payload)
    letters.put(group=8, token=5, header=b"\xff\xfenonsense", payload=b"")
    from asyncrl.config import load

    good, bad = load_letters(run, load(run.config))
    assert good.producer == "producer-3" and good.indexes == (0,) and good.wrong
    assert bad.producer == "" and bad.head.startswith("ff fe") and bad.wrong
    assert [letter.path for letter in told(run, 7).letters] == [good.path]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", good_history())
    assert main(["trace", str(run.root), "--step", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 3 from version 2") and len(lines) == 3
    assert main(["trace", str(run.root), "4", "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert story["group"] == 4 and story["training"][0]["step"] == 3
    assert "not shown" in story_text(load_story(run, 4)) or story["prompt"]  # the data of this run does not exist
    assert main(["trace", str(run.root), "--dead"]) == 0
    assert "0 dead groups" in capsys.readouterr().out
    assert main(["trace", str(tmp_path / "nothing"), "1"]) == 2
    assert main(["trace", str(run.root), "--step", "77"]) == 2
    assert "step 77 was never claimed" in capsys.readouterr().err


def test_images_of_a_prompt_are_named(tmp_path: Path) -> None:
    story = told(made(tmp_path / "run", good_history()), 2)
    story.prompt, story.images = {"images": ["a" * 64]}, ("image 30x20 aaaaaaaa",)
    assert "images    image 30x20 aaaaaaaa" in story_text(story)


def test_the_stages_of_all_trained_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Group 0 lost a lease after 3 s; group 1 is trained again by a restarted learner; group 2 is not trained yet."""

    def at(second: float, name: str, **more: object) -> dict[str, object]:
        return {"t": START + second, "e": name, **more}

    events = [
        *(at(0, "issue", g=group) for group in (0, 1, 2)),
        *(at(0, "lease", g=group) for group in (0, 1, 2)),
        at(3, "lease", g=0),
        at(4, "sample", g=1),
        at(5, "sample", g=0),
        at(6, "sample", g=0),
        at(6.5, "ready", g=1),
        at(7, "ready", g=0),
        at(8, "claim", groups=[0, 1]),
        at(10, "commit", groups=[0, 1]),
        at(20, "issue", g=1),
        at(20, "claim", groups=[1]),
        at(30, "commit", groups=[1]),
    ]
    run = write_run(tmp_path / "run")
    run.history.write_text("\n".join(json.dumps(event) for event in events) + "\n{damaged\n")
    assert main(["trace", str(run.root), "--latency", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == 2
    longest = {stage["name"]: stage["longest"] for stage in found["stages"]}
    assert longest == {"lost leases": 3, "generation": 4, "rewards": 2.5, "queue": 1.5, "training": 2, "total": 10}
    shares = {stage["name"]: stage["share"] for stage in found["stages"]}
    assert shares["total"] == 1 and shares["lost leases"] == 3 / 20 and shares["training"] == 4 / 20
    assert found["stages"][1]["p50"] == 3 and found["stages"][1]["p90"] == 4
    assert main(["trace", str(run.root), "--latency"]) == 0
    assert capsys.readouterr().out.startswith("2 trained groups, seconds:\n")
    run.history.write_text("")
    assert main(["trace", str(run.root), "--latency"]) == 0 and "no group was trained" in capsys.readouterr().out
