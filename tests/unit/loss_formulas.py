"""Policy losses written out in plain numbers, a row of trained tokens at a time. Read by `test_losses`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple


class Token(NamedTuple):
    """`now` is what the gradient is for; `still` is the same number where a formula takes no gradient."""

    now: float
    still: float
    proximal: float
    behaviour: float
    gain: float
    weight: float
    chosen: bool


Row = list[Token]
Formula = Callable[..., list[float]]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def pessimistic(ratio: float, gain: float, low: float, high: float) -> float:
    return max(-gain * ratio, -gain * clip(ratio, 1 - low, 1 + high))


def ppo(
    row: Row, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None, delta: float | None = None
) -> list[float]:
    found = []
    for t in row:
        ratio = math.exp(t.now - t.proximal)
        plain = -t.gain * (ratio if delta is None else min(ratio, delta))
        loss = max(plain, -t.gain * clip(ratio, 1 - clip_low, 1 + clip_high))
        if dual_clip is not None and t.gain < 0:
            loss = min(loss, -t.gain * dual_clip)
        found.append(t.weight * loss)
    return found


def reinforce(row: Row) -> list[float]:
    return [-t.weight * t.gain * t.now for t in row]


def cispo(row: Row, clip_low: float = 0.2, clip_high: float = 0.2) -> list[float]:
    return [-clip(math.exp(t.still - t.proximal), 1 - clip_low, 1 + clip_high) * t.weight * t.gain * t.now for t in row]


def aipo(row: Row, rho: float = 5.0) -> list[float]:
    return [-min(math.exp(t.still - t.behaviour), rho) * t.weight * t.gain * t.now for t in row]


def sapo(row: Row, tau_pos: float = 1.0, tau_neg: float = 1.05) -> list[float]:
    found = []
    for t in row:
        tau = tau_pos if t.gain > 0 else tau_neg
        gate = 1 / (1 + math.exp(-tau * (math.exp(t.now - t.proximal) - 1)))
        found.append(-t.weight * t.gain * 4 / tau * gate)
    return found


def dppo_tv(row: Row, clip_low: float = 0.15, clip_high: float = 0.15, ratio_cap: float = 20.0) -> list[float]:
    found = []
    for t in row:
        moved = math.exp(t.still) - math.exp(t.proximal)
        kept = moved <= clip_high if t.gain > 0 else moved >= -clip_low
        found.append(-t.weight * t.gain * min(math.exp(t.still - t.proximal), ratio_cap) * t.now * kept)
    return found


def dppo_kl(row: Row, clip_low: float = 0.05, clip_high: float = 0.05, ratio_cap: float = 20.0) -> list[float]:
    found = []
    for t in row:
        p, q = math.exp(t.still), math.exp(t.proximal)
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        kept = (kl <= clip_high or p <= q) if t.gain > 0 else (kl <= clip_low or p >= q)
        found.append(-t.weight * t.gain * min(p / q, ratio_cap) * t.now * kept)
    return found


def dro(row: Row, beta: float) -> list[float]:
    return [-t.weight * (t.gain * t.now - beta / 2 * (t.now - t.proximal) ** 2) for t in row]


def gspo(row: Row, clip_low: float = 3e-4, clip_high: float = 4e-4) -> list[float]:
    mean = sum(t.still - t.proximal for t in row) / len(row)
    return [t.weight * pessimistic(math.exp(mean + t.now - t.still), t.gain, clip_low, clip_high) for t in row]


def gmpo(row: Row, clip_low: float = 0.4, clip_high: float = 0.4) -> list[float]:
    logs = 0.0
    for t in row:
        gap = t.now - t.proximal
        sign = (t.gain > 0) - (t.gain < 0)
        logs += sign * min(sign * gap, sign * clip(gap, -clip_low, clip_high)) + math.log(t.weight + 1e-10)
    gain = sum(t.gain for t in row) / len(row)
    return [-gain * math.exp(logs / len(row))] * len(row)


def vespo(
    row: Row, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> list[float]:
    log_w = sum(t.still - t.proximal + math.log(t.weight) for t in row if t.weight)
    log_w = clip(log_w, math.log(1e-8), 20)
    found = []
    for t in row:
        k, rate = (k_pos, lambda_pos) if t.gain >= 0 else (k_neg, lambda_neg)
        phi = math.exp(rate + k * log_w - rate * math.exp(log_w))
        found.append(-phi * t.gain * t.now * (t.weight > 0))
    return found


def topr(row: Row) -> list[float]:
    ratio = math.exp(sum(t.still - t.proximal for t in row))
    return [-t.weight * (min(ratio, 1) if t.gain < 0 else 1) * t.gain * t.now for t in row]


def sppo(row: Row, eta: float = 1.0) -> list[float]:
    error = sum(t.now - t.proximal for t in row) - eta * sum(t.gain for t in row) / len(row)
    return [t.weight * error**2 / len(row) for t in row]


def kl_cov(row: Row, ratio: float = 2e-4, coeff: float = 0.1) -> list[float]:
    return [
        t.weight * (-t.gain * math.exp(t.now - t.proximal) + t.chosen * coeff * abs(t.now - t.proximal)) for t in row
    ]


def clip_cov(row: Row, clip_low: float = 0.2, clip_high: float = 0.2) -> list[float]:
    return [value * (not t.chosen) for t, value in zip(row, ppo(row, clip_low, clip_high), strict=True)]


FORMULAS: dict[str, Formula] = {
    name: globals()[name]
    for name in (
        "ppo",
        "reinforce",
        "cispo",
        "aipo",
        "sapo",
        "dppo_tv",
        "dppo_kl",
        "dro",
        "gspo",
        "gmpo",
        "vespo",
        "topr",
        "sppo",
        "kl_cov",
        "clip_cov",
    )
}
