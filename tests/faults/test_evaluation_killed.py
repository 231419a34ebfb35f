"""Evaluations while roles are killed in turn: each prompt is accounted for, and training is what it would have been.

Not a row of the fault table of its own: kills of producers, reward workers, the learner and the buffer with an
evaluation under way.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from plant import Plant

from asyncrl.metrics import read_lines

ROWS = 12
KILLED = ("producer-0", "reward-0", "buffer", "learner", "producer-1", "buffer")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_every_held_out_prompt_is_accounted_for(tmp_path: Path, store: str, figure: Any) -> None:
    data = tmp_path / "held.jsonl"
    data.write_text("".join(f'{{"prompt":"{n:03d}","data_source":"s{n % 2}"}}\n' for n in range(900, 900 + ROWS)))
    extra = (
        f"buffer.store={store}",
        f"evaluation.path={data}",
        "evaluation.every=4",
        "evaluation.at_start=true",
        "evaluation.samples=3",
        "evaluation.temperature=1.0",
        "evaluation.timeout_s=20",
    )
    env = {"TOY_TOKEN_S": "0.01", "MINI_STEP_S": "0.1"}
    with Plant(tmp_path, steps=100_000, producers=2, rewards=2, extra=extra, env=env) as plant:
        plant.start()
        for name in itertools.islice(itertools.cycle(KILLED), 12):
            before = len(plant.history("eval_score"))
            plant.wait("scores of an evaluation", lambda before=before: len(plant.history("eval_score")) > before + 4)
            try:
                plant.kill(name)
            except ProcessLookupError:
                continue  # it is being started again
            time.sleep(0.5)
        plant.finish()
        found = plant.assert_accounted()
        begun, ended = plant.history("eval_begin"), plant.history("eval_end")
        renamed = {event["round"]: event["now"] for event in plant.history("eval_restart")}  # its version was lost

        def last_name(number: int) -> int:
            return last_name(renamed[number]) if number in renamed else number

        numbers = [last_name(event["round"]) for event in begun]
        assert numbers == [event["round"] for event in ended], "each has its ending"
        lines = read_lines(plant.run.metrics / "evaluation.jsonl")
        assert [line["round"] for line in lines] == [event["round"] for event in ended], "each is told once"
        for line in lines:
            assert line["evaluation_prompts"] == ROWS
            assert sum(line[f"evaluation_{name}"] for name in ("scored", "failed", "missing")) == ROWS, line
            assert line["evaluation_failed"] == 0, "a kill is no fault of a prompt"
            if line["evaluation_scored"]:
                ends = line["evaluation_version_min"], line["evaluation_version_max"]
                assert ends == (line["evaluation_version"],) * 2, "one version, whatever was killed"
        whole = [line for line in lines if line["evaluation_scored"] == ROWS]
        assert len(whole) >= 3
        figure(
            f"{store}: {len(lines)} evaluations under {sum(plant.restarts.values())} restarts, {len(whole)} whole; "
            f"{found.evaluation_samples} held-out samples, 0 trained"
        )
