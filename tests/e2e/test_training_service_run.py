"""The unmodified client `tinker` trains against a training service: alone, with another client, and through kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_run import tiny_model  # noqa: F401
from proxy import free_port
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
START_S = 90.0
STEPS = 6
#: Each client's rank, seed and texts; the second has targets behind its prompt alone.
CLIENTS = ((4, 1, [[3, 4, 5, 6, 7, 8], [5, 6, 7]]), (8, 2, [[9, 8, 7, 6], [4, 4, 5, 5, 6, 6]]))


class Service:
    def __init__(self, folder: Path, model: Path) -> None:
        self.run = folder / "run"
        self.port = free_port()
        self.file = folder / "service.toml"
        self.log = folder / "out.txt"
        self.file.write_text(
            f'[run]\ndir = "{self.run}"\n[model]\npath = "{model}"\ndtype = "float32"\n[service]\nport = {self.port}\n'
        )
        self.model = str(model)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "asyncrl", "serve", str(self.file)]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out, env=environment)
        self.wait(lambda: f"at http://127.0.0.1:{self.port}" in self.text())

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def trainers(self) -> list[int]:
        """Process ids of the trainers that became ready, the newest last."""
        return [int(pid) for pid in re.findall(r"trainer: ready \(pid (\d+)\)", self.text())]

    def wait(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not is_true():
            assert self.process is not None and self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def kill_trainer(self) -> None:
        os.kill(self.trainers()[-1], signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL the front; the kernel kills the trainer with it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def client(self) -> Any:
        import tinker

        return tinker.ServiceClient(
            base_url=f"http://127.0.0.1:{self.port}", api_key=(self.run / "service/api.key").read_text().strip()
        )


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[Service]:
    folder.mkdir()
    service = Service(folder, model)
    service.start()
    try:
        yield service
    finally:
        assert service.process is not None
        service.process.terminate()
        assert service.process.wait(30) == 0, service.text()


def train(service: Service, number: int, after_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
    """What a client gets: log-probs and losses of every step, samples, and the files of its weights."""
    from tinker import types

    rank, seed, texts = CLIENTS[number]
    client = service.client()
    training = client.create_lora_training_client(service.model, rank=rank, seed=seed).result(timeout=200)
    data = [datum(types, text, first=1 if number else 0) for text in texts]
    got: dict[str, Any] = {"logprobs": [], "losses": []}
    for step in range(STEPS):
        # Sent ahead, as the client's manual says: a step behind its passes.
        work = [training.forward_backward([one], "cross_entropy") for one in data]
        update = training.optim_step(types.AdamParams(learning_rate=1e-2))
        after_step(step)
        outputs = [one.result(timeout=200) for one in work]
        update.result(timeout=200)
        got["logprobs"] += [one.loss_fn_outputs[0]["logprobs"].to_numpy() for one in outputs]
        got["losses"].append(sum(one.metrics["loss:sum"] for one in outputs))
    state = training.save_state("end").result(timeout=200)
    sampler = training.save_weights_and_get_sampling_client().result(timeout=200)
    params = types.SamplingParams(max_tokens=8, seed=5, stop=[])
    prompt = types.ModelInput.from_ints(texts[0][:3])
    said = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result(timeout=200)
    got["samples"] = [(one.tokens, one.logprobs) for one in said.sequences]
    got["prompt"] = said.prompt_logprobs
    folder = service.run / "service/weights" / training.model_id / "weights/end"
    got["weights"] = load_file(folder / "adapter_model.safetensors") | load_file(folder / "optimizer.safetensors")
    got["path"] = state.path
    client.close("success").result(timeout=60)
    return got


def datum(types: Any, tokens: list[int], *, first: int) -> Any:
    count = len(tokens) - 1
    weights = [0.0] * first + [1.0] * (count - first)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[count]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[count]),
        },
    )


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit by bit."""
    assert found["losses"] == expected["losses"]
    assert len(found["logprobs"]) == len(expected["logprobs"]) == STEPS * 2
    assert all(map(np.array_equal, found["logprobs"], expected["logprobs"]))
    assert found["weights"].keys() == expected["weights"].keys()
    assert all(np.array_equal(found["weights"][name], one) for name, one in expected["weights"].items())
    assert found["samples"] == expected["samples"] and found["prompt"] == expected["prompt"]


@pytest.mark.long
def test_two_clients_get_what_each_gets_alone_through_kills(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        alone = [stack.enter_context(serving(tmp_path / f"alone{number}", tiny_model)) for number in range(2)]
        expected = list(pool.map(train, alone, range(2)))
    assert all(one["losses"][-1] < 0.8 * one["losses"][0] for one in expected)
    with serving(tmp_path / "shared", tiny_model) as service, ThreadPoolExecutor(2) as pool:

        def disturb(step: int) -> None:
            if step == 2:
                service.kill_trainer()
            elif step == 4:
                service.kill()
                service.start()

        others = pool.submit(train, service, 1)
        found = train(service, 0, disturb)
        assert len(service.trainers()) == 3
        for one, wanted in zip((found, others.result(timeout=250)), expected, strict=True):
            assert_equal(one, wanted)


@pytest.mark.long
def test_other_calls_of_the_client(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Custom losses, saved weights, samples of the base, and refusals."""
    tinker = pytest.importorskip("tinker")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    types = tinker.types
    with serving(tmp_path / "one", tiny_model) as service:
        client = service.client()
        assert [
            one.model_name
            for one in tinker.RestClient(
                base_url=f"http://127.0.0.1:{service.port}",
                api_key=(service.run / "service/api.key").read_text().strip(),
            )
            .get_server_capabilities()
            .result()
            .supported_models
        ] == [service.model]
        first = client.create_lora_training_client(service.model, rank=4, seed=1).result(timeout=200)
        data = [datum(types, text, first=0) for text in CLIENTS[0][2]]
        assert first.get_info().lora_rank == 4 and len(first.get_tokenizer()) > 3

        def loss(_data: Any, logprobs: list[Any]) -> Any:
            return sum(-one.sum() for one in logprobs), {}

        plain = first.forward(data, "cross_entropy").result().metrics["loss:sum"]
        assert first.forward_backward_custom(data, loss).result().metrics["loss:sum"] == pytest.approx(plain, rel=1e-5)
        first.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        saved = first.save_state("a").result().path
        second = client.create_training_client_from_state_with_optimizer(saved).result(timeout=60)
        for one in (first, second):
            one.forward_backward(data, "cross_entropy").result()
            one.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        after = [one.forward(data, "cross_entropy").result().metrics["loss:sum"] for one in (first, second)]
        assert after[0] == after[1] < plain
        rl = types.Datum(
            model_input=data[0].model_input,
            loss_fn_inputs={
                "target_tokens": data[0].loss_fn_inputs["target_tokens"],
                "logprobs": first.forward(data[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"],
                "advantages": types.TensorData(data=[1.0] * 5, dtype="float32", shape=[5]),
            },
        )
        for name in ("importance_sampling", "ppo"):  # a ratio of 1
            assert first.forward_backward([rl], name).result().metrics["loss:sum"] == -5.0
        base = client.create_sampling_client(base_model=service.model).result()
        greedy = types.SamplingParams(max_tokens=4, temperature=0, stop=[])
        prompt = types.ModelInput.from_ints([3, 4, 5])
        said = [base.sample(prompt, 1, greedy).result().sequences[0] for _ in range(2)]
        assert said[0].tokens == said[1].tokens and said[0].stop_reason == "length"
        whole = base.compute_logprobs(types.ModelInput.from_ints([3, 4, 5, *said[0].tokens])).result()
        assert whole[0] is None and whole[3:] == pytest.approx(said[0].logprobs, abs=1e-4)
        with pytest.raises(tinker.RequestFailedError, match=r"gspo.* is not served"):
            first.forward_backward(data, "gspo").result()
        with pytest.raises(tinker.APIStatusError, match="is not served here"):
            client.create_lora_training_client("another/model", rank=4).result()
        client.close("success").result(timeout=60)
