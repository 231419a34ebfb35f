"""Prompts chosen by difficulty in a run whose buffer is killed: the shares, the audit, the replay, the trace."""

from __future__ import annotations

import json
import os
import signal

import pytest
from e2e_run import Run

from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire.batch_arrays import decode_batch

REWARD = """
def some(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0 if data_source == "hopeless" else float(len(solution_str))
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_hopeless_prompts_are_seldom_chosen_and_a_killed_buffer_chooses_on(run: Run) -> None:
    (run.folder / "some_reward.py").write_text(REWARD)
    sources = ["hopeless"] * 36 + ["fine"] * 12
    rows = [{"prompt": f"{number + 10}+1=", "data_source": source} for number, source in enumerate(sources)]
    (run.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        "data.sampler=difficulty",
        "learner.steps=30",
        "buffer.batch_groups=8",
        "log.archive=true",
        'reward=[{function="some_reward:some"}]',
    )
    words = [word for setting in settings for word in ("--set", setting)]
    child = run.start("launch", "all", str(run.config), *words)
    run.wait("step 12", lambda: max(run.steps(), default=0) >= 12)
    os.kill(run.pid("buffer"), signal.SIGKILL)
    out, _ = child.communicate(timeout=200)
    assert child.returncode == 0, out + run.logs()
    found = []
    for step in range(1, 31):
        file = batch_file.read(batch_file.batch_path(RunDir(run.dir).archive, step))
        found += [group.row["data_source"] for group in decode_batch(file.batch, file.payloads).groups]
    shares = [found[begin:end].count("fine") / (end - begin) for begin, end in ((0, 40), (120, 240))]
    assert shares[0] < 0.6 and shares[1] > 0.6, f"a quarter of the rows teaches: {shares}"
    audit = run.audit()
    assert audit["exit"] == 0, audit
    replayed = run.command("replay", str(run.dir), "--out", str(run.folder / "replay"))
    assert replayed.returncode == 0, replayed.stdout
    chosen = [line for line in run.lines("history.jsonl") if line["e"] == "choose"]
    assert len([line for line in run.lines("history.jsonl") if line["e"] == "prompts"]) == 1
    traced = run.command("trace", str(run.dir), str(chosen[-1]["g"]), timeout=60).stdout
    assert rows[chosen[-1]["row"]]["prompt"] in traced
    assert len({line["g"] for line in chosen}) == len(chosen)
