"""Servers of vLLM without vLLM: what is refused at the start, which log-probs are found, deltas around a commit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.config import Config, parse
from asyncrl.engine import GenRequest
from asyncrl.errors import AsyncRLError, WorkError
from producers.engines.http import Refused
from producers.engines.served import sample_seed
from producers.engines.vllm.base import Sample
from producers.engines.vllm.http_engine import VLLMHTTPEngine, metric
from producers.engines.vllm.server_facts import inspect

SHAPE = {"model_type": "qwen3", "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2}


def config_of(folder: Path) -> Config:
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return parse(f"""
[run]
dir = "{folder / "run"}"
[model]
path = "{folder}"
dtype = "float32"
[data]
path = "unused.jsonl"
max_prompt_tokens = 10
[sampling]
max_new_tokens = 20
[producers]
engine = "vllm_http"
url = ["http://127.0.0.1:1"]
[[reward]]
function = "unused:unused"
""")


class Server:
    """Answers as a vLLM server that fits; `change` what it says."""

    url = "http://server"

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {
            "model_config": {"max_model_len": 40},
            "cache_config": {"kv_cache_size_tokens": 999},
            "scheduler_config": {"max_num_seqs": 8, "policy": "priority"},
            "parallel_config": {"data_parallel_size": 1},
            "weight_transfer_config": {"backend": "asyncrl"},
        }
        self.model: dict[str, Any] = {"shape": dict(SHAPE), "dtype": "float32", "device": "cpu"}
        self.logprobs = {1.0: -1.0, 0.5: -0.4}
        self.dev = self.extension = self.generates = self.sees = True

    async def get(self, path: str, *, timeout_s: float, params: Any = None) -> Any:
        if not self.dev:
            raise Refused(404, "Not Found", where=path)
        return {"vllm_config": self.settings}

    async def post(self, path: str, body: Any = None, *, timeout_s: float, params: Any = None) -> Any:
        if path == "/inference/v1/generate":
            if not self.generates:
                raise Refused(404, "Not Found", where=path)
            found = self.logprobs[body["sampling_params"]["temperature"]]
            return {"choices": [{"logprobs": {"content": [{"token_id": 3, "logprob": found}]}}]}
        if path == "/collective_rpc":
            return {"results": self._worker(body["method"], *body["args"])}
        return {}

    def _worker(self, method: str, *args: str) -> list[Any]:
        if not self.extension:
            raise WorkError("engine.broken", "answered 500: no such method", where=method)
        if method == "asyncrl_token":
            return [Path(args[0]).read_text() if self.sees else "", Path(args[0]).read_text()]
        return [self.model, self.model] if method == "asyncrl_model" else ["True", "True"]


def looked(server: Server, folder: Path) -> Any:
    client: Any = server
    return asyncio.run(inspect(client, config_of(folder)))


def test_a_server_that_fits(tmp_path: Path) -> None:
    found = looked(Server(), tmp_path)
    assert (found.workers, found.max_samples, found.kv_tokens, found.priority) == (2, 8, 999, True)
    assert found.logprobs == "full" and tmp_path / "run" / "scratch" in found.folders
    assert not list((tmp_path / "run" / "scratch").iterdir())


def _no_dev(server: Server) -> None:
    server.dev = False


def _no_extension(server: Server) -> None:
    server.extension = False


def _no_generate(server: Server) -> None:
    server.generates = False


def _nccl(server: Server) -> None:
    server.settings["weight_transfer_config"]["backend"] = "nccl"


def _no_backend(server: Server) -> None:
    server.settings["weight_transfer_config"] = None


def _short(server: Server) -> None:
    server.settings["model_config"]["max_model_len"] = 29


def _parts(server: Server) -> None:
    server.settings["parallel_config"]["data_parallel_size"] = 2


def _pieces(server: Server) -> None:
    server.settings["scheduler_config"]["enable_chunked_prefill"] = True


def _other(server: Server) -> None:
    server.model["shape"]["vocab_size"] = 51


def _dtype(server: Server) -> None:
    server.model["dtype"] = "bfloat16"


def _stranger(server: Server) -> None:
    del server.settings["scheduler_config"]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (_no_dev, "config.conflict", "developer routes"),
        (_no_extension, "config.conflict", "extension"),
        (_no_generate, "config.conflict", "/inference/v1/generate"),
        (_nccl, "config.conflict", "by nccl"),
        (_no_backend, "config.conflict", "by nothing"),
        (_short, "config.conflict", "max_model_len = 29"),
        (_pieces, "config.conflict", "prompts in pieces"),
        (_parts, "config.conflict", "data parallelism 2"),
        (_other, "handshake.mismatch", "vocab_size 51 there, 50"),
        (_dtype, "handshake.mismatch", "dtype bfloat16 there, float32"),
        (_stranger, "engine.broken", "scheduler"),
    ],
)
def test_servers_that_do_not_fit(change: Callable[[Server], None], code: str, words: str, tmp_path: Path) -> None:
    server = Server()
    change(server)
    with pytest.raises(AsyncRLError) as caught:
        looked(server, tmp_path)
    assert caught.value.code == code and words in caught.value.message


def test_a_server_with_an_accelerator_may_compute_prompts_in_pieces(tmp_path: Path) -> None:
    server = Server()
    _pieces(server)
    server.model["device"] = "cuda"
    assert looked(server, tmp_path).device == "cuda"


@pytest.mark.parametrize(
    ("plain", "sharp", "mode"), [(0.0, 0.0, "processed"), (-1.0, -1.0, "raw"), (-1.0, -0.2, "full")]
)
def test_which_logprobs_a_server_records_is_seen_by_two_requests(
    plain: float, sharp: float, mode: str, tmp_path: Path
) -> None:
    server = Server()
    server.logprobs = {1.0: plain, 0.5: sharp}
    assert looked(server, tmp_path).logprobs == mode


def test_one_worker_that_does_not_see_the_files_is_enough(tmp_path: Path) -> None:
    server = Server()
    server.sees = False
    assert looked(server, tmp_path).folders == ()


# ---------------------------------------------------------------- samples


def event(tokens: list[int], *, finish: str | None = None, spans: list[tuple[str, int, int]] | None = None) -> Any:
    content = [{"token_id": token, "logprob": -0.5 * token} for token in tokens]
    versions = [{"version": label, "start": start, "end": end} for label, start, end in spans or []]
    return {
        "choices": [
            {
                "index": 0,
                "token_ids": tokens,
                "logprobs": {"content": content},
                "finish_reason": finish,
                "weight_versions": versions or None,
            }
        ]
    }


def test_deltas_name_versions_only_where_they_are_known(tmp_path: Path) -> None:
    """Before a commit: the label of the submission. After one nothing until vLLM's spans come, which may contradict."""
    engine = VLLMHTTPEngine(config_of(tmp_path))
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    wanted = GenRequest("r", np.asarray([1], np.int32), (0,), 5, 20, delta_tokens=2)
    engine._labels.current = first = engine._labels.new(3)
    sample = Sample(wanted, 0, outbox, 0)
    sample.label = first
    engine._take_output(sample, event([4]))
    assert outbox.empty()
    engine._take_output(sample, event([5]))
    assert outbox.get_nowait().runs == ((3, 2),)
    engine._labels.current = second = engine._labels.new(4)
    engine._take_output(sample, event([6, 7, 8]))
    assert outbox.empty()
    engine._take_output(sample, event([9], finish="length", spans=[(first, 0, 3), (second, 3, 6)]))
    last = outbox.get_nowait()
    assert last.start == 2 and last.runs == ((3, 1), (4, 3)) and last.finish == "length"
    assert last.logprobs.tolist() == [-3.0, -3.5, -4.0, -4.5]


@pytest.mark.parametrize("spans", [[("7.9", 0, 2)], [], None, "moved"])
def test_spans_that_do_not_cover_the_tokens_break_the_engine(tmp_path: Path, spans: Any) -> None:
    engine = VLLMHTTPEngine(config_of(tmp_path))
    engine._labels.current = label = engine._labels.new(3)
    other = engine._labels.new(4)
    sample = Sample(GenRequest("r", np.asarray([1], np.int32), (0,), 5, 20, delta_tokens=1), 0, asyncio.Queue(), 0)
    sample.label = label
    engine._take_output(sample, event([4]))
    said = [(other, 0, 2)] if spans == "moved" else spans
    with pytest.raises(WorkError) as caught:
        engine._take_output(sample, event([5], finish="stop", spans=said))
    assert caught.value.code == "engine.broken"


def test_tokens_without_a_logprob_break_the_engine(tmp_path: Path) -> None:
    engine = VLLMHTTPEngine(config_of(tmp_path))
    sample = Sample(GenRequest("r", np.asarray([1], np.int32), (0,), 5, 20), 0, asyncio.Queue(), 0)
    wrong = event([4, 5])
    wrong["choices"][0]["logprobs"]["content"].pop()
    with pytest.raises(WorkError, match="1 log-probs for 2 tokens"):
        engine._take_output(sample, wrong)


@pytest.mark.parametrize("answer", [["a list"], "a text", {"choices": ["a text"]}, {"choices": [{"logprobs": [1]}]}])
def test_an_answer_of_another_shape_breaks_the_engine(tmp_path: Path, answer: Any) -> None:
    """The sample would wait for the rest of it otherwise."""
    engine = VLLMHTTPEngine(config_of(tmp_path))

    class Client:
        async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            yield answer

    engine._client = Client()  # type: ignore[assignment]
    engine._server = type("Server", (), {"priority": False})()
    sample = Sample(GenRequest("r", np.asarray([1], np.int32), (0,), 5, 20), 0, asyncio.Queue(), 0)
    asyncio.run(asyncio.wait_for(engine._decode(sample), 30))
    assert engine._failure is not None and "not a vLLM answer" in engine._failure.message


def test_seeds_differ_by_index_and_fit_in_63_bits() -> None:
    seeds = {sample_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 1 << 63 for seed in seeds)


def test_metrics_in_text_form() -> None:
    text = '# HELP x\nvllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:kv_cache_usage_perc{engine="1"} 0.5\nother 3\n'
    assert metric(text, "vllm:kv_cache_usage_perc") == 0.75 and metric(text, "nothing") == 0.0
