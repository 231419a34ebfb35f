"""The probe of an engine's log-probs on samples of a known distribution, drawn and recorded rightly and wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from bare_config import BARE
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from asyncrl.config import SamplingConfig, parse
from asyncrl.errors import ConfigError
from learners.engine_gap import EngineGap
from producers.data.tokenizer import Tokenizer
from producers.engines.logprob_probe import PROMPTS, SAMPLES, Draws, find_problem, shares

VOCABULARY = 40
Array = npt.NDArray[np.float64]
LIMIT = 1e-4


def log_softmax(logits: Array) -> Array:
    return logits - np.log(np.exp(logits).sum())


def top(logits: Array, count: int) -> Array:
    """The logits with all but the largest `count` cut."""
    return np.where(logits >= np.sort(logits)[-count], logits, -np.inf)


def sample(rng: np.random.Generator, drawn_from: Array, recorded: Array) -> list[tuple[int, float]]:
    tokens = rng.choice(VOCABULARY, SAMPLES, p=np.exp(log_softmax(drawn_from)))
    return [(int(token), float(recorded[token])) for token in tokens]


class Sound:
    """Draws and records as configured; an engine with a fault overrides what it does wrong."""

    scale = 1.5  # of the logits

    def __init__(self, sampling: SamplingConfig) -> None:
        self.sampling = sampling

    def warmed(self, logits: Array, temperature: float) -> tuple[Array, Array]:
        """Logits to draw from, and log-probs to record."""
        return logits / temperature, log_softmax(logits / temperature)

    def cut(self, logits: Array) -> tuple[Array, Array]:
        warm, full = self.warmed(logits, self.sampling.temperature)
        left = top(warm, self.sampling.top_k or VOCABULARY)
        return left, log_softmax(left) if self.sampling.wants_support else full

    def draws(self, seed: int) -> list[Draws]:
        rng = np.random.default_rng(seed)
        found = []
        for _ in range(PROMPTS):
            logits = rng.normal(0, self.scale, VOCABULARY)
            warm = self.warmed(logits, self.sampling.temperature)
            found.append(
                Draws(sample(rng, *self.warmed(logits, 1.0)), sample(rng, *warm), sample(rng, *self.cut(logits)))
            )
        return found


class BeforeTemperature(Sound):
    def warmed(self, logits: Array, temperature: float) -> tuple[Array, Array]:
        return logits / temperature, log_softmax(logits)


class WithoutTemperature(Sound):
    def warmed(self, logits: Array, temperature: float) -> tuple[Array, Array]:
        return logits, log_softmax(logits)


class CutByDefault(Sound):
    """As a server with the model's own top_k."""

    def warmed(self, logits: Array, temperature: float) -> tuple[Array, Array]:
        return top(logits, 5) / temperature, log_softmax(logits / temperature)


class NotNormalised(Sound):
    def warmed(self, logits: Array, temperature: float) -> tuple[Array, Array]:
        return logits / temperature, log_softmax(logits / temperature) - 0.7


class CutRecorded(Sound):
    """Log-probs after the cut where those before it are wanted, and the other way round."""

    def cut(self, logits: Array) -> tuple[Array, Array]:
        warm, full = self.warmed(logits, self.sampling.temperature)
        left = top(warm, self.sampling.top_k or VOCABULARY)
        return left, full if self.sampling.wants_support else log_softmax(left)


class Noisy(Sound):
    def draws(self, seed: int) -> list[Draws]:
        rng = np.random.default_rng(seed)
        return [
            Draws(*([(token, logprob + rng.normal(0, 0.01)) for token, logprob in way] for way in one))
            for one in super().draws(seed)
        ]


class NotFinite(Sound):
    def cut(self, logits: Array) -> tuple[Array, Array]:
        return logits, np.full_like(logits, np.nan)


WARM = SamplingConfig(temperature=0.6)
EXACT = SamplingConfig(temperature=0.8, top_k=4)
BIASED = SamplingConfig(top_k=4, truncation="biased")


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARM, EXACT, BIASED])
@pytest.mark.parametrize("scale", [0.0, 2.5, 100.0])
def test_a_sound_engine_is_not_refused(sampling: SamplingConfig, scale: float) -> None:
    engine = Sound(sampling)
    engine.scale = scale
    assert [find_problem(engine.draws(seed), sampling, limit=LIMIT) for seed in range(20)] == [""] * 20


@pytest.mark.parametrize(
    ("kind", "sampling", "said"),
    [
        (BeforeTemperature, WARM, "do not follow sampling.temperature = 0.6"),
        (WithoutTemperature, WARM, "do not follow sampling.temperature = 0.6"),
        (CutByDefault, SamplingConfig(), "a server's defaults"),
        (CutByDefault, WARM, "a server's defaults"),
        (NotNormalised, SamplingConfig(), "a server's defaults"),
        (CutRecorded, BIASED, "before top_p, top_k and min_p"),
        (CutRecorded, EXACT, "of the samples (cut)"),
        (Noisy, SamplingConfig(), "differs by"),
        (NotFinite, SamplingConfig(), "not finite"),
    ],
)
def test_a_fault_is_named(kind: type[Sound], sampling: SamplingConfig, said: str) -> None:
    for seed in range(5):
        assert said in find_problem(kind(sampling).draws(seed), sampling, limit=LIMIT)


def test_rounding_of_half_precision_is_allowed() -> None:
    found = Noisy(WARM).draws(0)
    assert find_problem(found, WARM, limit=0.1) == ""


def test_shares_are_those_of_tokens_seen_before() -> None:
    half, quarter = (3, float(np.log(0.5))), (4, float(np.log(0.25)))
    predicted, seen, sigma = shares([[half, quarter, half, (9, -9.0)]])
    assert (predicted, seen) == (pytest.approx((0 + 0.5 + 0.75 + 0.75) / 4), 0.25)
    assert sigma == pytest.approx((0.25 + 0.1875 * 2) ** 0.5 / 4)


def test_prompts_are_of_ordinary_tokens_that_the_model_has(tmp_path: Path) -> None:
    words = FastTokenizer(models.WordLevel({"<eos>": 0, "a": 1, "b": 2, "<image>": 3, "c": 4}, unk_token="<eos>"))
    words.add_special_tokens(["<eos>", "<image>"])
    words.save(str(tmp_path / "tokenizer.json"))
    for rows, expected in ((5, [1, 2, 4]), (4, [1, 2])):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "vocab_size": rows}))
        assert Tokenizer(tmp_path, trust_remote_code=False).ordinary_ids() == expected


# ---------------------------------------------------------------- the learner's comparison


def gap_of(engine_gap: str = "stop") -> tuple[EngineGap, list[str]]:
    said: list[str] = []
    config = parse(
        BARE.replace("[model]", '[model]\ndtype = "float32"').replace(
            "[learner]", f'[learner]\nengine_gap = "{engine_gap}"'
        )
    )
    return EngineGap(config, say=said.append), said


@pytest.fixture
def look() -> Callable[..., Any]:
    return lambda gap, value, step: gap.look({"lag/0/logprob_gap_mean": value}, step)


def test_an_engine_far_off_stops_the_first_step(look: Callable[..., Any]) -> None:
    gap, said = gap_of()
    with pytest.raises(ConfigError, match=r"differ by 0\.06 nats per token under the same weights") as error:
        look(gap, 0.06, 1)
    assert error.value.code == "config.conflict" and "engine_gap" in error.value.remedy and said == []


def test_quantised_weights_may_be_as_far_as_bfloat16(look: Callable[..., Any]) -> None:
    said: list[str] = []
    gap = EngineGap(parse(BARE, overrides=["model.dtype=float32", "weightsync.dtype=fp8"]), say=said.append)
    look(gap, 0.09, 1)
    assert said == []
    look(gap, 0.5, 1)
    assert "at most 0.1 is expected of float32 and fp8" in said[0]
    with pytest.raises(ConfigError):
        look(gap, 1.01, 1)


@pytest.mark.parametrize(
    ("engine_gap", "value", "step"),
    [("stop", 5e-4, 1), ("stop", 0.06, 2), ("warn", 0.06, 1)],
    ids=["near", "later", "wished"],
)
def test_smaller_or_later_gaps_are_said_once(
    look: Callable[..., Any], engine_gap: str, value: float, step: int
) -> None:
    gap, said = gap_of(engine_gap)
    look(gap, 1e-6, step)
    assert said == []
    look(gap, value, step)
    look(gap, value, step + 1)
    [line] = said
    assert f"differ by {value:.2g} nats" in line and "at most 0.0001" in line
