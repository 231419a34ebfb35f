"""The interface of a form: see `producers.rewards.forms`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from producers.rewards.sample import RewardSample, describe


class Parameters(NamedTuple):
    """The parameters of a function, without those that the configuration sets."""

    names: frozenset[str]
    takes_all: bool  # has **columns
    required: frozenset[str]
    positional: tuple[str, ...]  # in their order


class Form(ABC):
    """One form, for one function. `batch` forms get all samples of a job at once."""

    name: ClassVar[str]
    signature: ClassVar[str]  # for messages
    batch: ClassVar[bool] = False
    given: ClassVar[frozenset[str]] = frozenset()  # parameters that it can fill; empty: any, from columns

    def __init__(self, parameters: Parameters, *, prompt_key: str = "prompt") -> None:
        self.parameters = parameters
        self.prompt_key = prompt_key

    @classmethod
    @abstractmethod
    def claims(cls, parameters: Parameters) -> bool:
        """Whether a function with these parameters is of this form."""

    @classmethod
    def missing_parameters(cls, parameters: Parameters) -> frozenset[str]:
        """Required parameters that it cannot fill."""
        return parameters.required - cls.given if cls.given else frozenset()

    @abstractmethod
    def keywords(self, samples: Sequence[RewardSample]) -> dict[str, Any]:
        """All possible arguments for these samples (one sample unless it is a batch form)."""

    def arguments(self, samples: Sequence[RewardSample]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and keywords that the function takes."""
        known = self.keywords(samples)
        if self.parameters.takes_all:
            return (), known
        return (), {name: value for name, value in known.items() if name in self.parameters.names}

    def items(self, raw: Any, count: int) -> list[Any]:
        """A batch result as one raw value for each sample. Raises TypeError for another number."""
        values = make_list(raw)
        if values is None or len(values) != count:
            raise TypeError(f"a batch function must give a list of {count} numbers, it gave {describe(raw)}")
        return values


def make_list(raw: Any) -> list[Any] | None:
    """A list, tuple, array or tensor as a list; None for anything else."""
    items = raw.tolist() if hasattr(raw, "tolist") else raw
    return list(items) if isinstance(items, list | tuple) else None


def row_columns(samples: Sequence[RewardSample], *, without: str) -> dict[str, list[Any]]:
    """The columns of the samples' rows, as lists."""
    names = {name: None for sample in samples for name in sample.row if name != without}
    return {name: [sample.row.get(name) for sample in samples] for name in names}
