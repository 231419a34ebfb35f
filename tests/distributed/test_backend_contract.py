"""Every layout of every backend against one process: losses, norms, log-probs, exported weights, checkpoints."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import backend_contract as cases
import msgspec
import numpy as np
import pytest
import ranks
import torch
from safetensors.numpy import load_file

from asyncrl.errors import AsyncRLError
from learners.backends.sharded_checkpoint import own_name
from learners.checkpoints.export import export_files
from learners.gang.gang import Gang

#: The first test of a layout waits for its launch, and for the one whose checkpoint that loads.
pytestmark = pytest.mark.timeout(1200)

MEGATRON_LAYOUTS = tuple(f"megatron_{name}" for name in ("tensor", "pipeline", "shares", "both", "mixed", "expert"))
#: Ranks and job.
LAYOUTS = [(2, "backend_contract"), (2, "ulysses"), (4, "hsdp"), (4, "tensor"), (4, "expert")]
LAYOUTS += [(count, job) for count, jobs in ranks.LAUNCHES.items() for job in jobs if job in MEGATRON_LAYOUTS]


def job_of(layout: tuple[int, str]) -> ranks.Job:
    return ranks.LAUNCHES[layout[0]][layout[1]]


CASES = [(layout, name) for layout in LAYOUTS for name in cases.wanted_of(job_of(layout).layout)]
LONG = [f"{layout[1]}-{name}" for layout, name in CASES if name in cases.long_of(job_of(layout).layout)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=[name for _, name in LAYOUTS])


@pytest.fixture(scope="module")
def single(model: Path, gang: Gang, one: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of one process with the model of a layout, and their folder."""
    found = {"": one}

    def of(layout: tuple[int, str]) -> Any:
        job = job_of(layout)
        if job.model not in found:
            out = tmp_path_factory.mktemp("single")
            same = [job_of(one).layout for one in LAYOUTS if job_of(one).model == job.model]
            wanted = tuple(dict.fromkeys(name for one in same for name in cases.trained_of(one)))
            found[job.model] = cases.run_all(model / job.model, gang, out, wanted=wanted), out
        return found[job.model]

    return of


def close(got: Any, wanted: Any, limit: float, what: str = "") -> None:
    np.testing.assert_allclose(got, wanted, atol=limit, rtol=limit, err_msg=what)


def compare(got: dict[str, Any], wanted: dict[str, Any], *, limit: float = 1e-5) -> None:
    for left, right in zip(got["metrics"], wanted["metrics"], strict=True):
        assert left.keys() == right.keys()
        for name in ("loss", "grad_norm", "entropy", "kl_behaviour", "ess", "ratio_max", "clip_share"):
            assert left[name] == pytest.approx(right[name], rel=limit, abs=limit), name
    for left, right in zip(got.get("to_samples", ()), wanted.get("to_samples", ()), strict=True):
        assert len(left) == len(right) and left, "a mean importance weight of every sample, on whatever rank it was"
        for (number, weight), (other, expected) in zip(left, right, strict=True):
            assert number == other and weight == pytest.approx(expected, rel=limit, abs=limit)
    assert got["names"] == wanted["names"]
    for name, values in got["weights"].items():
        np.testing.assert_allclose(values, wanted["weights"][name], atol=limit, rtol=0, err_msg=name)


@pytest.mark.chaos_cases(*LONG)
@pytest.mark.parametrize(("layout", "name"), CASES, ids=[f"{layout[1]}-{name}" for layout, name in CASES])
def test_steps_equal_one_process(results_of: Any, single: Any, layout: tuple[int, str], name: str) -> None:
    got, wanted = results_of(*layout)[0][name], single(layout)[0][name]
    compare(got, wanted, limit=1e-5)
    if "specs" in got:
        assert got["specs"] == [[*spec[:2], list(spec[2])] for spec in wanted["specs"]]
    else:
        assert got["coefficients"] == pytest.approx(msgspec.to_builtins(wanted["coefficients"]), rel=1e-6)
        assert (got["kl_coeff"] not in (0.001, 0.1)) is (name == "kl_reward")


@every_layout
def test_a_forward_pass_gives_the_same_numbers(results_of: Any, single: Any, layout: tuple[int, str]) -> None:
    got, wanted = results_of(*layout)[0]["forward"], single(layout)[0]["forward"]
    assert (got.pop("split_heads") > 0) is (layout[1] == "tensor")  # no gather of the head there
    for what, numbers in wanted.items():
        if what == "split_heads":
            continue
        assert {int(sample) for sample in got[what]} == set(range(14))
        for sample, values in numbers.items():
            close(got[what][str(sample)], values, 2e-6, f"{what} of sample {sample}")
    for sample, values in got["logprobs"].items():
        assert got["again"][sample] == values  # the same pass, with entropies and squares
        close(got["reference"][sample], values, 2e-6)  # before the first update
    assert got["after"] != got["logprobs"]


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if "megatron" not in one[1]], ids=lambda one: one[1])
def test_start_weights_read_in_parts_are_those_read_whole(results_of: Any, layout: tuple[int, str]) -> None:
    got = results_of(*layout)[0]["start"]
    assert got["parts"] == got["whole"] and "inv_freq" in got["whole"][2]
    for parts, whole, mine in got["counts"]:
        assert parts == mine < 0.6 * got["elements"] and whole == 0  # of 4 ranks HSDP and expert hold a half or less


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if "megatron" not in one[1]], ids=lambda one: one[1])
def test_no_rank_holds_whole_gradients_between_micro_batches(results_of: Any, layout: tuple[int, str]) -> None:
    held = results_of(*layout)[0]["whole_gradients"]
    assert len(held) > 1 and not any(held)


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if "megatron" not in one[1]], ids=lambda one: one[1])
def test_every_rank_refuses_packed_rows_whose_sequences_see_each_other(
    results_of: Any, layout: tuple[int, str]
) -> None:
    """The cases have passed the same check with the model as it is."""
    assert results_of(*layout)[0]["mixed"] == ["learner.packing learner.packing"] * layout[0]


@every_layout
def test_half_precision_has_narrow_exports(results_of: Any, single: Any, layout: tuple[int, str]) -> None:
    half, plain = results_of(*layout)[0]["half"], single(layout)[0]["plain"]
    for name, dtype, shape in half["specs"]:
        assert dtype == "BF16" and half["bytes"][name] == 2 * int(np.prod(shape)), name
    assert half["metrics"]["loss"] == pytest.approx(plain["metrics"][0]["loss"], abs=0.02)
    assert half["metrics"]["grad_norm"] == pytest.approx(plain["metrics"][0]["grad_norm"], rel=0.05)
    assert half["metrics"]["loss"] != plain["metrics"][0]["loss"]


@every_layout
def test_a_checkpoint_continues_bitwise_in_its_layout(results_of: Any, layout: tuple[int, str]) -> None:
    resume = results_of(*layout)[0]["resume"]
    assert resume["saved"] == resume["loaded"]
    assert resume["digest"] == resume["digest_again"] != resume["saved"]
    assert resume["third"] == resume["again"]
    assert resume["written"] == ["same"] * layout[0]  # a copy that no later update changed, on every rank


def check_continued(got: dict[str, Any], again: Path, written: Any, plain: dict[str, Any]) -> None:
    """The other layout has the same weights and states, bit by bit, and trains the third step as if unbroken."""
    results, out = written
    assert got["loaded"] == results["resume"]["saved"]
    held = cases.contents(out / "checkpoint")
    assert cases.contents(again) == held
    assert {name.partition("/")[0] for name in held} == {"model", "exp_avg", "exp_avg_sq", "step"}
    compare(got, {**got, "metrics": [plain["metrics"][2]], "weights": plain["weights"]})


@pytest.mark.parametrize("backend", ["fsdp2", *["megatron"] * ranks.HAS_MEGATRON])
@every_layout
def test_a_checkpoint_continues_on_one_rank(  # noqa: PLR0917
    model: Path, gang: Gang, results_of: Any, single: Any, layout: tuple[int, str], backend: str, tmp_path: Path
) -> None:
    written, again = results_of(*layout), tmp_path / "again"
    of = (model / job_of(layout).model, gang, written[1] / "checkpoint", f"learner.backend={backend}")
    got = cases.continued(*of, again=again)
    check_continued(got, again, written, single(layout)[0]["plain"])


#: Reader, writer.
PAIRS = [(layout, other) for layout in LAYOUTS for other in job_of(layout).others]


@pytest.mark.parametrize(("layout", "other"), PAIRS, ids=[f"{layout[1]}-{other[1]}" for layout, other in PAIRS])
def test_a_checkpoint_of_another_layout_continues(
    results_of: Any, single: Any, layout: tuple[int, str], other: tuple[int, str]
) -> None:
    results, out = results_of(*layout)
    got, again = results["from_others"][other[1]], out / f"again_{other[1]}"
    check_continued(got, again, results_of(*other), single(layout)[0]["plain"])


@every_layout
def test_a_replica_is_written_once(results_of: Any, single: Any, layout: tuple[int, str]) -> None:
    """The files of all ranks together hold what the file of one holds."""
    from safetensors import safe_open

    def elements(folder: Path) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in folder.glob("shard_*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    if not name.startswith("extra/"):
                        own = own_name(name)
                        found[own] = found.get(own, 0) + file.get_tensor(name).numel()
        return found

    assert elements(results_of(*layout)[1] / "checkpoint") == elements(single(layout)[1] / "checkpoint")


@every_layout
def test_a_missing_part_is_refused(
    model: Path, gang: Gang, results_of: Any, layout: tuple[int, str], tmp_path: Path
) -> None:
    shutil.copy(results_of(*layout)[1] / "checkpoint" / "shard_00000.safetensors", tmp_path)
    backend = cases.make_backend(cases.make_config(model / job_of(layout).model), gang)
    with pytest.raises(AsyncRLError, match="are not in"):
        backend.load(tmp_path)


@every_layout
def test_the_export_is_a_hugging_face_folder(results_of: Any, single: Any, layout: tuple[int, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = results_of(*layout)[1] / "export"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).encode("12")
    tied = not job_of(layout).model
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    assert loaded.generation_config.eos_token_id == 2
    wanted = single(layout)[0]["plain"]["weights"]
    written = tensors_in(folder)
    assert written.keys() == wanted.keys(), "versions have the names of folders"
    for name, values in written.items():
        np.testing.assert_allclose(values.flatten(), wanted[name], atol=1e-5, err_msg=name)


def tensors_in(folder: Path) -> dict[str, Any]:
    """Every tensor of a folder by its name."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@every_layout
def test_a_checkpoint_is_exported_from_its_files_alone(
    model: Path, results_of: Any, layout: tuple[int, str], tmp_path: Path
) -> None:
    """Whatever backend and layout wrote it: bit by bit the weights that were saved, on one process without either."""
    results, out = results_of(*layout)
    config = cases.make_config(model / job_of(layout).model)
    assert export_files(config, out / "checkpoint", tmp_path / "export", dtype=torch.float32, max_bytes=30_000)
    assert (tmp_path / "export" / "model.safetensors.index.json").exists()
    state, total = tensors_in(tmp_path / "export"), hashlib.blake2b()
    for name in results["plain"]["names"]:
        total.update(state[name].data)
    assert total.hexdigest() == results["resume"]["saved"]


@pytest.mark.parametrize(("layout", "how"), [(LAYOUTS[0], "raises"), *((layout, "nan") for layout in LAYOUTS)])
def test_poison_in_one_share_is_found_by_all(results_of: Any, single: Any, layout: tuple[int, str], how: str) -> None:
    for results in (results_of(*layout)[0], single(layout)[0]):
        found = results["poison"][how]
        assert sorted(map(int, found["found"])) == [1, 4] and found["left"] == [0, 2, 3, 5] and not found["broken"]
        if how == "raises":
            assert all("loss: ValueError: seen on rank" in why for why in found["found"].values())
    compare(results_of(*layout)[0]["poison"][how], single(layout)[0]["poison"][how])


@every_layout
def test_orders_and_sums_reach_every_rank(results_of: Any, layout: tuple[int, str]) -> None:
    results = results_of(*layout)[0]
    count, shares = layout[0], len(set(results["scatter"]))
    assert results["gather"] == [f"rank {rank}" * (rank + 1) for rank in range(count)]
    assert results["share"] == "order"
    assert set(results["scatter"]) == {f"part {share}" * (share + 1) for share in range(shares)}
    assert results["total"] == {"x": shares * (shares + 1) / 2, "y_max": count - 1.0}


# ---------------------------------------------------------------- cases of two ranks alone


@pytest.mark.parametrize("name", ["small_rows", "padded", "checkpointing", "offload", "dense_mask"])
def test_rows_and_memory_settings_do_not_change_the_result(two: Any, name: str) -> None:
    compare(two[0][name], two[0]["plain"])


def test_a_checkpoint_of_muon_continues_bitwise(two: Any) -> None:
    resume = two[0]["resume_muon"]
    assert resume["saved"] == resume["loaded"] and resume["third"] == resume["again"]
    assert resume["digest"] == resume["digest_again"] != two[0]["resume"]["digest"]


@pytest.mark.parametrize("layout", [(2, "backend_contract"), (4, "hsdp")], ids=["two", "hsdp"])
def test_two_ranks_that_hold_shards_orthogonalize_every_second_matrix_of_muon(
    results_of: Any, single: Any, layout: tuple[int, str]
) -> None:
    (alone,) = single(layout)[0]["orthogonalized"]
    assert len(alone) == 14
    assert results_of(*layout)[0]["orthogonalized"] == [alone[::2], alone[1::2]] * (layout[0] // 2)


@pytest.mark.parametrize("name", ["sequence_mean", "bypass", "minibatches", "muon"])
def test_settings_that_should_change_the_result_do(one: Any, name: str) -> None:
    assert one[0][name]["digest"] != one[0]["plain"]["digest"]


def test_exported_names_dtypes_and_shapes_follow_the_plan(two: Any) -> None:
    result = two[0]["plain"]
    assert [name for name, _, _ in result["specs"]] == result["names"]
    for name, dtype, shape in result["specs"]:
        assert dtype == "F32" and len(result["weights"][name]) == int(np.prod(shape)), name
    assert "lm_head.weight" not in result["names"] and "model.embed_tokens.weight" in result["names"]
