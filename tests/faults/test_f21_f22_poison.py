"""F21: a sample that may not be trained on, one test per field. F22: a producer that makes nothing else.

At the buffer its group is DEAD with the reason and the message is kept; what passes gives a finite loss.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from plant import Plant

from asyncrl import wire
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.algorithm_catalogue import LOSSES
from asyncrl.net.async_requester import AsyncRequester
from buffers.client.learner import LearnerClient
from buffers.client.producer import ProducerClient
from buffers.payloads.dead_letters import read_letter
from learners.algorithms.corrections import tis
from learners.algorithms.registry import loss_for
from learners.algorithms.types import LossInputs

pytestmark = pytest.mark.timeout(300)

T = 4
TOKENS = np.array([3, 4, 5, 2, 6, 7, 8, 2], np.int32)
LOGPROBS = -np.linspace(0.1, 1.0, 2 * T, dtype=np.float32)


def message(lease: wire.Lease, **changes: Any) -> tuple[wire.Samples, bytes]:
    """A good group of two samples with some arrays or fields replaced."""
    arrays = {"prompt": np.array([3, 4], np.int32), "response": TOKENS, "logprobs": LOGPROBS}
    arrays |= {name: changes.pop(name) for name in list(changes) if name in arrays or name == "mask"}
    fields, payload = wire.pack_arrays({name: array for name, array in arrays.items() if array is not None})
    heads = changes.pop("samples", tuple(wire.SampleHead(index, T, "stop", ((0, T),)) for index in range(2)))
    head = wire.Samples("p", lease.group, lease.token, heads, {0: "start"}, fields, "{}", 2, rewards={0: 0.0, 1: 1.0})
    return msgspec.structs.replace(head, **changes), payload


def with_value(array: Any, place: int, value: float) -> Any:
    changed = array.copy()
    changed[place] = value
    return changed


def heads(first: wire.SampleHead) -> tuple[wire.SampleHead, ...]:
    return first, wire.SampleHead(1, T, "stop", ((0, T),))


#: field -> (what is wrong with the message, first word of the reason)
POISON: dict[str, tuple[dict[str, Any], str]] = {
    "nan log-prob": ({"logprobs": with_value(LOGPROBS, 3, np.nan)}, "logprobs"),
    "infinite log-prob": ({"logprobs": with_value(LOGPROBS, 0, -np.inf)}, "logprobs"),
    "log-prob above 0": ({"logprobs": with_value(LOGPROBS, 7, 0.5)}, "logprobs"),
    "too few log-probs": ({"logprobs": LOGPROBS[:-1]}, "length"),
    "too many tokens": ({"response": np.append(TOKENS, 3).astype(np.int32)}, "length"),
    "mask of another length": ({"mask": np.ones(3, np.uint8)}, "length"),
    "runs that do not cover": ({"samples": heads(wire.SampleHead(0, T, "stop", ((0, T - 1),)))}, "length"),
    "no runs": ({"samples": heads(wire.SampleHead(0, T, "stop", ()))}, "length"),
    "empty response": ({"samples": heads(wire.SampleHead(0, 0, "stop", ()))}, "empty"),
    "negative version": ({"samples": heads(wire.SampleHead(0, T, "stop", ((-1, T),)))}, "runs"),
    "unknown finish": ({"samples": heads(wire.SampleHead(0, T, "gone", ((0, T),)))}, "finish"),
    "index outside of the group": ({"samples": heads(wire.SampleHead(9, T, "stop", ((0, T),)))}, "index"),
    "no prompt": ({"prompt": None}, "layout"),
    "log-probs as integers": ({"logprobs": TOKENS}, "layout"),
    "other prompt length": ({"prompt_tokens": 5}, "length"),
    "reward nan": ({"rewards": {0: float("nan"), 1: 0.0}}, "reward"),
}  # fmt: skip


def test_f21_each_poison_is_dead_with_its_reason(tmp_path: Path, figure: Any) -> None:
    extra = ("buffer.batch_groups=32", "buffer.max_poison_rate=1.0", "learner.steps=10", "buffer.lease_timeout_s=60")
    with Plant(tmp_path, extra=extra) as plant:
        plant.start("buffer")
        learner = LearnerClient(f"tcp://127.0.0.1:{plant.port}", name="learner", timeout_s=60)
        learner.hello()
        learner.register(step=0, ledger="", digests={0: "start"})
        learner.close()

        async def send_all() -> dict[str, str]:
            client = ProducerClient(f"tcp://127.0.0.1:{plant.port}", name="p", timeout_s=60)
            await client.hello()
            raw = AsyncRequester(f"tcp://127.0.0.1:{plant.port}")
            found = {}
            leases = (await client.lease(engine_version=0, max_groups=len(POISON) + 3, wait_s=5.0)).leases
            for (name, (changes, _)), lease in zip(POISON.items(), leases, strict=False):
                head, payload = message(lease, **dict(changes))
                reply = (await raw.request(head, (payload,), timeout_s=60)).message
                found[name] = next(iter(reply.refused.values()), "taken")
            other, early, good = leases[-3:]
            head, payload = message(early, samples=heads(wire.SampleHead(0, T, "stop", ((9, T),))))
            reply = (await raw.request(head, (payload,), timeout_s=60)).message
            found["early"] = reply.refused[0]
            head, payload = message(other, digests={0: "other"})
            reply = (await raw.request(head, (payload,), timeout_s=60)).message
            found["other"] = reply.refused[0]
            head, payload = message(good)
            found["good"] = repr((await raw.request(head, (payload,), timeout_s=60)).message.accepted)
            raw.close()
            client.close()
            return found

        said = asyncio.run(send_all())
        assert "never published" in said["early"]  # tried again first: the prompt is not at fault
        assert said["other"].startswith("not published: digest: p holds other as version 0")
        assert said["good"] == "(0, 1)"
        for name, (_, kind) in POISON.items():
            assert said[name].startswith(f"poison: {kind}"), (name, said[name])
        status = plant.status()
        assert status["ledger"]["dead"] == len(POISON) and status["ledger"]["ready"] == 1
        assert set(status["dead"]) == {f"poison:{kind}" for _, kind in POISON.values()}
        letters = sorted(plant.run.dead.glob("*.frames"))
        assert len(letters) == len(POISON) and all(read_letter(path)[0] for path in letters)
        assert not plant.roles["buffer"].codes
        figure(f"{len(POISON)} kinds of poison: {len(POISON)} groups dead with their reason, the good one is ready")


def test_f21_a_token_outside_the_vocabulary_dies_before_batching(tmp_path: Path) -> None:
    """The buffer does not know the vocabulary, the learner does: the group leaves its batch and the step is trained."""
    extra = ("learner.steps=2", "buffer.batch_groups=2", "buffer.max_poison_rate=1.0", "buffer.lease_timeout_s=60")
    with Plant(tmp_path, producers=1, extra=extra) as plant:
        plant.start("buffer", "learner", "weightsync")

        async def send() -> int:
            client = ProducerClient(f"tcp://127.0.0.1:{plant.port}", name="p", timeout_s=60)
            await client.hello()
            raw = AsyncRequester(f"tcp://127.0.0.1:{plant.port}")
            plant.wait("the learner", lambda: plant.history("register"))
            bad = (await client.lease(engine_version=0, max_groups=1, wait_s=5.0)).leases[0]
            head, payload = message(bad, response=with_value(TOKENS, 2, 9999), digests={})
            assert (await raw.request(head, (payload,), timeout_s=60)).message.accepted == (0, 1)
            raw.close()
            client.close()
            return bad.group

        bad = asyncio.run(send())
        plant.begin("reward-0")
        plant.begin("producer-0")
        plant.wait_done()
        found = plant.assert_accounted()
        assert found.dead == {"poison:vocabulary": 1} or sum(found.dead.values()) == 1
        assert bad not in [number for step in plant.checkpoint().trained.values() for number in step]


def drawn(seed: int) -> tuple[wire.Samples, bytes, float, float]:
    """Samples as a hostile or broken producer might send them, often valid; a log-prob and an advantage."""
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(1, 5, int(rng.integers(1, 4)))]
    total = sum(lengths) + int(rng.random() < 0.1)
    logprobs = -(10 ** rng.uniform(-6, 38, total)) if rng.random() < 0.3 else -rng.exponential(3.0, total)
    odd = np.array([0.0, -0.0, 9e-5, -1e-30, -3e38, np.nan, np.inf, -np.inf, 0.3])
    places = rng.random(total) < rng.choice([0.0, 0.0, 0.2])
    logprobs[places] = rng.choice(odd, int(places.sum()))
    response = rng.integers(0, 14 if rng.random() < 0.2 else 13, total).astype(np.int32)
    fields, payload = wire.pack_arrays(
        {"prompt": np.array([3], np.int32), "response": response, "logprobs": logprobs.astype(np.float32)}
    )
    first = int(rng.integers(-1, 4))
    heads_ = tuple(wire.SampleHead(i, n, "stop", ((max(first, i - 1), n),)) for i, n in enumerate(lengths))
    head = wire.Samples("p", 0, 1, heads_, {}, fields, "{}", 1)
    return head, payload, -float(rng.exponential(5.0)), float(rng.normal(0, 2))


@pytest.mark.long
def test_f21_what_passes_gives_a_finite_loss(figure: Any) -> None:
    passed = 0
    for seed in range(3000):
        head, payload, current, advantage = drawn(seed)
        if wire.validate_samples(head, payload, group_size=4, vocab_size=13, newest_version=2):
            continue
        passed += 1
        behaviour = torch.from_numpy(wire.unpack_arrays(head.fields, payload)["logprobs"].copy())
        for name in LOSSES:
            assert bool(torch.isfinite(loss_over(name, behaviour, current, advantage))), (seed, name)
    assert 300 < passed < 2900
    figure(f"{passed} of 3000 drawn groups pass, all of them give a finite loss and gradient")


def loss_over(name: str, behaviour: Any, current: float, advantage: float) -> Any:
    """The loss of that name over these tokens, and the sum of its gradient."""
    logprobs = torch.full_like(behaviour, current).requires_grad_()
    mask, rows = torch.ones_like(behaviour, dtype=torch.bool), torch.zeros_like(behaviour, dtype=torch.int64)
    weights = tis(logprobs.detach(), behaviour, mask, rows).weights
    inputs = LossInputs(
        logprobs, logprobs.detach(), behaviour, torch.full_like(behaviour, advantage), mask, rows, weights
    )
    options = {"beta": 0.5} if name == "dro" else {}
    loss = loss_for(AlgorithmConfig(loss=name, loss_options=options))(inputs).loss.mean()
    loss.backward()
    assert logprobs.grad is not None
    return loss + logprobs.grad.sum()


def test_f22_a_producer_that_makes_only_poison_ends_the_run(tmp_path: Path, figure: Any) -> None:
    """Both producers send NaN: within 30 s the learner ends, and says the top reason."""
    with Plant(tmp_path, steps=1000, env={"TOY_POISON": "1"}) as plant:
        began = time.monotonic()
        plant.start()
        plant.wait("the learner's end", lambda: plant.roles["learner"].codes, 60)
        took = time.monotonic() - began
        code, said = plant.roles["learner"].codes[0], plant.said("learner")
        assert code not in (0, 69, 75) and code > 0
        assert "poison.budget" in said and "logprobs: not finite" in said
        assert plant.committed() == 0 and took <= 90
        assert plant.status()["fault"]["code"] == "poison.budget"
        figure(f"100 % NaN: exit code {code} after {took:.1f} s")
