"""The settings that `asyncrl tune` can change, their validation, and the controller of `pipeline_depth = "auto"`.

Guarantees:
1. a value is checked by the type of its configuration field and against the other settings in force (`tune.refused`);
2. `DepthController` is pure: the same observations give the same depth.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.config import AlgorithmConfig, BufferConfig, ProducersConfig, Section
from asyncrl.config.rules.algorithm import apply_overrides
from asyncrl.errors import AsyncRLError

ALGORITHM = "learner.algorithm."
_BUFFER = ("max_staleness", "pipeline_depth", "on_late", "late_timeout_s", "batch_groups", "max_reuse")
#: Short form -> dotted key of the settings that can be changed, in addition to all of `learner.algorithm`.
SHORT = {**{name: f"buffer.{name}" for name in _BUFFER}, "max_groups_in_flight": "producers.max_groups_in_flight"}
KEPT_CHANGES = 256  # that can be undone


class Tuning(msgspec.Struct, array_like=True):
    """The row `tuning`: the overrides in force, those after every earlier change, and the plan of batch sizes."""

    number: int = 0  # of the last change
    values: dict[str, Any] = {}  # dotted key -> value in force instead of the configuration's
    depth: int = -1  # chosen by pipeline_depth = "auto"; -1: not yet
    plan: tuple[tuple[int, int], ...] = ()  # (first step, batch_groups); empty: never changed
    past: dict[int, dict[str, Any]] = {}  # the overrides after each change, newest KEPT_CHANGES
    author: str = ""  # of the last change

    def learner_overrides(self) -> str:
        """The learner's overrides as the JSON that goes with a batch; empty without any."""
        mine = {key: value for key, value in sorted(self.values.items()) if key.startswith(ALGORITHM)}
        return msgspec.json.encode(mine).decode() if mine else ""


def refusal(message: str) -> AsyncRLError:
    """The error of a change that cannot be made."""
    return AsyncRLError("tune.refused", message)


def full_key(key: str) -> str:
    """The full key of a short form. Raises `tune.refused` if the setting cannot be changed while the system runs.

    >>> full_key("max_staleness"), full_key("learner.algorithm.tis_cap")
    ('buffer.max_staleness', 'learner.algorithm.tis_cap')
    """
    full = SHORT.get(key, key)
    if full in SHORT.values() or (full.startswith(ALGORITHM) and _is_setting(full[len(ALGORITHM) :])):
        return full
    raise refusal(f"{key} cannot be changed while the system runs; these can: {', '.join(SHORT)}, {ALGORITHM}*")


def convert_value(key: str, value: Any) -> Any:
    """The value of a dotted key, converted to the type of its field. Raises `tune.refused` if it does not fit.

    >>> convert_value("buffer.late_timeout_s", 5)
    5.0
    """
    if key.startswith(ALGORITHM):
        hint = _hint(key[len(ALGORITHM) :])
    else:
        section, name = key.rsplit(".", 1)
        hint = _fields(BufferConfig if section == "buffer" else ProducersConfig)[name]
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise refusal(f"{key} = {value!r}: {error}") from None


def _is_setting(key: str) -> bool:
    """Whether a key below `learner.algorithm.` can be changed: `clip_low`, `kl.coeff`, `loss_options.beta`."""
    try:
        hint = _hint(key)
    except KeyError:
        return False
    return key != "preset" and not (isinstance(hint, type) and issubclass(hint, Section))


def _hint(key: str) -> Any:
    """The type of a key below `learner.algorithm.`; KeyError where there is none. Options have any type here."""
    table, _, leaf = key.partition(".")
    hint = _fields(AlgorithmConfig)[table]
    if not leaf:
        return hint
    if table.endswith("_options") and "." not in leaf:
        return Any
    if isinstance(hint, type) and issubclass(hint, Section):
        return _fields(hint)[leaf]
    raise KeyError(key)


def flatten(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the algorithm with those of its sections as `kl.coeff`; option tables as they are.

    >>> flatten({"loss": "ppo", "kl": {"coeff": 0.1}, "loss_options": {}})
    {'loss': 'ppo', 'kl.coeff': 0.1, 'loss_options': {}}
    """
    found: dict[str, Any] = {}
    for name, value in algorithm.items():
        if isinstance(value, dict) and not name.endswith("_options"):
            found |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        elif name != "preset":
            found[name] = value
    return found


def check_algorithm(values: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Raise `tune.refused` if the settings of the algorithm would contradict each other.

    `values`: dotted key -> value in force; `base`: the algorithm of the configuration.
    """
    mine = {key.removeprefix(ALGORITHM): value for key, value in values.items() if key.startswith(ALGORITHM)}
    try:
        apply_overrides(msgspec.convert(base, AlgorithmConfig), mine)
    except ValueError as error:
        raise refusal(str(error)) from None


@functools.cache  # reading the hints takes longer than the rest of a change
def _fields(kind: type[Any]) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


class DepthController:
    """Finds the smallest depth at which the learner waits for less than `target` of its time, or that is as fast as the
    next one.

    It takes one observation per step and changes the depth by one at a time: up when the share of the last steps is
    above the target, down when it is below half of it. After a step up it stays only if steps take less time than
    before, by more than `target`: where the producers are too slow, or share processors with the learner, more work in
    flight only makes samples older. A depth that was left is not tried again for `PATIENCE` steps, twice as long each
    time. The first steps after the start and after a change are left out, because they show what was before.

    >>> control = DepthController(target=0.1)
    >>> depth = 1
    >>> for step in range(40):
    ...     idle = 0.5 if depth < 3 else 0.0
    ...     depth = control.observe(idle_s=idle / depth, step_s=1.0 + idle / depth, depth=depth, limit=4)
    >>> depth
    3
    """

    WINDOW = 8  # steps that are judged together
    HASTE = 4  # steps after which a clear result is enough to act
    PATIENCE = 32
    LONGEST = 2048

    def __init__(self, target: float) -> None:
        self.target = target
        self._idle_s = self._total_s = 0.0
        self._steps = 0  # in the window
        self._count = 0
        self._settling: int | None = None  # steps to leave out
        self._shallower_s = 0.0  # on trial: seconds of a step at the depth before; 0: not on trial
        self._blocked: dict[int, int] = {}  # depth -> count until which it is not tried
        self._patience: dict[int, int] = {}

    def observe(self, *, idle_s: float, step_s: float, depth: int, limit: int) -> int:
        """The learner waited `idle_s` of a step of `step_s` seconds with this depth; the depth from now on."""
        self._count += 1
        if self._settling is None:
            self._settling = depth + 1
        if self._settling > 0:
            self._settling -= 1
            return depth
        self._idle_s += idle_s
        self._total_s += max(idle_s, step_s)
        self._steps += 1
        wanted = self._next_depth(depth, limit)
        if wanted is None:
            return depth
        self._shallower_s = self._total_s / self._steps if wanted > depth else 0.0
        self._idle_s = self._total_s = 0.0
        self._steps = 0
        self._settling = wanted + 1 if wanted != depth else 0
        return wanted

    def _next_depth(self, depth: int, limit: int) -> int | None:
        """The depth by this window; None: the window goes on."""
        full, early = self._steps >= self.WINDOW, self._steps >= self.HASTE
        share = self._idle_s / self._total_s if self._total_s > 0 else 0.0
        if self._shallower_s:
            gain = 1 - self._total_s / self._steps / self._shallower_s
            if not full and (not early or gain < 3 * self.target):
                return None
            if gain < self.target:
                self._block(depth)
                return max(1, depth - 1)
        if share > self.target and (full or (early and share > 2 * self.target)):
            if depth >= limit or self._is_blocked(depth + 1):
                return depth
            self._block(depth)
            return depth + 1
        if not full:
            return None
        return depth - 1 if share < self.target / 2 and depth > 1 and not self._is_blocked(depth - 1) else depth

    def _is_blocked(self, depth: int) -> bool:
        return self._blocked.get(depth, 0) > self._count

    def _block(self, depth: int) -> None:
        patience = min(self.LONGEST, 2 * self._patience.get(depth, self.PATIENCE // 2))
        self._patience[depth] = patience
        self._blocked[depth] = self._count + patience
