"""F18: messages arrive twice and out of order. F19: frames arrive damaged. F20: frames are too large.

Against the real service on a real socket: what is damaged is refused and counted, what is known is acknowledged, a peer
that sends nonsense harms nobody else.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from plant import Plant

from asyncrl import wire
from asyncrl.engine import GenDelta
from asyncrl.errors import WireError
from asyncrl.net.requester import Requester
from buffers.client.producer import ProducerClient

pytestmark = pytest.mark.timeout(300)


def start_buffer(folder: Path, *extra: str) -> Plant:
    plant = Plant(folder, extra=("learner.steps=1000", *extra))
    plant.start("buffer")
    plant.status(60)
    return plant


def sample_of(group: int, index: int) -> GenDelta:
    rng = np.random.default_rng([group, index])
    length = int(rng.integers(2, 9))
    tokens = rng.integers(3, 12, length).astype(np.int32)
    return GenDelta("", index, tokens, -rng.random(length).astype(np.float32), ((0, length),), "stop")


def frames_of(lease: wire.Lease, name: str, request: int) -> list[bytes]:
    """One whole group in one message, as a producer sends it."""
    samples = [sample_of(lease.group, index) for index in lease.missing]
    fields, payload = wire.pack_arrays(
        {
            "prompt": np.array([3, 4], np.int32),
            "response": np.concatenate([item.token_ids for item in samples]),
            "logprobs": np.concatenate([item.logprobs for item in samples]),
        }
    )
    heads = tuple(wire.SampleHead(item.index, len(item.token_ids), "stop", item.runs) for item in samples)
    message = wire.Samples(
        name,
        lease.group,
        lease.token,
        heads,
        {0: "start"},
        fields,
        "{}",
        2,
        rewards=dict.fromkeys(lease.missing, 0.5),
    )
    return [bytes(part) for part in wire.encode(message, [payload], request=request)]


class Raw:
    """A DEALER that sends whatever it is told."""

    def __init__(self, port: int) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def answers(self, wanted: int, timeout_s: float = 15.0) -> list[wire.Packet]:
        found = []
        while len(found) < wanted and self.socket.poll(int(timeout_s * 1000)):
            found.append(wire.decode(self.socket.recv_multipart()))
        return found


async def lease(plant: Plant, name: str, groups: int) -> tuple[wire.Lease, ...]:
    client = ProducerClient(f"tcp://127.0.0.1:{plant.port}", name=name, timeout_s=60)
    await client.hello()
    found = await client.lease(engine_version=0, max_groups=groups, wait_s=2.0)
    client.close()
    return found.leases


def test_f18_doubled_and_out_of_order(tmp_path: Path, figure: Any) -> None:
    """Every message of 40 groups two to five times, all of them shuffled: each group is taken once."""
    rng = random.Random(18)
    with start_buffer(tmp_path, "buffer.lease_timeout_s=60") as plant:
        leases = asyncio.run(lease(plant, "p", 40))
        assert len(leases) == 40
        messages = [frames_of(one, "p", number + 100) for number, one in enumerate(leases)]
        sent = [message for message in messages for _ in range(rng.randint(2, 5))]
        rng.shuffle(sent)
        raw = Raw(plant.port)
        for message in sent:
            raw.send(message)
        replies = [packet.message for packet in raw.answers(len(sent))]
        assert len(replies) == len(sent) and all(isinstance(reply, wire.SamplesReply) for reply in replies)
        assert sum(bool(reply.accepted) for reply in replies) == 40
        assert sum(bool(reply.duplicate) for reply in replies) == len(sent) - 40
        status = plant.status()
        assert status["ledger"]["ready"] == 40 and status["counters"]["duplicates"] == 2 * (len(sent) - 40)
        taken = [(line["g"], line["i"]) for line in plant.history("sample")]
        assert len(taken) == len(set(taken)) == 80
        figure(f"{len(sent)} messages of 40 groups: 40 taken, {len(sent) - 40} acknowledged as known")


def test_f19_bit_flips_at_every_byte(tmp_path: Path, figure: Any) -> None:
    """One bit of every byte of prefix, header and payload, 200 frames and more: refused or dropped, never believed."""
    rng = random.Random(19)
    with start_buffer(tmp_path, "buffer.lease_timeout_s=60") as plant:
        leases = asyncio.run(lease(plant, "p", 2))
        whole = frames_of(leases[0], "p", 7)
        raw = Raw(plant.port)
        answered: Counter[str] = Counter()
        sent = 0
        for part in range(3):
            for at in range(len(whole[part])):
                frames = [bytearray(frame) for frame in whole]
                frames[part][at] ^= 1 << rng.randrange(8)
                damaged = [bytes(frame) for frame in frames]
                with pytest.raises(WireError):
                    wire.decode(damaged)
                raw.send(damaged)
                sent += 1
        assert sent > 200
        while packets := raw.answers(1, 1.0):
            assert isinstance(packets[0].message, wire.Refused), packets[0].message
            answered[packets[0].message.code] += 1
        assert set(answered) <= {"wire.prefix", "wire.schema", "wire.size", "wire.checksum"}
        plant.wait("the count", lambda: plant.status()["counters"]["bad_frames"] == sent)
        assert plant.status()["ledger"]["ready"] == 0 and not plant.history("sample")
        raw.send(whole)  # the same socket, the same message, whole
        assert raw.answers(1)[0].message.accepted == leases[0].missing
        assert plant.roles["buffer"].alive() and not plant.roles["buffer"].codes
        figure(
            f"{sent} damaged messages: {sum(answered.values())} refused ({dict(answered)}), the rest dropped; 0 taken"
        )


def test_f19_a_damaged_length_costs_its_connection(tmp_path: Path, figure: Any) -> None:
    """Every bit of the flags and the length of a frame: all that follows is misread, until the asker begins anew."""
    with start_buffer(tmp_path) as plant:
        asked: dict[tuple[int, int], float] = {}

        def ask(place: tuple[int, int]) -> None:
            link = plant.proxies.link(plant.port)
            client = Requester(link.address, resend_s=0.5)
            client.request(wire.StatusRequest(), timeout_s=60)
            link.next_flip = place
            started = time.monotonic()
            for _ in range(3):
                client.request(wire.StatusRequest(), timeout_s=60)
            asked[place] = time.monotonic() - started
            client.close()

        with ThreadPoolExecutor(16) as threads:
            list(threads.map(ask, [(byte, bit) for byte in range(2) for bit in range(8)]))
        assert len(asked) == 16 and not plant.roles["buffer"].codes
        figure(f"16 damaged flags and lengths: answered again after {max(asked.values()):.1f} s at most")


def test_f19_a_run_behind_lines_that_flip_bits(tmp_path: Path) -> None:
    """Messages are damaged, their framing too, while the run goes on; no process ends by it."""
    with Plant(tmp_path, extra=("learner.steps=1000000",)) as plant:
        plant.start()
        plant.wait("a commit", plant.committed)
        links = [role.link for role in plant.roles.values() if role.link is not None]
        for link in links:
            link.flips = 0.1
        plant.wait("damage", lambda: sum(link.counts["flipped"] for link in links) >= 12)
        for link in links:
            link.heal()
        at = plant.committed()
        plant.wait("progress", lambda: plant.committed() > at + 2)
        assert not any(role.codes for role in plant.roles.values()), plant.tail()
        plant.finish()
        plant.assert_accounted()


def test_f20_too_large_and_declared_too_large(tmp_path: Path, figure: Any) -> None:
    """2 MiB against a limit of 1 MiB, and a frame that declares 2 ** 62 bytes: that connection ends, others do not."""
    with start_buffer(tmp_path, "network.max_message_bytes=1048576") as plant:
        leases = asyncio.run(lease(plant, "p", 2))
        good, bad = Raw(plant.port), Raw(plant.port)
        bad.send([frames_of(leases[0], "p", 1)[0], b"x", bytes(2 << 20)])
        with socket.create_connection(("127.0.0.1", plant.port), timeout=60) as bomb:
            greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
            bomb.sendall(greeting + b"\x06" + (2**62).to_bytes(8, "big") + bytes(100))
            bomb.settimeout(10)
            while True:
                try:
                    if not bomb.recv(4096):
                        break
                except ConnectionResetError:
                    break
        good.send(frames_of(leases[1], "p", 2))
        assert good.answers(1)[0].message.accepted == leases[1].missing
        assert not bad.answers(1, 0.5)
        bad.send(frames_of(leases[0], "p", 3))  # after its reconnection
        assert bad.answers(1)[0].message.accepted == leases[0].missing
        rss = int(Path(f"/proc/{plant.roles['buffer'].pid}/statm").read_text().split()[1]) * 4096
        assert rss < 400 << 20 and not plant.roles["buffer"].codes
        figure("2 MiB and a declared 2 ** 62 bytes: connections dropped, the same client works again")
