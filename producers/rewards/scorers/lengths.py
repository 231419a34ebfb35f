"""The length of a response in tokens: `builtin:length` and `builtin:overlong`, to add to another reward."""

from __future__ import annotations

from producers.rewards.sample import RewardSample


class Length:
    """1 from `min_tokens` to `max_tokens`; outside it falls to 0 over `slope_tokens` (0: at once).

    Example: 10..20 with slope 5: 20 tokens 1.0, 22 tokens 0.6, 25 tokens 0.0.
    """

    def __init__(self, *, max_tokens: int, min_tokens: int = 0, slope_tokens: int = 0) -> None:
        if not 0 <= min_tokens <= max_tokens or slope_tokens < 0:
            raise ValueError(f"min_tokens = {min_tokens}, max_tokens = {max_tokens}, slope_tokens = {slope_tokens}")
        self._range = (min_tokens, max_tokens)
        self._slope = slope_tokens

    def __call__(self, sample: RewardSample) -> float:
        count = len(sample.response_ids)
        outside = max(self._range[0] - count, count - self._range[1], 0)
        if not self._slope:
            return float(not outside)
        return max(0.0, 1.0 - outside / self._slope)


class Overlong:
    """DAPO's soft punishment: 0 up to `max_tokens - buffer_tokens`, then falling to `-factor` at `max_tokens`.

    Example: 100 with buffer 20: 80 tokens 0.0, 90 tokens -0.5, 100 tokens and more -1.0.
    """

    def __init__(self, *, max_tokens: int, buffer_tokens: int, factor: float = 1.0) -> None:
        if not 0 < buffer_tokens <= max_tokens or factor < 0:
            raise ValueError(f"max_tokens = {max_tokens}, buffer_tokens = {buffer_tokens}, factor = {factor}")
        self._free = max_tokens - buffer_tokens
        self._buffer = buffer_tokens
        self._factor = factor

    def __call__(self, sample: RewardSample) -> float:
        """The punishment, 0 or less."""
        over = max(0, len(sample.response_ids) - self._free)
        return -min(1.0, over / self._buffer) * self._factor
