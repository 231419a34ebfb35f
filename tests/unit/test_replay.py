"""Replay without a model: what is planned from the logs, what is refused, how results are judged; and forks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from synthetic_run import digest_of, write_run

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.runs.exported import record_step
from asyncrl.runs.fork import fork
from asyncrl.runs.replay import plan_replay, replay_command, replay_command_line
from asyncrl.runs.replay_report import Done, End, Plan, Step, judge, render
from asyncrl.runs.score_file import Head, read_scores, write_scores
from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir
from learners.replay import distance, drop_overrides

LAST = 6


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Six steps, all archived, with checkpoints of steps 2 and 4."""
    made = write_run(tmp_path / "run", steps=LAST)
    made.archive.mkdir()
    for step in range(1, LAST + 1):
        batch_file.batch_path(made.archive, step).touch()
    for step in (2, 4):
        write_checkpoint(made, step)
    return made


def write_checkpoint(run: RunDir, step: int) -> Path:
    folder = run.checkpoints / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder / "shard_00000.safetensors").write_bytes(bytes(range(256)) * 9000)
    (folder / "state.json").write_bytes(
        msgspec.json.encode({"step": step, "ledger": "", "digests": {str(step): digest_of(step)}})
    )
    entries = {
        path.name: {
            "bytes": path.stat().st_size,
            "blake2b": hashlib.blake2b(path.read_bytes(), digest_size=32).hexdigest(),
        }
        for path in folder.iterdir()
    }
    (folder / "manifest.json").write_bytes(msgspec.json.encode(entries))
    return folder


def plan_of(run: RunDir, begin: int = 0, end: int | None = None, *overrides: str) -> Plan:
    return plan_replay(run, begin=begin, end=end, overrides=overrides)


def refused(run: RunDir, begin: int = 0, end: int | None = None, *overrides: str) -> str:
    with pytest.raises(AsyncRLError) as error:
        plan_of(run, begin, end, *overrides)
    return error.value.message


def test_from_the_start_weights(run: RunDir) -> None:
    plan = plan_of(run)
    assert (plan.start, plan.checkpoint, plan.since, plan.start_digest) == (0, "", 0, digest_of(0))
    assert [step.step for step in plan.steps] == [1, 2, 3, 4, 5, 6]
    assert plan.steps[1] == Step(2, (2, 3), digest_of(2), plan.steps[1].metrics) and "loss" in plan.steps[1].metrics


def test_log_probs_of_a_teacher_are_no_rewards(run: RunDir, tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    for teacher in ("", "big"):
        write_scores(path, Head(str(run.root), ("a:b",), teacher=teacher), ())
        if teacher:
            with pytest.raises(AsyncRLError, match="log-probs of the teacher big"):
                plan_replay(run, begin=0, end=None, overrides=(), rewards=path)
        else:
            assert plan_replay(run, begin=0, end=None, overrides=(), rewards=path).rewards == str(path)
    path.write_text('{"run": "r", "functions": ["a:b"]}\n')  # an older file
    assert read_scores(path)[0].teacher == ""


@pytest.mark.parametrize(("begin", "start"), [(1, 0), (2, 2), (3, 2), (4, 4), (5, 4)])
def test_from_the_newest_checkpoint_at_or_before(run: RunDir, begin: int, start: int) -> None:
    plan = plan_of(run, begin)
    assert (plan.start, plan.since) == (start, begin) and plan.steps[0].step == start + 1
    assert plan.checkpoint == (str(run.checkpoints / f"step_{start:06d}") if start else "")
    assert plan.start_digest == digest_of(start)


def test_the_final_weights_are_those_of_a_checkpoint_or_of_the_export(run: RunDir) -> None:
    assert plan_of(run, 0, 4).final == str(run.checkpoints / "step_000004")
    assert plan_of(run, 0, 5).final == plan_of(run).final == ""
    run.export.mkdir()
    for name in ("model.safetensors", "config.json"):
        (run.export / name).touch()
    assert plan_of(run).final == "", "of which step they are is not known"
    with record_step(run, LAST, lead=True):
        assert plan_of(run).final == ""
    assert plan_of(run).final == str(run.export / "model.safetensors") and plan_of(run, 0, 5).final == ""
    (run.export / "model.safetensors").rename(run.export / "model.safetensors.index.json")  # several files
    assert plan_of(run).final == str(run.export / "model.safetensors.index.json")
    with record_step(run, LAST - 1, lead=True):
        pass
    assert plan_of(run).final == "", "the run went on since"


def test_what_is_missing_is_named(run: RunDir) -> None:
    assert "steps after 6" in refused(run, 6) and "steps after 0 up to 9" in refused(run, 0, 9)
    assert "steps after 3 up to 3" in refused(run, 3, 3)
    assert "buffer.max_staleness cannot be changed in a replay" in refused(run, 0, None, "buffer.max_staleness=1")
    assert "clip_hihg" in refused(run, 0, None, "learner.algorithm.clip_hihg=1")
    batch_file.batch_path(run.archive, 5).unlink()
    assert "the batch of step 5 is not archived (1 of 6" in refused(run)
    assert len(plan_of(run, 0, 4).steps) == 4
    run.history.unlink()
    assert refused(run) == "no step was committed"


def test_results_stay_outside_of_the_run_and_strange_folders_stay(run: RunDir, tmp_path: Path) -> None:
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "thesis.txt").touch()
    for out in (run.root, run.root / "inside", tmp_path, strange):
        with pytest.raises(AsyncRLError):
            replay_command(run.root, begin=0, end=None, overrides=(), out=out, as_json=True)
    assert (strange / "thesis.txt").exists() and not (run.root / "inside").exists()


def test_several_ranks_replay_under_torchrun(run: RunDir) -> None:
    from asyncrl.config import load

    one = replay_command_line(load(run.config), run.config)
    many = replay_command_line(load(run.config, ["learner.ranks=2"]), run.config)
    assert "learners.replay" in one and "learners.gang.local_gang" not in one
    assert "learners.replay" in many and "learners.main" not in many
    assert many[many.index("--nproc-per-node") + 1] == "2"


def done(step: int, digest: str = "") -> Done:
    return Done(step, digest or digest_of(step), {"loss": step / 10, "entropy": 1.0})


def test_equal_versions_are_counted_and_the_first_other_one_is_named(run: RunDir) -> None:
    plan = plan_of(run)
    lines = [done(step) for step in range(1, LAST + 1)]
    end = End(digest_of(0), "cpu")
    good = judge(plan, lines, end, wall_s=1.0)
    assert good.ok and "6 of 6 versions bitwise equal" in render(good)
    lines[3] = done(4, "beef")
    lines[4] = done(5, "beef")
    bad = judge(plan, lines, End(digest_of(0), "cuda"), wall_s=1.0)
    assert not bad.ok and bad.first_different == 4 and (bad.equal, bad.checked) == (4, 6)
    assert "the first that differs is version 4: beef here" in render(bad) and "1 x cuda" in render(bad)


def test_other_start_weights_are_named(run: RunDir) -> None:
    found = judge(plan_of(run), [done(step) for step in range(1, LAST + 1)], End("beef", "cpu"), wall_s=1.0)
    assert not found.ok and found.first_different == 0 and "was the model changed" in render(found)


def test_a_log_without_digests_proves_nothing(run: RunDir) -> None:
    plan = plan_of(run)
    blind = msgspec.structs.replace(plan, steps=[msgspec.structs.replace(step, digest="") for step in plan.steps])
    found = judge(blind, [done(step) for step in range(1, LAST + 1)], End(digest_of(0), "cpu"), wall_s=1.0)
    assert not found.ok and found.checked == 0 and "this proves nothing" in render(found)


def test_changed_settings_are_no_fault_after_their_step_alone(run: RunDir) -> None:
    plan = plan_of(run, 3, None, "learner.algorithm.clip_high=0.3")
    lines = [done(3), *(done(step, "beef") for step in (4, 5, 6))]
    found = judge(
        plan, lines, End(digest_of(2), weights={"distance": 1.0, "relative": 0.1, "largest": 0.5}), wall_s=1.0
    )
    assert (
        found.ok and (found.checked, found.equal) == (1, 1) and [s.changed for s in found.steps] == [False] + [True] * 3
    )
    assert "what if, from step 4 on: learner.algorithm.clip_high=0.3" in render(found) and "distance 1" in render(found)
    lines[0] = done(3, "beef")
    assert not judge(plan, lines, End(digest_of(2)), wall_s=1.0).ok, "what leads to it must be as it was"


def test_set_wins_over_what_was_tuned() -> None:
    tuned = '{"learner.algorithm.tis_cap":1.5,"learner.algorithm.clip_high":0.4}'
    assert drop_overrides(tuned, ["learner.algorithm.tis_cap=9"]) == '{"learner.algorithm.clip_high":0.4}'
    assert drop_overrides(tuned, []) == tuned and drop_overrides("", ["a=1"]) == ""
    assert drop_overrides('{"learner.algorithm.tis_cap":1.5}', ["learner.algorithm.tis_cap=9"]) == ""


def test_the_distance_of_weights() -> None:
    import torch

    one, two = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 1.0])
    found = distance(iter([("a", two), ("b", torch.ones(1))]), iter([("a", one), ("b", torch.ones(1))]))
    assert found == {"distance": 3.0, "relative": 3 / 26**0.5, "largest": 3.0}


# ---------------------------------------------------------------- forks


def test_a_fork_is_a_whole_folder(run: RunDir, tmp_path: Path) -> None:
    from asyncrl.config import load

    made = fork(run.root, tmp_path / "fork", step=4, overrides=["learner.optim.lr=0.5"])
    assert made.step == 4 and made.parent == str(run.root) and made.digest == digest_of(4)
    config = load(tmp_path / "fork" / "config.toml")
    assert config.run.dir == str(tmp_path / "fork") and config.learner.optim.lr == 0.5 and "-fork" in config.run.name
    copied = tmp_path / "fork" / "checkpoints" / "step_000004"
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in (run.checkpoints / "step_000004").iterdir()
    }
    assert sorted(path.name for path in (tmp_path / "fork").iterdir()) == ["checkpoints", "config.toml", "fork.json"]


def test_a_fork_derives_its_numbers_anew_and_has_options_of_its_own_loss(run: RunDir, tmp_path: Path) -> None:
    from asyncrl.config import load

    frozen = "[learner.algorithm]\nloss_scale_factor = 1024.0\nshaping.overlong_max = 1024\n"
    gspo = 'preset = "gspo"\nloss = "gspo"\nloss_options = { clip_low = 3e-4 }\n'  # as an earlier version resolved it
    run.config.write_text(run.config.read_text().partition("[learner.algorithm")[0] + frozen + gspo)
    assert load(run.config).learner.algorithm.loss_options["clip_low"] == 3e-4
    with pytest.raises(ConfigError, match="another digest"):
        fork(run.root, tmp_path / "fork", step=4, overrides=["weightsync.bucket_bytes=1048576"])
    fork(run.root, tmp_path / "fork", step=4, overrides=["sampling.max_new_tokens=64", "learner.algorithm.loss=ppo"])
    algorithm = load(tmp_path / "fork" / "config.toml").learner.algorithm
    assert (algorithm.shaping.overlong_max, algorithm.loss_scale_factor) == (64, 64.0)
    assert (algorithm.loss, algorithm.loss_options) == ("ppo", {})


@pytest.mark.parametrize("name", ["state.json", "shard_00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_damaged_checkpoint_makes_no_fork(run: RunDir, tmp_path: Path, name: str, how: str) -> None:
    path = run.checkpoints / "step_000004" / name
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "cut" else b"\xff" + data[1:])
    with pytest.raises(AsyncRLError) as error:
        fork(run.root, tmp_path / "fork", step=4)
    assert error.value.code == "learner.checkpoint"
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "nothing is left behind"


def test_a_fork_is_refused_where_it_would_do_harm(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for target, step, part in (
        (tmp_path / "full", 4, "not empty"),
        (run.root / "inside", 4, "outside of its parent"),
        (run.root, 4, "outside"),
        (tmp_path / "new", 3, "there are: 2, 4"),
    ):
        with pytest.raises(AsyncRLError) as error:
            fork(run.root, target, step=step)
        assert part in error.value.message
    assert not (tmp_path / "new").exists()
