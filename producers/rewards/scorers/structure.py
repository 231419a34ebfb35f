"""The structure of a response: `builtin:json_schema` (needs jsonschema, extra `scorers`) and `builtin:format`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from asyncrl.errors import UNREADABLE, ConfigError
from producers.rewards.sample import RewardSample
from producers.rewards.scorers.extract import find_fenced
from producers.rewards.scorers.ground_truth import json_truth


class JSONSchema:
    """1 for JSON that fits `schema`; `parses` for JSON that does not. Without `schema`: the ground truth is the schema.

    The last fenced block marked as JSON counts, else the last one with no mark, else the whole response.
    """

    def __init__(self, *, schema: Mapping[str, Any] | None = None, parses: float = 0.0) -> None:
        try:
            import jsonschema
        except ImportError as error:
            message = f"builtin:json_schema needs jsonschema: {error}"
            raise ConfigError("config.extra", message, remedy="pip install 'asyncrl[scorers]'") from None
        self._validators = jsonschema.validators
        self._problems = (jsonschema.SchemaError,)
        self._fixed = self._validator(schema) if schema is not None else None
        self._parses = parses

    def _validator(self, schema: Any) -> Any:
        kind = self._validators.validator_for(schema) if isinstance(schema, Mapping) else None
        if kind is None:
            raise ValueError(f"the schema is not an object: {schema!r:.80}")
        try:
            kind.check_schema(schema)
        except self._problems as error:
            raise ValueError(f"it is not a JSON schema: {error.message}") from None
        return kind(schema)

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and whether it is JSON."""
        validator = self._fixed or self._validator(json_truth(sample))
        said = sample.last_turn
        block = find_fenced(said, ("json",))
        try:
            value = json.loads(said if block is None else block, parse_constant=_no_constant)
        except UNREADABLE:
            return {"score": 0.0, "parses": 0.0}
        return {"score": 1.0 if validator.is_valid(value) else self._parses, "parses": 1.0}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Tags:
    """1 if the whole response is the `tags` in their order, each once, with text in each; or matches `pattern`.

    The answer is the text in the last tag, or in the pattern's group `answer`.
    """

    def __init__(self, *, tags: tuple[str, ...] | list[str] = ("think", "answer"), pattern: str = "") -> None:
        parts = (rf"<{re.escape(tag)}>(?P<t{number}>.*?)</{re.escape(tag)}>" for number, tag in enumerate(tags))
        self._tags = [] if pattern else list(tags)
        try:
            self._pattern = re.compile(pattern or r"\s*" + r"\s*".join(parts) + r"\s*", re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern: {error}") from None

    def __call__(self, sample: RewardSample) -> dict[str, Any]:
        """The score, and the answer."""
        said = sample.last_turn
        # Checked first: on a text with repeated tags the pattern would take polynomial time.
        once = all(said.count(f"<{tag}>") == 1 == said.count(f"</{tag}>") for tag in self._tags)
        found = self._pattern.fullmatch(said) if once else None
        if found is None:
            return {"score": 0.0}
        groups = found.groupdict()
        filled = all((groups[f"t{number}"] or "").strip() for number in range(len(self._tags)))
        name = "answer" if "answer" in groups else f"t{len(self._tags) - 1}"
        return {"score": float(filled), "pred": (groups.get(name) or "").strip() or None}
