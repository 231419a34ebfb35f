"""F1 with `producers.checkpoint_tokens`: a producer is killed in the middle of a long sample, another one goes on.

The sample that is trained is the one that the dead producer would have made, with the versions of both; where the
buffer was killed as well it goes on all the same, and where all of its files are gone the sample starts anew.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plant import Plant

from asyncrl.versions import cut_runs

EVERY, LONGEST = 10, 200
EXTRA = (
    f"sampling.max_new_tokens={LONGEST}",
    f"producers.checkpoint_tokens={EVERY}",
    "producers.max_groups_in_flight=1",
    "buffer.batch_groups=2",
    "buffer.max_staleness=12",
    "buffer.pipeline_depth=2",
    "buffer.lease_timeout_s=1.5",
    "learner.checkpoint_every=1",
)
SLOW = (*EXTRA, "buffer.lease_timeout_s=8")  # the lease is still in force when the buffer dies
PIECES = 6
#: Deltas of the victim come slowly, so that versions change while it works.
VICTIM = {"TOY_TOKEN_S": "0.2", "ASYNCRL_FAILPOINT": f"producer.after_piece:kill:{PIECES}"}


def started(plant: Plant) -> None:
    plant.start("buffer", "weightsync", "reward-0", "learner")
    plant.roles["producer-0"].env = dict(VICTIM)
    plant.begin("producer-0")
    plant.roles["producer-0"].wanted = False  # it stays dead: its lease must expire
    plant.wait("the victim's lease", lambda: plant.history("lease"))
    plant.begin("producer-1")
    plant.wait("its death", lambda: not plant.roles["producer-0"].alive())


def whole(plant: Plant, group: int, index: int) -> Any:
    """The tokens of a sample of the toy engine, by its seed."""
    name = f"{plant.config.run.seed}/{group}".encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "little")
    rng = np.random.default_rng([seed, index])
    length = int(rng.integers(2, LONGEST + 1))
    tokens = rng.integers(3, 12, length)
    tokens[-1] = 2
    return tokens


def assert_right(plant: Plant, group: int, index: int) -> dict[str, Any]:
    """The sample came once, complete, and was scored as the one that its seed gives; its group was trained."""
    (sample,) = [line for line in plant.history("sample") if (line["g"], line["i"]) == (group, index)]
    tokens = whole(plant, group, index)
    assert sample["length"] == len(tokens) == sum(count for _, count in sample["runs"])
    (score,) = [line for line in plant.history("score") if (line["g"], line["i"]) == (group, index)]
    assert score["reward"] == pytest.approx((tokens.sum() % 7) / 7)
    assert any(group in line["groups"] for line in plant.history("commit"))
    return sample


@pytest.mark.long_cases("with the buffer")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("buffer_dies", [False, True], ids=["", "with the buffer"])
def test_f01_another_producer_goes_on_from_the_last_checkpoint(tmp_path: Path, buffer_dies: bool, figure: Any) -> None:
    with Plant(tmp_path, steps=10, producers=2, extra=EXTRA, env={"TOY_TOKEN_S": "0.02"}) as plant:
        started(plant)
        if buffer_dies:
            plant.kill("buffer", signal.SIGKILL)
        plant.wait_done()
        plant.assert_accounted()
        mine = plant.history("lease")[0]
        assert mine["producer"] == "producer-0"
        (lost,) = [line for line in plant.history("lost") if line["g"] == mine["g"]]
        (again,) = [line for line in plant.history("continue") if line["g"] == mine["g"]]
        assert lost["why"] == "silent" and again["producer"] == "producer-1" and not plant.history("discard")
        assert again["tokens"] and all(tokens % EVERY == 0 for tokens in again["tokens"].values())
        for index, tokens in again["tokens"].items():
            sample = assert_right(plant, mine["g"], int(index))
            first, last = sample["runs"][0][0], sample["runs"][-1][0]
            assert sample["producer"] == "producer-1" and first < last
            before = cut_runs(sample["runs"], 0, tokens)
            assert last not in [version for version, _ in before]
            assert set(map(int, sample["digests"])) == {version for version, _ in sample["runs"]}
            figure(f"{tokens} of {sample['length']} tokens were there, runs {before}; the whole: {sample['runs']}")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_f01_what_was_begun_is_lost_with_all_files_of_the_buffer(tmp_path: Path) -> None:
    """Then it starts anew: under the same id and seed, and nothing is trained that nobody vouches for."""
    with Plant(tmp_path, steps=10, producers=2, extra=SLOW, env={"TOY_TOKEN_S": "0.02"}) as plant:
        started(plant)
        plant.wait("a checkpoint", lambda: plant.committed() >= 1)
        plant.roles["buffer"].wanted = False
        plant.kill("buffer", signal.SIGKILL)
        plant.roles["buffer"].process.wait(60)  # type: ignore[union-attr]
        shutil.rmtree(plant.run.store)
        shutil.rmtree(plant.run.segments)
        plant.run.store.mkdir()
        plant.begin("buffer")
        plant.wait_done()
        plant.assert_accounted()
        mine = plant.history("lease")[0]["g"]
        assert not plant.history("continue")
        for index in range(2):
            assert assert_right(plant, mine, index)["producer"] == "producer-1"
