"""Who gets which accelerator: a table of cases, and the environment of planned processes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from quick_checks import no_parts_are_tried  # noqa: F401

from asyncrl.config import Config, parse
from asyncrl.errors import ConfigErrors
from asyncrl.preflight.check import check
from asyncrl.process_plan import device_assignment as devices
from asyncrl.process_plan.device_assignment import (
    Devices,
    Placed,
    assign_devices,
    device_environment,
    find_devices,
    format_assignment,
    problems,
)
from asyncrl.process_plan.plan import TARGETS, plan

TEXT = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[reward]]\nfunction = "a:b"\n'


def config(**settings: Any) -> Config:
    return parse(TEXT, overrides=[f"{key.replace('__', '.')}={value}" for key, value in settings.items()])


def cuda(count: int) -> Devices:
    return Devices("cuda", tuple(map(str, range(count))))


ALL = TARGETS["all"]
OF_TWO = {"producers__engine": "vllm", "producers__engine_args.tensor_parallel_size": 2}
TURNS = {"cluster__devices": "turns", "weightsync__in_place": "true", "learner__ranks": 2}
OF_FOUR = OF_TWO | {"producers__engine_args.pipeline_parallel_size": 2}
JUDGED = (
    'judge=[{name="a", kind="classifier", model="c", count=2}, {name="b", kind="url", model="u", url="http://h/v1", '
    'prompt="{response}"}]'
)
#: Settings, roles, devices of the host: those of the learner, and of each producer, evaluator and judge.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], int, Placed]] = {
    "one each": ({"producers__count": 2, "learner__ranks": 2}, ALL, 4, Placed((0, 1), ((2,), (3,)))),
    "too few": ({"producers__count": 3, "learner__ranks": 2}, ALL, 4, Placed((0, 1), ((2,), (3,), (2,)))),
    "one for all": ({"producers__count": 2}, ALL, 1, Placed((0,), ((0,), (0,)))),
    "turns": (TURNS | {"producers__count": 2}, ALL, 4, Placed((0, 1), ((0,), (1,)))),
    "turns of an engine of two": (TURNS | OF_TWO, ALL, 2, Placed((0, 1), ((0, 1),))),
    "some left": ({"producers__count": 1}, ALL, 8, Placed((0,), ((1,),))),
    "producers alone": ({"producers__count": 3}, TARGETS["producers"], 2, Placed((), ((0,), (1,), (0,)))),
    "a learner alone": ({"learner__ranks": 2}, TARGETS["learner"], 2, Placed((0, 1))),
    "learner on the CPU": ({"learner__device": "cpu", "producers__count": 2}, ALL, 2, Placed((), ((0,), (1,)))),
    "producers on the CPU": ({"producers__device": "cpu"}, ALL, 2, Placed((0,))),
    "a device by name": ({"producers__device": "'cuda:1'"}, ALL, 2, Placed((0,), ((1,),))),
    "a learner by name": ({"learner__device": "'cuda:1'", "producers__count": 2}, ALL, 3, Placed((1,), ((0,), (2,)))),
    "a name that is not there": ({"producers__device": "'cuda:7'"}, ALL, 2, Placed((0,))),
    "the other kind": ({"producers__device": "npu"}, ALL, 2, Placed((0,))),
    "engines of two": (
        OF_TWO | {"producers__count": 2, "learner__ranks": 4}, ALL, 8, Placed((0, 1, 2, 3), ((4, 5), (6, 7))),
    ),
    "an engine of four": (OF_FOUR, TARGETS["producers"], 4, Placed((), ((0, 1, 2, 3),))),
    "engines of two on five": (OF_TWO | {"producers__count": 3}, ALL, 6, Placed((0,), ((1, 2), (3, 4), (1, 2)))),
    "servers take none": (
        {"producers__engine": "vllm_http", "producers__url": "['http://h:1']", "learner__ranks": 2},
        ALL,
        2,
        Placed((0, 1)),
    ),
    "evaluators after producers": (
        {"producers__count": 2, "evaluation__path": "'h'", "evaluation__every": 1, "evaluation__lane": "evaluators"},
        ALL,
        4,
        Placed((0,), ((1,), (2,)), ((3,),)),
    ),
    "none": ({}, ALL, 0, Placed()),
    "shared": ({"cluster__devices": "share"}, ALL, 4, Placed()),
    "shared, a named one": (
        {"cluster__devices": "share", "producers__device": "cuda:2"}, ALL, 4, Placed((), ((2,),)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_gets_which(case: str) -> None:
    settings, roles, count, expected = CASES[case]
    assert assign_devices(config(**settings), roles, cuda(count)) == expected


def test_nobody_shares_while_there_is_a_free_one() -> None:
    for count in range(1, 9):
        for ranks in range(1, 5):
            for producers in range(1, 6):
                one = assign_devices(config(learner__ranks=ranks, producers__count=producers), ALL, cuda(count))
                if ranks + producers <= count:
                    assert not one.shared
                elif ranks <= count:
                    assert len(set(one.learner)) == ranks, "ranks never share"
                used = {*one.learner, *(number for numbers in one.producers for number in numbers)}
                assert len(used) == min(count, ranks + producers), "no device is idle while others are shared"


def test_what_the_scheduler_hides_stays_hidden(tmp_path: Path) -> None:
    assert find_devices(environment={}, folder=tmp_path) == Devices()
    assert find_devices(environment={}, folder=tmp_path / "none") == Devices()
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    found = find_devices(environment={}, folder=tmp_path)
    assert found == Devices("cuda", ("0", "1", "2", "3"), "CUDA_VISIBLE_DEVICES")
    hidden = find_devices(environment={"CUDA_VISIBLE_DEVICES": "6, GPU-aa,7"}, folder=tmp_path)
    assert hidden == Devices("cuda", ("6", "GPU-aa", "7"), "CUDA_VISIBLE_DEVICES")
    one = assign_devices(config(), ALL, hidden)
    assert (
        device_environment(0, one.producers, hidden) == {"CUDA_VISIBLE_DEVICES": "GPU-aa"}
        and device_environment(1, one.producers, hidden) == {}
    )
    assert format_assignment(one, hidden) == "learner: cuda 6; producers: cuda GPU-aa"
    for given, ids in (("", ()), ("-1", ()), ("2,-1,0", ("2",))):
        assert find_devices(environment={"CUDA_VISIBLE_DEVICES": given}, folder=tmp_path).ids == ids, given
    for name in list(tmp_path.iterdir()):
        name.unlink()
    (tmp_path / "davinci0").touch()
    (tmp_path / "davinci_manager").touch()
    npu = find_devices(environment={}, folder=tmp_path)
    assert npu == Devices("npu", ("0",), "ASCEND_RT_VISIBLE_DEVICES")
    assert device_environment(0, ((0,),), npu) == {"ASCEND_RT_VISIBLE_DEVICES": "0"}


def test_devices_of_amd_are_counted_by_the_kernel(tmp_path: Path) -> None:
    """A host has a node for each CPU too: those without SIMD units."""
    nodes = tmp_path / "nodes"
    for number, units in enumerate((0, 304, 304)):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\nmem_banks_count 1\n")
    find = partial(find_devices, folder=tmp_path, rocm=nodes)
    assert find(environment={}) == Devices(), "there is no driver"
    (tmp_path / "kfd").touch()
    assert find(environment={}) == Devices("cuda", ("0", "1"), "HIP_VISIBLE_DEVICES")
    assert find(environment={"CUDA_VISIBLE_DEVICES": "1"}) == Devices("cuda", ("1",), "CUDA_VISIBLE_DEVICES")
    amd = find(environment={"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert amd == Devices("cuda", ("1",), "HIP_VISIBLE_DEVICES")
    assert device_environment(0, ((0,),), amd) == {"HIP_VISIBLE_DEVICES": "1"}


def test_judges_with_a_model_come_after_producers() -> None:
    text = TEXT.replace('function = "a:b"', 'name = "x"\njudge = "a"') + '[[reward]]\nname = "y"\njudge = "b"\n'
    made = parse(text, overrides=[JUDGED])
    placed = assign_devices(made, ALL, cuda(4))
    assert placed == Placed((0,), ((1,),), (), ((2,), (3,), ())) and not placed.shared
    assert format_assignment(placed, cuda(4)) == "learner: cuda 0; producers: cuda 1; judges: cuda 2, 3, none"
    plans = {
        one.name: one.env.get("CUDA_VISIBLE_DEVICES") for one in plan(made, ALL, config_path=Path("c"), devices=cuda(4))
    }
    assert (plans["reward-a-0"], plans["reward-a-1"], plans["reward-b-0"]) == ("2", "3", None)
    assert assign_devices(made, ALL, cuda(4), judges=("b",)).judges == ()
    assert assign_devices(made, ALL, cuda(3)).shared


def test_an_engine_of_several_devices_shares_none() -> None:
    def messages(count: int, **settings: Any) -> list[str]:
        return [message for _, message, _ in problems(config(**OF_TWO, **settings), ALL, cuda(count))]

    assert messages(3) == [] and messages(8, producers__count=3) == []
    assert "2 engines of 2 devices each" in messages(4, producers__count=2)[0]
    assert "1 engines of 2 devices each" in messages(1)[0]
    assert "would all take the first 2" in messages(8, producers__count=2, cluster__devices="share")[0]
    assert messages(8, cluster__devices="share") == []
    text = TEXT.replace('function = "a:b"', 'name = "x"\njudge = "a"') + '[[reward]]\nname = "y"\njudge = "b"\n'
    judged = parse(text, overrides=[JUDGED, *(f"{key.replace('__', '.')}={value}" for key, value in OF_TWO.items())])
    assert not list(problems(judged, ALL, cuda(5)))
    [(_, message, _)] = problems(judged, ALL, cuda(4))
    assert "2 workers of judges" in message, "the second one would share a device of the engine"


def test_a_named_device_reaches_vllm_and_is_not_for_several_ranks() -> None:
    """torch finds `cuda:1` itself among all devices; vLLM is shown that one alone."""
    for engine, shown in (("hf", None), ("vllm", "5")):
        made = config(producers__device="'cuda:1'", producers__engine=engine)
        plans = {one.name: one for one in plan(made, ALL, config_path=Path("c"), devices=Devices("cuda", ("4", "5")))}
        assert plans["producer-0"].env.get("CUDA_VISIBLE_DEVICES") == shown
    with pytest.raises(ConfigErrors, match=r"learner\.device = 'cuda:1' with learner\.ranks = 2"):
        config(learner__device="'cuda:1'", learner__ranks=2)


def test_processes_are_planned_with_their_device() -> None:
    made = config(producers__count=2, learner__ranks=2)
    plans = {one.name: one for one in plan(made, ALL, config_path=Path("c"), devices=cuda(4))}
    assert [plans[f"producer-{n}"].env["CUDA_VISIBLE_DEVICES"] for n in (0, 1)] == ["2", "3"]
    for name in ("learner", "buffer", "weightsync", "reward-0"):
        assert "CUDA_VISIBLE_DEVICES" not in plans[name].env, "the learner's ranks see all devices"
    plain = plan(made, ALL, config_path=Path("c"))
    assert not any("CUDA_VISIBLE_DEVICES" in one.env for one in plain)


def test_too_few_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config(cluster__devices="own", producers__count=2)
    [(code, message, path)] = problems(made, ALL, cuda(2))
    assert code == "config.conflict" and "1 ranks and 2 producers on 2" in message and path == ("cluster", "devices")
    assert list(problems(made, ALL, cuda(3))) == [] and list(problems(config(), ALL, cuda(1))) == []
    [(_, message, _)] = problems(config(learner__ranks=3), ALL, cuda(2))
    assert "learner.ranks = 3" in message
    monkeypatch.setattr(devices, "find_devices", lambda: cuda(2))
    checked = check(made)
    assert any(error.code == "config.conflict" and "cluster.devices" in error.render() for error in checked.errors)
    checked = check(config(producers__count=2))
    assert [one.value for one in checked.findings if one.name == "devices"] == ["learner: cuda 0; producers: cuda 1, 1"]
    assert any("share" in note for note in checked.notes)
