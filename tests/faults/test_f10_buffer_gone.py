"""F10: the buffer (or the Redis behind it) is gone for good: a checkpoint first, then exit code 69, in time.

The checkpoint holds everything that was trained, also the step whose commit nobody heard; it loads and reconciles.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket as socket_module
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from learner_lab import B, Recorded
from test_f09_learner_outlives_the_store import STEPS, stop_at

from learners.checkpoints import checkpoint

DEADLINE_S = 3.0
EXTRA = "learner.checkpoint_every=100;network.request_timeout_s=3"


@pytest.mark.long_cases("before_commit", "after_commit")
@pytest.mark.slow
@pytest.mark.parametrize("place", ["after_claim", "before_commit", "after_commit"])
def test_f10_a_checkpoint_first_then_69(recorded: Recorded, tmp_path: Path, place: str) -> None:
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with recorded.lab(tmp_path / "gone", steps=STEPS, extra=EXTRA).serve() as lab:
        pid = stop_at(lab, place, 4)
        lab.kill_service("buffer")
        os.kill(pid, signal.SIGCONT)
        since = time.monotonic()
        assert lab.end_of(pid, 60) == 69, lab.tail()
        took = time.monotonic() - since
        assert took <= DEADLINE_S + 30, took
        found = checkpoint.newest(lab.run.checkpoints)
        assert found is not None and found[0].step == 4
        assert "error[net.unreachable]" in lab.said() and "Traceback" not in lab.said()
        if place == "before_commit":  # the buffer never heard of step 4: its recorded batch is not handed out again
            assert lab.committed() == 3
        lab.serve("buffer")
        lab.finish()
        assert lab.history("register")[1]["step"] == 4
        lab.assert_accounted(replayed_steps=0)
        assert lab.result() == wanted
        print(f"{place}: exit 69 after {took:.1f} s, deadline {DEADLINE_S:g} s")


@pytest.mark.long
@pytest.mark.slow
def test_f10_asked_to_stop_while_the_buffer_is_dead(recorded: Recorded, tmp_path: Path) -> None:
    """And all of the store is lost before the next start: what step 4 trained is known from the checkpoint alone."""
    wanted = recorded.reference(tmp_path, steps=STEPS)
    extra = EXTRA.replace("request_timeout_s=3", "request_timeout_s=60")
    with recorded.lab(tmp_path / "asked", steps=STEPS, extra=extra).serve() as lab:
        pid = stop_at(lab, "before_commit", 4)
        lab.lose_store()
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
        since = time.monotonic()
        assert lab.end_of(pid, 60) == 69, lab.tail()
        assert time.monotonic() - since <= 3.0 + 30  # LEAVE_S, not the 60 s of the request
        found = checkpoint.newest(lab.run.checkpoints)
        assert found is not None and found[0].step == 4
        lab.serve("buffer")
        pid = lab.learner()
        lab.wait("the registration", lambda: len(lab.history("register")) == 2)
        lab.produce(version=4, count=(STEPS - 4) * B)
        lab.assert_ends(pid, wanted, replayed_steps=0)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.redis
def test_f10_redis_is_gone_for_good(recorded: Recorded, tmp_path: Path) -> None:
    """The buffer ends after `redis_max_outage_s`, the learner after its own deadline; Redis comes back empty."""
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no redis-server or valkey-server on the PATH")
    wanted = recorded.reference(tmp_path, steps=STEPS)
    with tempfile.TemporaryDirectory() as short:  # a socket's path may have a hundred characters
        socket = Path(short) / "r.sock"
        words = [server, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", short]
        redis = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        extra = f"{EXTRA};buffer.store=redis;buffer.redis_url=unix://{socket};buffer.redis_max_outage_s=2"
        lab = recorded.fresh(tmp_path / "redis", steps=STEPS, extra=extra)
        try:
            lab.wait("Redis", socket.exists)
            lab.serve().produce()
            pid = stop_at(lab, "before_commit", 4)
            redis.kill()
            redis.wait(60)
            os.kill(pid, signal.SIGCONT)
            since = time.monotonic()
            assert lab.end_of(pid, 60) == 69, lab.tail()
            assert time.monotonic() - since <= DEADLINE_S + 30
            assert lab.services["buffer"].wait(30) == 69
            found = checkpoint.newest(lab.run.checkpoints)
            assert found is not None and found[0].step == 4
            redis = subprocess.Popen(words, stdout=subprocess.DEVNULL)
            lab.wait("Redis", lambda: _answers(socket))
            lab.serve("buffer")
            pid = lab.learner()
            lab.wait("the registration", lambda: len(lab.history("register")) == 2)
            lab.produce(version=4, count=(STEPS - 4) * B)
            lab.assert_ends(pid, wanted)
        finally:
            lab.close()
            redis.kill()
            redis.wait(60)


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket_module.socket(socket_module.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(str(path))
        return True
    return False
