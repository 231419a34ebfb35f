"""`asyncrl samples`: answers of the model as text, during the run or afterwards.

Guarantees:
1. it only reads `samples.jsonl`, which the learner writes (the best and the worst of a step, `log.samples_per_step`);
2. the model's text cannot control the terminal: unprintable characters are shown as escapes;
3. samples are those of the history that counts: of a step that was trained again, the last ones.

Example: `asyncrl samples runs/my --step 40`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.images.digests import IMAGES, image_digests
from asyncrl.images.folder import ImageFolder
from asyncrl.metrics import drop_repeated_steps, read_lines
from asyncrl.runtime.run_dir import RunDir

MOST_CHARS = 2000  # of one text; `--full` prints all
INDENT = "    "


def samples_command(folder: Path, *, last: int, step: int | None, full: bool) -> int:
    """Print the samples of the newest `last` steps that have any, or of one step. Returns 0.

    Raises:
        ConfigError: `run.missing`; `usage`: there are no such samples.
    """
    run = RunDir(folder).require()
    found = group_by_step(read_lines(run.samples))
    wanted = [step] if step is not None else sorted(found)[-max(1, last) :]
    if not found or any(number not in found for number in wanted):
        known = f"there are those of steps {min(found)} to {max(found)}" if found else "no step was trained yet"
        raise ConfigError(
            "usage",
            f"no samples{f' of step {step}' if step is not None else ''}: {known}",
            where=str(run.samples),
            remedy="log.samples_per_step says how many are kept",
        )
    for number in wanted:
        for line in format_samples(found[number], most=0 if full else MOST_CHARS, folder=ImageFolder(run.images)):
            print(line)
    return 0


def drop_repeated_samples(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of `samples.jsonl` that count. A step has one or several in a row. If it comes again after a later one,
    its earlier lines and those of all later steps are removed.
    """
    steps = [{"step": step, "lines": list(of)} for step, of in groupby(lines, key=lambda line: line.get("step"))]
    return [line for step in drop_repeated_steps(steps) for line in step["lines"]]


def group_by_step(lines: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """The samples of each step, the best first; the last line counts if a sample is there twice."""
    kept: dict[tuple[int, int, int], dict[str, Any]] = {}
    for line in drop_repeated_samples(lines):
        if isinstance(line.get("step"), int):
            kept[line["step"], int(line.get("group") or 0), int(line.get("index") or 0)] = line
    found: dict[int, list[dict[str, Any]]] = {}
    for (step, _, _), line in sorted(kept.items(), key=lambda item: (item[0][0], -float(item[1].get("reward") or 0))):
        found.setdefault(step, []).append(line)
    return found


def format_samples(samples: Sequence[dict[str, Any]], *, most: int, folder: ImageFolder) -> Iterator[str]:
    """The lines of some samples of one step; `folder`: the images of the run."""
    for sample in samples:
        parts = sample.get("parts")
        listed = parts if isinstance(parts, dict) and len(parts) > 1 else {}
        shown = (
            f" ({', '.join(f'{plain(name)} {value:g}' for name, value in sorted(listed.items()))})" if listed else ""
        )
        reward = sample.get("reward")
        score = f"{reward:g}" if isinstance(reward, int | float) else "-"
        yield (
            f"step {sample['step']}  group {sample.get('group')}  reward {score}{shown}  lag {sample.get('lag')}  "
            f"{sample.get('length')} tokens, {plain(str(sample.get('finish')))}"
        )
        for words, key in (("images", IMAGES), ("images of later turns", "shown")):
            if images := image_digests({IMAGES: sample.get(key)}):
                yield f"  {words}"
                yield INDENT + ", ".join(map(folder.describe, images))
        for name in ("prompt", "response"):
            yield f"  {name}"
            yield from (INDENT + line for line in plain(str(sample.get(name) or ""), most=most).split("\n"))
        yield ""


def plain(text: str, *, most: int = 0) -> str:
    """The text with escapes for unprintable characters, cut in the middle beyond `most` characters (0: whole)."""
    if most and len(text) > most:
        half = most // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters more ...\n{text[-half:]}"
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)
