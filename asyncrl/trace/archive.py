"""Texts of a group, from the archived batch of a step that claimed it: prompt and responses.

Guarantees:
1. a damaged or missing file gives a sentence, never an error: the rest of the story does not depend on it;
2. text if the model folder has a `tokenizer.json`, else token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from asyncrl.config import Config
from asyncrl.errors import WireError
from asyncrl.runs import batch_file
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire.batch_arrays import decode_batch

Decode = Callable[[Sequence[int]], str]


class Words(msgspec.Struct):
    """Texts of a group in the archive. `problem` says why there are none."""

    step: int = 0
    prompt: str = ""
    responses: dict[int, str] = {}
    turns: dict[int, list[tuple[int, float]]] = {}  # (a turn's last token, its reward, not 0), by sample
    finish: dict[int, str] = {}  # stop | length | abort, by sample
    tuning: str = ""  # tuned settings of the learner in this step
    quarantined: str = ""  # why the learner removed the group from the step
    problem: str = ""


def load_words(run: RunDir, config: Config, *, group: int, steps: Sequence[int]) -> Words | None:
    """The texts in the newest archived step with the group; None if no step is archived."""
    archived = set(batch_file.steps_in(run.archive))
    problem = ""
    for step in sorted(archived.intersection(steps), reverse=True):
        try:
            found = _words(run, config, group, step)
        except (WireError, OSError) as error:
            problem = problem or f"the archived batch of step {step} cannot be read: {error}"
            continue
        if found is not None:
            found.quarantined = batch_file.quarantined(run.archive).get(step, {}).get(group, "")
            return found
    return Words(problem=problem) if problem else None


def _words(run: RunDir, config: Config, group: int, step: int) -> Words | None:
    file = batch_file.read(batch_file.batch_path(run.archive, step))
    batch = decode_batch(file.batch, file.payloads)
    if group in batch.invalid:
        return Words(step, problem=f"it does not pass validation: {batch.invalid[group]}")
    for data in batch.groups:
        if data.group == group:
            decode = decoder(Path(config.model.path))
            return Words(
                step,
                decode(data.prompt_ids.tolist()),
                {sample.index: decode(sample.response.tolist()) for sample in data.samples},
                {sample.index: list(sample.turns) for sample in data.samples if sample.turns},
                {sample.index: sample.finish for sample in data.samples},
                batch.tuning,
            )
    return None


def decoder(folder: Path) -> Decode:
    """Token ids to text with the model's tokenizer; the ids as text if it cannot be used."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the package raises plain Exception for a missing or damaged file
        return lambda ids: " ".join(map(str, ids))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode
