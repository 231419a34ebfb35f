"""The digests of the weights that an engine held, by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Digests(dict[int, str]):
    """`replaced` has the version and the earlier digest of each version that a learner published with other weights,
    after it went back to a checkpoint. Samples in progress may have tokens of the earlier ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced: list[tuple[int, str]] = []

    def commit(self, version: int, digest: str) -> None:
        if self.get(version, digest) != digest:
            self.replaced.append((version, self[version]))
        self[version] = digest


class DigestsSince:
    """The digests for samples that begin now. A version that is replaced meanwhile keeps its earlier digest: the buffer
    then refuses these samples, because it is not known which weights made their tokens.
    """

    def __init__(self, digests: Mapping[int, str]) -> None:
        self._replaced: Sequence[tuple[int, str]] = getattr(digests, "replaced", ())
        self._begin = len(self._replaced)

    def resolve(self, known: Mapping[int, str]) -> dict[int, str]:
        return {**known, **dict(reversed(self._replaced[self._begin :]))}
