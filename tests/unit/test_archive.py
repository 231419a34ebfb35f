"""The archive of batches: files that are whole or refused, batches as they were claimed, comparison on a replay."""

from __future__ import annotations

import json
import random
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from asyncrl import wire
from asyncrl.config import Config, load, parse
from asyncrl.errors import WireError
from asyncrl.images.folder import ImageFolder
from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir
from asyncrl.trace.history import load_words
from asyncrl.wire.batch_arrays import ClaimedBatch, decode_batch
from learners.batch.archive import Archive, read_step


def make_config(root: Path, *, lr: float = 1e-3) -> Config:
    return parse(
        f'model.path="m"\nrun.dir="{root}"\ndata.source="a:b"\nlearner.optim.lr={lr}\n'
        'log.archive=true\n[[reward]]\nfunction="a:b"'
    )


def make_claim(
    step: int = 3,
    *,
    groups: tuple[int, ...] = (7, 9, 4),
    replayed: bool = False,
    reward: float = 0.5,
    tuning: str = "",
    row: str = '{"a":1}',
) -> ClaimedBatch:
    heads, payloads = [], []
    for number in groups:
        rng = np.random.default_rng(number)
        lengths = [3, 5]
        fields, payload = wire.pack_parts(
            {
                "prompt": ("i4", [np.arange(4, dtype=np.int32)]),
                "response": ("i4", [rng.integers(0, 20, n).astype(np.int32) for n in lengths]),
                "logprobs": ("f4", [-rng.random(n).astype(np.float32) for n in lengths]),
            }
        )
        samples = tuple(wire.SampleHead(i, n, "stop", ((step - 1, n),)) for i, n in enumerate(lengths))
        record = wire.Samples("producer-0", number, 77, samples, {step - 1: "d"}, fields, row, 4)
        heads.append(wire.GroupHead(number, 2, "", (wire.encode_header(record),), {0: reward, 1: 0.25}, {}))
        payloads.append(payload)
    places = tuple(wire.Place(0, 1, 2, 3, 4) for _ in groups)
    batch = wire.Batch(step, step - 1, tuple(heads), replayed, {"issued": 12}, places, tuning)
    return decode_batch(batch, payloads)


def contents(batch: ClaimedBatch) -> Any:
    return [
        (
            g.group,
            g.bound,
            g.row,
            g.prompt_ids.tolist(),
            [(s.index, s.response.tolist(), s.logprobs.tobytes(), s.runs, s.reward) for s in g.samples],
        )
        for g in batch.groups
    ]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def archive(tmp_path: Path, said: list[str]) -> Archive:
    return Archive(make_config(tmp_path), say=said.append)


def test_a_batch_comes_back_as_it_was_claimed(archive: Archive, said: list[str]) -> None:
    claim = make_claim(tuning='{"learner.algorithm.tis_cap":1.5}')
    archive.put(claim, epoch=2)
    back, meta = read_step(archive.folder, 3)
    assert contents(back) == contents(claim) and back.tuning == claim.tuning and back.step == 3 and back.version == 2
    assert meta.epoch == 2 and load(batch_file.config_path(archive.folder, meta.config)).learner.optim.lr == 1e-3
    assert batch_file.steps_in(archive.folder) == [3]
    assert back.frames is not None and back.frames.batch.places == () and said == []


def test_every_flipped_byte_is_noticed(archive: Archive) -> None:
    archive.put(make_claim(groups=(7,)), epoch=1)
    path = batch_file.batch_path(archive.folder, 3)
    whole = path.read_bytes()
    places = range(0, len(whole), 5)
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(WireError):
            batch_file.read(path)
    for size in [*range(40), *random.Random(0).sample(range(len(whole)), 40)]:
        path.write_bytes(whole[:size])
        with pytest.raises(WireError):
            batch_file.read(path)


def test_a_replayed_batch_without_its_quarantined_groups_is_the_same(archive: Archive, said: list[str]) -> None:
    archive.put(make_claim(), epoch=1)
    archive.quarantine(3, 9, "loss: not finite")
    path = batch_file.batch_path(archive.folder, 3)
    before = path.stat().st_mtime_ns
    archive.put(make_claim(groups=(7, 4), replayed=True), epoch=2)
    assert said == [] and path.stat().st_mtime_ns == before
    assert [group.group for group in read_step(archive.folder, 3)[0].groups] == [7, 9, 4], "what was claimed is kept"
    assert batch_file.read_quarantine(archive.folder) == {3: {9: "loss: not finite"}}


@pytest.mark.parametrize(
    "other", [{"groups": (7, 4)}, {"groups": (4, 7, 9)}, {"groups": (7, 9, 5)}, {"reward": 0.75}, {"tuning": "{}"}]
)
def test_another_batch_under_the_same_step_is_said_and_written(
    archive: Archive, said: list[str], other: dict[str, Any]
) -> None:
    archive.put(make_claim(), epoch=1)
    claim = make_claim(replayed=True, **other)
    archive.put(claim, epoch=2)
    assert len(said) == 1 and "came back and is not the one in the archive" in said[0]
    assert contents(read_step(archive.folder, 3)[0]) == contents(claim)


def test_a_batch_made_anew_replaces_the_old_one(archive: Archive, said: list[str]) -> None:
    archive.put(make_claim(), epoch=1)
    archive.put(make_claim(groups=(20, 21)), epoch=2)
    assert said == [] and [group.group for group in read_step(archive.folder, 3)[0].groups] == [20, 21]


def test_the_settings_of_the_last_training_count(archive: Archive, tmp_path: Path, said: list[str]) -> None:
    archive.put(make_claim(), epoch=1)
    Archive(make_config(tmp_path, lr=0.5), say=said.append).put(make_claim(replayed=True), epoch=2)
    meta = read_step(archive.folder, 3)[1]
    assert load(batch_file.config_path(archive.folder, meta.config)).learner.optim.lr == 0.5 and meta.epoch == 2
    assert len(list(archive.folder.glob("config-*.toml"))) == 2


def test_a_damaged_file_is_written_again(archive: Archive, said: list[str]) -> None:
    archive.put(make_claim(), epoch=1)
    path = batch_file.batch_path(archive.folder, 3)
    path.write_bytes(path.read_bytes()[:-20])
    archive.put(make_claim(replayed=True), epoch=2)
    assert "written again" in said[0] and contents(read_step(archive.folder, 3)[0]) == contents(make_claim())


def test_a_full_disk_costs_the_file_and_leaves_nothing(
    archive: Archive, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.put(make_claim(2), epoch=1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_file.os, "fsync", full)
    archive.put(make_claim(3), epoch=1)
    assert archive.lost == 1 and "No space left" in said[0]
    assert batch_file.steps_in(archive.folder) == [2] and not list(archive.folder.glob("*.tmp"))


def test_notes_cut_by_a_crash_are_left_out(archive: Archive) -> None:
    archive.quarantine(3, 9, "length: 9")
    with (archive.folder / batch_file.NOTES).open("ab") as file:
        file.write(b'{"step":4,"gro')
    assert batch_file.read_quarantine(archive.folder) == {3: {9: "length: 9"}}


def test_a_group_that_fails_validation_is_in_the_file(archive: Archive) -> None:
    claim = make_claim()
    assert claim.frames is not None
    bad = decode_batch(claim.frames.batch, [claim.frames.payloads[0], b"short", claim.frames.payloads[2]])
    assert set(bad.invalid) == {9}
    archive.put(bad, epoch=1)
    back, _ = read_step(archive.folder, 3)
    assert set(back.invalid) == {9} and back.frames is not None and bytes(back.frames.payloads[1]) == b"short"


def test_steps_of_other_files_are_not_batches(tmp_path: Path) -> None:
    for name in ("step-00000007.batch", "step-7.batch", ".step-00000008.batch.12.tmp", "config-aa.toml"):
        (tmp_path / name).touch()
    assert batch_file.steps_in(tmp_path) == [7] and batch_file.steps_in(tmp_path / "none") == []
    assert msgspec.structs.asdict(batch_file.Meta())["config"] == ""


# ---------------------------------------------------------------- what `asyncrl trace` reads


def test_the_words_of_a_group(archive: Archive, tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), make_config(tmp_path)
    assert load_words(run, config, group=9, steps=[3]) is None
    archive.put(make_claim(tuning='{"learner.algorithm.tis_cap":1.5}'), epoch=1)
    archive.quarantine(3, 9, "loss: not finite")
    words = load_words(run, config, group=9, steps=[2, 3])
    assert words is not None and words.step == 3 and words.prompt == "0 1 2 3", "no tokenizer: token ids"
    assert set(words.responses) == {0, 1} and words.finish == {0: "stop", 1: "stop"} and "tis_cap" in words.tuning
    assert words.quarantined == "loss: not finite" and load_words(run, config, group=8, steps=[3]) is None


def test_a_damaged_archive_is_a_sentence(archive: Archive, tmp_path: Path) -> None:
    archive.put(make_claim(), epoch=1)
    path = batch_file.batch_path(archive.folder, 3)
    path.write_bytes(path.read_bytes()[:-9])
    words = load_words(RunDir(tmp_path), make_config(tmp_path), group=9, steps=[3])
    assert words is not None and "step 3 cannot be read" in words.problem and words.responses == {}


def test_a_recorded_batch_comes_with_its_images(archive: Archive) -> None:
    """From the folder of the run; a group whose image is gone is named instead of being trained without it."""
    buffer = BytesIO()
    Image.new("RGB", (2, 2)).save(buffer, "PNG")
    images = ImageFolder(RunDir(archive.folder.parent).images)
    digest = images.put(buffer.getvalue())
    archive.put(make_claim(row=json.dumps({"images": [digest, digest]})), epoch=1)
    batch, _ = read_step(archive.folder, 3)
    assert batch.images == {digest: buffer.getvalue()} and len(batch.groups) == 3 and not batch.invalid
    (images.path / digest[:2] / digest).unlink()
    batch, _ = read_step(archive.folder, 3)
    assert batch.groups == () and batch.images == {} and "missing" in batch.invalid[7]
