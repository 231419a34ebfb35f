"""Parts of engines behind HTTP that need no server: who is let in, what an answer says, what a sample hands on, what
is refused at the start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.config import Config, parse
from asyncrl.engine import GenDelta, GenRequest
from asyncrl.errors import AsyncRLError, ConfigError, WorkError
from producers.engines.request_gate import RequestGate
from producers.engines.served import sample_seed
from producers.engines.sglang.control_api import ServerFacts
from producers.engines.sglang.responses import read_piece
from producers.engines.sglang.sample import Sample
from producers.engines.sglang.startup import address_towards, check_request, check_server, server_url


def test_a_producer_of_a_server_needs_neither_torch_nor_transformers_to_start() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['aiohttp'] = None\n"
    code += "import producers.main, producers.engines.sglang.engine"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_the_urgent_enter_first_and_nobody_while_it_is_shut() -> None:
    async def body() -> None:
        door, entered = RequestGate(1), []

        async def visit(name: str, priority: int, stay: asyncio.Event) -> None:
            async with door.place(priority):
                entered.append(name)
                await stay.wait()

        stays = {name: asyncio.Event() for name in "abcde"}
        tasks = {}
        for name, priority in (("a", 9), ("b", 5), ("c", 0), ("d", 5), ("e", 0)):
            tasks[name] = asyncio.create_task(visit(name, priority, stays[name]))
            await asyncio.sleep(0)
        assert (entered, door.inside, door.waiting) == (["a"], 1, 4)
        tasks["e"].cancel()
        await asyncio.sleep(0)
        door.shut()
        stays["a"].set()
        await tasks["a"]
        assert (entered, door.inside, door.waiting) == (["a"], 0, 3)
        door.open()
        for name in "cbd":
            await asyncio.sleep(0.01)
            stays[name].set()
            await tasks[name]
        assert (entered, door.inside, door.waiting) == (["a", "c", "b", "d"], 0, 0)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_place_is_not_lost_by_who_is_cancelled_as_it_enters() -> None:
    async def body() -> None:
        door = RequestGate(1)

        async def visit() -> None:
            async with door.place():
                await asyncio.sleep(60)

        first, second = asyncio.create_task(visit()), asyncio.create_task(visit())
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])
        second.cancel()  # its place was given to it, and it has not run since
        await asyncio.wait([second])
        assert door.inside == 0
        async with door.place():
            assert door.inside == 1

    asyncio.run(asyncio.wait_for(body(), 60))


def event(ids: list[int], *, of: int, finish: str = "", spans: Any = None) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "completion_tokens": of,
        "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
        "finish_reason": {"type": finish} if finish else None,
        "weight_versions": spans,
    }
    return {"text": "", "output_ids": ids, "meta_info": meta}


def test_streams_may_repeat_what_came_or_not() -> None:
    for ids in ([1, 2, 3, 4, 5], [4, 5]):
        piece = read_piece(event(ids, of=5), 3, where="s")
        assert (piece.tokens, piece.logprobs, piece.finish, piece.spans) == ([4, 5], [-2.0, -2.5], "", None)
    last = read_piece(event([4], of=4, finish="stop", spans=[{"version": "a", "start": 0, "end": 4}]), 3, where="s")
    assert (last.finish, last.spans) == ("stop", [("a", 0, 4)])


def test_an_answer_that_cannot_be_right_breaks_the_engine() -> None:
    wrong: list[Any] = [
        {},
        [],
        "x",
        None,
        event([1], of=3),
        event([1, 2, 3], of=1),
        {"output_ids": ["a"], "meta_info": {}},
        {**event([1, 2], of=2), "output_ids": [1, 3]},
        {**event([1, 2], of=2), "output_ids": [1]},
        {"error": {"message": "boom", "code": 500}},
    ]
    for bad in wrong:
        with pytest.raises(WorkError) as caught:
            read_piece(bad, 0, where="s")
        assert caught.value.code == "engine.broken", bad
    with pytest.raises(WorkError, match="too long") as caught:
        read_piece({"error": {"message": "too long", "code": 400}}, 0, where="s")
    assert caught.value.code == "sample.invalid"


def request(**more: Any) -> GenRequest:
    given: dict[str, Any] = {"prompt_ids": np.array([5, 6], dtype=np.int32), "max_new_tokens": 10} | more
    return GenRequest(
        "g:1", given.pop("prompt_ids"), given.pop("indices", (0,)), 7, given.pop("max_new_tokens"), **given
    )


def test_a_sample_hands_on_what_is_certain_and_asks_on_behind_it() -> None:
    outbox: asyncio.Queue[GenDelta | AsyncRLError | None] = asyncio.Queue()
    sample = Sample(request(delta_tokens=2, stop_ids=(3,)), 4, outbox)
    first = sample.ask(salt="x")
    assert (first["rid"], first["input_ids"], first["extra_key"]) == ("g:1/4/1;", [5, 6], "x")
    assert first["sampling_params"]["stop_token_ids"] == [3] and not first["sampling_params"]["ignore_eos"]
    sample.take([7, 2], [-1.0, -2.0])
    assert not sample.is_due()  # nobody has said of which weights they are
    sample.ascertain([1, 1])
    assert sample.is_due()
    sample.hand_on("")
    assert not sample.is_stopped() and sample.remaining == 8
    second = sample.ask(salt="y")
    assert (second["rid"], second["input_ids"]) == ("g:1/4/2;", [5, 6, 7, 2])
    assert second["sampling_params"]["max_new_tokens"] == 8
    sample.take([3], [-3.0])
    with pytest.raises(WorkError, match="other weights"):
        sample.ascertain([1, 2, 2])
    sample.ascertain([1, 1, 2])
    assert sample.is_stopped()
    sample.hand_on("stop")
    deltas = [outbox.get_nowait() for _ in range(outbox.qsize())]
    assert all(isinstance(delta, GenDelta) for delta in deltas)
    found = [(d.start, d.token_ids.tolist(), d.runs, d.finish) for d in deltas if isinstance(d, GenDelta)]
    assert found == [(0, [7, 2], ((1, 2),), ""), (2, [3], ((2, 1),), "stop")]


def test_names_of_requests_do_not_begin_each_other_and_seeds_differ() -> None:
    outbox: asyncio.Queue[GenDelta | AsyncRLError | None] = asyncio.Queue()
    names = [Sample(request(), index, outbox).name for index in range(120)]
    assert not [one for one in names for other in names if one != other and other.startswith(one)]
    seeds = {sample_seed(seed, index) for seed in range(-3, 20) for index in range(50)}
    assert len(seeds) == 23 * 50 and all(0 <= seed < 2**63 for seed in seeds)
    assert request().stop_ids == () and Sample(request(), 0, outbox).ask(salt="")["sampling_params"]["ignore_eos"]


def config_of(folder: Path, **producers: str) -> Config:
    (folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 40}')
    lines = "\n".join(f"{key} = {value}" for key, value in producers.items())
    return parse(f"""
[model]
path = "{folder}"
dtype = "float32"
[data]
path = "unused.jsonl"
max_prompt_tokens = 8
[sampling]
max_new_tokens = 16
[producers]
engine = "sglang"
{lines}
[[reward]]
function = "unused:unused"
""")


FACTS = ServerFacts("0.5.23", "cuda", "float32", 1000, 506, disable_overlap_schedule=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dp_size": 2}, "dp_size = 2"),
        ({"pp_size": 2}, "pp_size = 2"),
        ({"dtype": "bfloat16"}, "--dtype float32"),
        ({"max_req_input_len": 20}, "--context-length"),
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_what_to_change(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    config = config_of(tmp_path, url='["http://127.0.0.1:1"]')
    check_server(FACTS, config, architecture="Qwen3ForCausalLM", where="u")
    with pytest.raises(ConfigError) as caught:
        check_server(msgspec.structs.replace(FACTS, **change), config, architecture="", where="u")
    assert caught.value.code == "config.conflict" and words in caught.value.render()


def test_recompute_may_overlap_and_another_model_may_not(tmp_path: Path) -> None:
    config = config_of(tmp_path, url='["http://127.0.0.1:1"]', kv_at_swap='"recompute"')
    overlapping = msgspec.structs.replace(FACTS, disable_overlap_schedule=False, dtype="auto")
    check_server(overlapping, config, architecture="Qwen3ForCausalLM", where="u")
    with pytest.raises(AsyncRLError, match="LlamaForCausalLM") as caught:
        check_server(FACTS, config, architecture="LlamaForCausalLM", where="u")
    assert caught.value.code == "handshake.mismatch"


def test_addresses(tmp_path: Path) -> None:
    assert server_url(config_of(tmp_path, url='["http://h:1"]')) == "http://h:1"
    with pytest.raises(ConfigError, match="address of the server is missing"):
        server_url(config_of(tmp_path))
    assert address_towards("http://127.0.0.1:30000") == "127.0.0.1"
    with pytest.raises(ConfigError):
        address_towards("http://no.such.host.invalid:1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 1, "temperature": 0.7}, "temperature"),
        ({"prompt_ids": np.array([40], dtype=np.int32)}, "vocabulary"),
        ({"max_new_tokens": 17}, "planned"),
        ({"indices": ()}, "indices"),
    ],
)
def test_requests_that_the_server_would_do_wrong_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    config = config_of(tmp_path)
    check_request(request(top_k=1), config, vocab=40, taken=False, version=0)
    with pytest.raises(WorkError, match=words) as caught:
        check_request(request(**change), config, vocab=40, taken=False, version=0)
    assert caught.value.code == "sample.invalid"
    for wrong in ({"taken": True, "version": 0}, {"taken": False, "version": -1}):
        with pytest.raises(WorkError):
            check_request(request(), config, vocab=40, **wrong)  # type: ignore[arg-type]
