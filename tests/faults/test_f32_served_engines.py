"""Engines that are servers: one that dies, hangs, answers 500 or garbage, or is started again, at any moment.

The producer ends with `engine.broken`, is started again, joins anew, and its prompts are leased again: nothing is lost.
The server is the stand-in of SGLang, a process of its own with a real model; the data plane is the real one.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plant import TOKENS, Plant
from transformers import AutoModelForCausalLM, Qwen3Config

ENGINES = Path(__file__).parents[1] / "engines"
sys.path.insert(0, str(ENGINES))
from served import Served  # noqa: E402, RUF100

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]
SHAPE = Qwen3Config(
    vocab_size=len(TOKENS),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    eos_token_id=2,
    architectures=["Qwen3ForCausalLM"],
)


class Site:
    """A run whose only producer has its engine in a server."""

    def __init__(self, folder: Path, served: Served, *, kv: str) -> None:
        self.served = served
        extra = (
            'producers.engine="sglang"',
            f'producers.url=["{served.url}"]',
            f'producers.kv_at_swap="{kv}"',
            "producers.slots=8",
            "learner.steps=1000000",
            "weightsync.timeout_s=10",
            "weightsync.member_timeout_s=10",
        )
        self.plant = Plant(folder, producers=1, extra=extra)

    def order(self, path: str, what: str, skip: int = 0) -> None:
        """A fault, some calls from now."""
        body = json.dumps({"path": path, "what": what, "skip": skip}).encode()
        with urllib.request.urlopen(self.served.url + "/standin/fault", data=body, timeout=60) as answer:
            assert answer.status == 200

    def broken(self, count: int) -> Any:
        """The producer ended with 70 that often, and said why."""
        codes = self.plant.roles["producer-0"].codes
        assert all(code in (70, 0) for code in codes), self.plant.tail()
        return len(codes) >= count and "engine.broken" in self.plant.said("producer-0")

    def go_on(self, steps: int = 3) -> None:
        """Some more steps are committed."""
        until = self.plant.committed() + steps
        self.plant.wait(f"step {until}", lambda: self.plant.committed() >= until, 90)


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    torch.manual_seed(0)
    made = tmp_path / "model"
    AutoModelForCausalLM.from_config(SHAPE).save_pretrained(made)
    command = [sys.executable, str(ENGINES / "standin_sglang.py"), "--model-path", str(made), "--context", "48"]
    served = Served(command, log=tmp_path / "server.log", environment={"OMP_NUM_THREADS": "1"})
    found = Site(tmp_path / "plant", served, kv=getattr(request, "param", "keep"))
    for name in ("config.json", "model.safetensors"):
        (found.plant.run.root.parent / "made/model" / name).write_bytes((made / name).read_bytes())
    with found.plant:
        found.plant.start()
        found.plant.wait("some steps", lambda: found.plant.committed() >= 3, 120)
        yield found
    served.end()


@pytest.mark.long
def test_a_server_that_goes_wrong_is_replaced_and_nothing_is_lost(site: Site) -> None:
    """In mid-update and in mid-generation; it answers 500, garbage, or hangs; every time the next producer goes on."""
    update = "/update_weights_from_distributed"
    faults = [(update, "500", 2), ("/generate", "garbage", 3), ("/end_weight_update", "garbage", 0)]
    for count, (path, what, skip) in enumerate(faults, start=1):
        site.order(path, what, skip)
        site.plant.wait(f"the end of the producer ({what} at {path})", lambda count=count: site.broken(count), 90)
        site.order(path, "")
        site.go_on()
    site.plant.finish()
    site.plant.assert_accounted()


def test_a_server_that_dies_is_noticed_and_its_successor_is_loaded(site: Site) -> None:
    """It dies between two buckets of an update; later, with samples under way; then it is started again unnoticed."""
    for count, (path, skip) in enumerate([("/update_weights_from_distributed", 1), ("/generate", 4)], start=1):
        site.order(path, "die", skip)
        site.plant.wait("the end of the server", lambda: site.served.child.poll() is not None, 60)
        site.plant.wait("the end of the producer", lambda count=count: site.broken(count), 90)
        site.served.start()
        site.go_on()
    site.plant.finish()
    site.plant.assert_accounted()


@pytest.mark.long
@pytest.mark.parametrize("site", ["recompute"], indirect=True)
def test_a_server_that_hangs_ends_the_producer_in_time(site: Site) -> None:
    """No answer in the middle of an update: the deadline of weight sync, not for ever."""
    site.order("/update_weights_from_distributed", "hang")
    site.plant.wait("the end of the producer", lambda: site.broken(1), 90)
    site.order("/update_weights_from_distributed", "")
    site.go_on()
    site.plant.finish()
    site.plant.assert_accounted()
