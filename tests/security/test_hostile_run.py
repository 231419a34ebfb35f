"""A run with a hostile holder of every guest's key: it trains to its end, and replaying the archive gives its weights.

`HOSTILE_S` seconds of attacks (30, or what the environment says) of everything that the wire offers.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))  # buffer_lab, for the attacks

import fuzzing
from test_running_job import end, free_port

from asyncrl import wire
from asyncrl.errors import AsyncRLError
from asyncrl.net.keys import GUESTS, add_key, read_keys, write_keys
from asyncrl.net.requester import Requester

HOSTILE_S = float(os.environ.get("HOSTILE_S", "30"))
pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(HOSTILE_S + 600)]


class Guest(threading.Thread):
    """Holds a key of a role. It sends damaged frames and messages with hostile values, asks for work with what it may
    send, and answers it with rewards, lengths and log-probs that nobody has.
    """

    def __init__(self, run: Any, role: str, addresses: list[str], until: float) -> None:
        super().__init__(daemon=True)
        self.run_, self.role, self.until = run, role, until
        keys = read_keys(run.folder / f"hostile-{role}.key")
        self.askers = [Requester(address, keys=keys, resend_s=1.0) for address in addresses]
        self.throwers = [Requester(address, keys=keys)._socket for address in addresses]
        self.dice = random.Random(role)
        self.counts: Counter[str] = Counter()
        self.known: dict[str, Any] = {}
        self.version = 0  # the newest one that it heard of

    def run(self) -> None:
        source = fuzzing.attacks(len(self.role), damaged=0.3, facts=lambda: self.known)
        while time.monotonic() < self.until:
            for _ in range(50):
                socket = self.dice.choice(self.throwers)
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(next(source) or [b""], zmq.NOBLOCK)
                    self.counts["frames"] += 1
                with contextlib.suppress(zmq.Again):
                    while True:
                        socket.recv_multipart(zmq.NOBLOCK)
            self._work()
            time.sleep(0.02)
        for one in self.askers:
            one.close()
        for one in self.throwers:
            one.close(0)

    def ask(self, message: wire.Message, payloads: tuple[bytes, ...] = ()) -> Any:
        try:
            packet = self.askers[0].request(message, payloads, timeout_s=60)
        except AsyncRLError as error:
            self.counts[f"refused: {error.code}"] += 1
            return None
        self.counts[type(message).__name__] += 1
        return packet.message

    def _work(self) -> None:
        name = self.dice.choice([f"{self.role}-0", f"guest-{self.dice.randrange(9)}"])
        if self.role == "producer":
            leases = self.ask(wire.LeaseRequest(name, self.version, 2, 0.2))
            self.version = leases.version if leases else self.version
            for lease in leases.leases if leases else ():
                self.known = {"producer": name, "group": lease.group, "token": lease.token}
                heads = tuple(wire.SampleHead(i, 3, "stop", ((leases.version, 3),)) for i in lease.missing)
                count = 3 * len(heads)
                arrays = {
                    "prompt": ("i4", [1, 2]),
                    "response": ("i4", [1] * count),
                    "logprobs": ("f4", [-1e38] * count),
                }
                fields, payload = pack(arrays)
                rewards = dict.fromkeys(lease.missing, 1000.0) if self.dice.random() < 0.5 else {}
                self.ask(
                    wire.Samples(name, lease.group, lease.token, heads, {}, fields, "{}", 2, rewards=rewards),
                    (payload,),
                )
        elif self.role == "reward":
            work = self.ask(wire.RewardRequest(name, 4, 0.0))
            for item in work.items if work else ():
                self.known = {"worker": name, "group": item.group, "token": item.token}
                score = wire.Score(item.group, item.index, item.token, self.dice.choice((1e308, float("nan"))))
                self.ask(wire.Scores(name, (score,)))


def pack(arrays: dict[str, tuple[str, list[Any]]]) -> tuple[Any, bytes]:
    import numpy as np

    return wire.pack_arrays({name: np.array(values, wire.DTYPES[kind]) for name, (kind, values) in arrays.items()})


def test_hostile_guests_change_nothing_that_a_replay_does_not_give(run: Any) -> None:
    write_keys(run.folder / "server.key")
    for role in GUESTS:
        add_key(run.folder / "server.key", role, f"hostile-{role}")
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    settings = [f"network.{name}={address}" for name, address in zip(("buffer", "weightsync"), addresses, strict=True)]
    settings += [f"network.key_file={run.folder / 'server.key'}", "learner.steps=100000", "log.archive=true"]
    settings += ["buffer.lease_timeout_s=5", "buffer.late_timeout_s=10", "log.sign=true"]
    words = [word for setting in settings for word in ("--set", setting)]
    main = run.start("launch", "all", str(run.config), *words)
    run.wait("step 1", lambda: 1 in run.steps())
    first, processes = max(run.steps()), {line["pid"] for line in run.living()}
    guests = [Guest(run, role, addresses, time.monotonic() + HOSTILE_S) for role in GUESTS]
    for guest in guests:
        guest.start()
    for guest in guests:
        guest.join(HOSTILE_S + 60)
        assert not guest.is_alive(), guest.role
    assert {line["pid"] for line in run.living()} == processes, run.logs()
    trained = max(run.steps())
    assert trained >= first + HOSTILE_S / 10, (first, trained, [guest.counts for guest in guests])
    counts = {guest.role: dict(guest.counts) for guest in guests}
    print(counts, f"steps {first} to {trained}")
    assert guests[0].counts["Samples"] > 0 and min(guest.counts["frames"] for guest in guests) > 500, counts
    run.wait("steps after all that", lambda: max(run.steps()) >= trained + 2)
    end(run, main)
    audit = run.audit()
    assert audit["exit"] == 0 and audit["signed"] == audit["drains"], audit
    for line in run.lines("metrics/learner.jsonl"):
        assert abs(line.get("reward_mean", 0.0)) <= 10.0, line
    done = run.command("replay", str(run.dir), "--json", timeout=HOSTILE_S + 300)
    found = msgspec.json.decode(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0 and found["equal"] == found["checked"] > 0, (found, done.stderr)
