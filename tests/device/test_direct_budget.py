"""What a publish costs the learner's device: no copy to the host that waits, and memory of at most three buckets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from device_run import HERE, install

CONFIG = """
[run]
dir = "{folder}/run"
[model]
path = "{model}"
dtype = "{dtype}"
[data]
path = "unused.jsonl"
[learner]
device = "npu"
ranks = {ranks}
[weightsync]
transport = "{transport}"
in_place = {in_place}
bucket_bytes = {bucket_bytes}
[[reward]]
function = "unused:unused"
"""


class Case(NamedTuple):
    """`most`: buckets of memory. A gathering needs three, a cast of a rank's rows a little more; where FSDP gathers by
    itself (one rank) two of its units lie next to two buckets. Rows that are not gathered need room for their cast."""

    ranks: int
    dtype: str
    most: float


def publish(library: Path, folder: Path, model: Path, case: Case, *, script: str, transport: str) -> dict[str, int]:
    """What rank 0 of a script says."""
    ranks = case.ranks
    package = install(folder / "npu", library, devices=4)
    config = folder / "config.toml"
    in_place = str(transport == "direct").lower()
    settings = {"ranks": ranks, "dtype": case.dtype, "bucket_bytes": 1 << 19}
    config.write_text(CONFIG.format(folder=folder, model=model, transport=transport, in_place=in_place, **settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(map(str, (package, HERE.parents[2])))
    base = {**os.environ, "PYTHONPATH": paths, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = str(Path(__file__).with_name(script))
    children = []
    for rank in range(ranks):
        env = base | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, path, str(config)]
            children.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, text=True))
    try:
        codes = [child.wait(240) for child in children]
    finally:
        for child in children:
            child.kill()
    logs = "".join((folder / f"rank{rank}.log").read_text() for rank in range(ranks))
    assert codes == [0] * ranks, logs
    [line] = [line for line in logs.splitlines() if line.startswith("found ")]
    found: dict[str, int] = json.loads(line.removeprefix("found "))
    return found


CASES = [Case(2, "float32", 3.0), Case(2, "bfloat16", 3.2), Case(1, "bfloat16", 4.0)]


@pytest.mark.timeout(280)
@pytest.mark.chaos_cases("*float32*")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_publish_stays_on_the_device(
    library: Path, tmp_path: Path, tiny_model: Path, case: Case, figure: Callable[[str], None]
) -> None:
    found = publish(library, tmp_path, tiny_model, case, script="direct_ranks.py", transport="direct")
    figure(f"{case}: {found}")
    assert found["arrived"] == found["buckets"] > 2 and found["formed"] == 1 and found["senders"] == case.ranks
    assert found["blocking"] == found["unpinned"] == 0, found
    assert found["bytes_to_host"] == 16 * found["buckets"], "the digests alone leave the device"
    assert found["peak"] <= case.most * found["largest_bucket"], found


#: Without a cast rows are copied from where they lie.
ROWS = [Case(2, "float32", 0.0), Case(2, "bfloat16", 0.5), Case(1, "bfloat16", 0.5)]


@pytest.mark.timeout(280)
@pytest.mark.chaos_cases("*float32*", "*ranks=1*")
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_a_rank_copies_its_rows_alone(
    library: Path, tmp_path: Path, tiny_model: Path, case: Case, figure: Callable[[str], None]
) -> None:
    found = publish(library, tmp_path, tiny_model, case, script="row_ranks.py", transport="local")
    figure(f"{case}: {found}")
    assert found["blocking"] == found["unpinned"] == 0, found
    assert found["bytes_to_host"] == found["own"] // (2 if case.dtype == "bfloat16" else 1), "each byte once"
    assert found["peak"] <= case.most * found["largest_bucket"], found
