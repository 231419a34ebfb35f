"""Three data sets at 5:3:2 in a run that is stopped and goes on: the shares of what was trained."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter

import pytest
from e2e_run import Run

from asyncrl.runtime import batch_file
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire.batch_arrays import decode_batch


@pytest.mark.long
@pytest.mark.timeout(300)
def test_three_data_sets_keep_their_ratios_through_a_resume(run: Run) -> None:
    paths = []
    for name, size in (("sums", 40), ("words", 7), ("codes", 300)):
        path = run.folder / f"{name}.jsonl"
        rows = [{"prompt": f"{number % 90 + 10}+1=", "data_source": name} for number in range(size)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    settings = (
        f'data.path="{",".join(paths)}"',
        "data.ratios=[5, 3, 2]",
        "learner.steps=25",
        "buffer.batch_groups=8",
        "log.archive=true",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    first = run.start("launch", "all", str(run.config), *words)
    run.wait("step 7", lambda: max(run.steps(), default=0) >= 7)
    os.kill(first.pid, signal.SIGINT)
    out, _ = first.communicate(timeout=90)
    assert first.returncode == 130, out
    done = run.launch(*settings)
    assert done.returncode == 0, done.stdout + run.logs()
    counts: Counter[str] = Counter()
    archive = RunDir(run.dir).archive
    for step in range(1, 26):
        file = batch_file.read(batch_file.batch_path(archive, step))
        counts.update(group.row["data_source"] for group in decode_batch(file.batch, file.payloads).groups)
    assert sum(counts.values()) == 200
    for name, share in (("sums", 0.5), ("words", 0.3), ("codes", 0.2)):
        assert abs(counts[name] / 200 - share) <= 0.02, counts
