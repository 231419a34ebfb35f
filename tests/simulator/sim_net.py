"""Virtual time, processes and an unreliable network for the simulator.

A process runs tasks, which are generators: they yield a number (seconds to
sleep) or an `Ask` (a request to the buffer) and get its answer, or `Unavailable` thrown in. Guarantees:
1. all order comes from one heap and one `random.Random`: the same seed gives the same run;
2. a request is sent again until it is answered or its deadline passes, with the same number, as `asyncrl.net.requester`
   does;
3. messages are lost, doubled, flipped and delayed past later ones only while `World.faulty` says so, and each such
   fault is counted only where it changed what somebody saw;
4. a process that is paused (SIGSTOP) gets everything that was meant for it when it goes on; a killed one nothing.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import xxhash

from asyncrl import wire
from asyncrl.errors import AsyncRLError, Unavailable, WireError, error_for

RESEND_S = 1.0
LATENCY_S = 0.004
DRAIN = 16

Task = Generator[Any, Any, None]


class Clock:
    """The heap of what will happen."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        """Call `what` in `delay` seconds."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, what, args))

    def step(self) -> bool:
        """The next thing; False where there is none."""
        if not self._heap:
            return False
        self.now, _, what, args = heapq.heappop(self._heap)
        what(*args)
        return True


class Ask:
    """A request under way."""

    __slots__ = (
        "done",
        "frames",
        "meaning",
        "message",
        "number",
        "payloads",
        "process",
        "seen",
        "task",
        "until",
        "wait_s",
    )

    def __init__(self, message: wire.Message, payloads: tuple[Any, ...] = (), *, wait_s: float = 0.0) -> None:
        self.message = message
        self.meaning = message  # what it says in the end: of samples by place the samples
        self.payloads = payloads
        self.wait_s = wait_s
        self.until = 0.0
        self.number = 0
        self.done = False
        self.seen = 0  # the highest message of its process that the service had handled
        self.process: Any = None
        self.task: Any = None
        self.frames: Any = None


class SimCall:
    """What the service gets instead of `asyncrl.net.responder.Call`: the same attributes."""

    __slots__ = ("_ask", "_net", "checksum", "header", "holder", "message", "payloads", "peer", "received", "request")

    def __init__(self, net: Network, ask: Ask, packet: wire.Packet) -> None:
        self._net = net
        self._ask = ask
        self.holder = None
        self.peer = f"{ask.process.name}/{ask.process.pid}".encode()
        net.connected[self.peer] = ask.process
        self.request = packet.request
        self.message = packet.message
        self.payloads = packet.payloads
        self.header = packet.header
        self.checksum = packet.checksum
        self.received = net.clock.now

    def reply(self, message: wire.Message, payloads: Any = ()) -> None:
        """Send the answer."""
        self._net.answer(self._ask, message, tuple(payloads))

    def reaches(self, peer: bytes) -> bool:
        """Whether another peer is still connected."""
        return bool(self._net.connected[peer].alive)

    def refuse(self, error: AsyncRLError) -> None:
        """Answer with an error of the catalogue."""
        self.reply(wire.Refused(error.code, error.message, error.where))


class Process:
    """One process: its tasks, whether it lives, and what waits for it while it is stopped."""

    def __init__(self, net: Network, *, role: str, name: str, pid: int) -> None:
        self.net = net
        self.role, self.name, self.pid = role, name, pid
        self.alive = True
        self.paused = False
        self.number = 0
        self.handled = 0
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.on_exit: Callable[[Process, str], None] = lambda process, why: None

    def start(self, task: Task) -> None:
        """Run a task of this process."""
        self.net.clock.at(0.0, self._go, task, None)

    def kill(self) -> None:
        """SIGKILL: nothing of it happens any more."""
        self.alive = False
        self.backlog = []

    def resume(self) -> None:
        """SIGCONT: everything that waited happens now."""
        self.paused = False
        waiting, self.backlog = self.backlog, []
        for what, args in waiting:
            what(*args)

    def exit(self, why: str) -> None:
        """It ends by itself."""
        if self.alive:
            self.kill()
            self.on_exit(self, why)

    def _held(self, what: Callable[..., None], *args: Any) -> bool:
        if self.paused and self.alive:
            self.backlog.append((what, args))
        return self.paused or not self.alive

    def _go(self, task: Task, value: Any) -> None:
        if self._held(self._go, task, value):
            return
        try:
            want = task.throw(value) if isinstance(value, Exception) else task.send(value)
        except StopIteration:
            return
        except AsyncRLError as error:
            self.exit(error.code)
            return
        if isinstance(want, Ask):
            want.process, want.task = self, task
            self.number += 1
            want.number = self.number
            self.net.send(want)
        elif isinstance(want, float):
            self.net.clock.at(want, self._go, task, None)
        else:  # another task to run beside this one
            self.start(want)
            self.net.clock.at(0.0, self._go, task, None)

    def answered(self, ask: Ask, packet: wire.Packet) -> None:
        """An answer arrives."""
        if ask.done or self._held(self.answered, ask, packet):
            return
        ask.done = True
        message = packet.message
        if isinstance(message, wire.Refused):
            self._go(ask.task, error_for(message.code, message.message, where=message.where))
        else:
            self._go(ask.task, packet)

    def overdue(self, ask: Ask) -> None:
        """No answer yet: once more, or given up."""
        if ask.done or self._held(self.overdue, ask):
            return
        if self.net.clock.now >= ask.until:
            ask.done = True
            self._go(ask.task, Unavailable("net.unreachable", f"no answer to {type(ask.message).__name__}"))
        else:
            self.net.transmit(ask)


class Network:
    """Carries requests to the service of the moment and answers back. `rates`: chance of each message fault."""

    def __init__(self, clock: Clock, rng: random.Random, *, rates: dict[str, float], encoded: float) -> None:
        self.clock = clock
        self.rng = rng
        self.rates = rates
        self.encoded = encoded  # share of the messages that are really encoded and decoded
        self.faulty = True
        self.hits: Counter[str] = Counter()
        self.service: Any = None  # has `arrive(call)`; None while no service lives
        self.watch: Callable[[Ask, wire.Message], None] = lambda ask, message: None
        self.connected: dict[bytes, Any] = {}  # peer -> its process
        self.messages = 0
        self.note: Callable[[str], None] | None = None

    def send(self, ask: Ask) -> None:
        """A new request."""
        ask.until = self.clock.now + ask.wait_s + 20.0
        self.transmit(ask)

    def transmit(self, ask: Ask) -> None:
        """Put the request on the wire and set its timer."""
        clock = self.clock
        clock.at(ask.wait_s + RESEND_S, ask.process.overdue, ask)
        for delay, doubled in self._fates("request"):
            clock.at(delay, self._arrive, ask, doubled)

    def _fates(self, kind: str) -> list[tuple[float, str]]:
        """When its copies arrive; none where it is lost."""
        rng, rates = self.rng, self.rates
        delay = LATENCY_S * (1.0 + rng.random())
        if not self.faulty:
            return [(delay, "")]
        fate = rng.random()
        if fate < rates["lost"]:
            return [(delay, f"lost_{kind}")]
        fate -= rates["lost"]
        if fate < rates["doubled"] and kind == "request":
            return [(delay, ""), (delay + rng.choice((0.001, 0.3, 3.0)) * rng.random(), "doubled")]
        fate -= rates["doubled"]
        if fate < rates["delayed"]:
            return [(rng.choice((0.05, 0.5, 4.0)) * (0.2 + rng.random()), "")]
        fate -= rates["delayed"]
        if fate < rates["flipped"]:
            return [(delay, "flipped")]
        return [(delay, "")]

    def _arrive(self, ask: Ask, what: str) -> None:
        service = self.service
        if service is None:  # refused connections: the real socket queues; it is sent again
            return
        if what.startswith("lost"):
            self.hits[what] += 1
            return
        packet = self._packet(ask, flipped=what == "flipped")
        if packet is None:
            self.hits["flipped"] += 1
            return
        process = ask.process
        if what == "doubled":
            self.hits["doubled"] += 1
        elif process.handled > ask.number and ask.seen == 0:
            self.hits["overtaken"] += 1
        if not process.alive:
            self.hits["of_the_dead"] += 1
        elif ask.done and ask.seen == 0:
            self.hits["late"] += 1
        ask.seen = ask.number
        process.handled = max(process.handled, ask.number)
        self.messages += 1
        if self.note is not None:
            self.note(f"{process.name}/{process.pid} #{ask.number} {what} > {str(ask.message)[:150]}")
        service.arrive(SimCall(self, ask, packet))

    def _packet(self, ask: Ask, *, flipped: bool) -> wire.Packet | None:
        if flipped or (self.encoded and self.rng.random() < self.encoded):
            frames = wire.encode(ask.message, ask.payloads, request=ask.number)
            if flipped:
                place = self.rng.randrange(len(frames))
                data = bytearray(frames[place])
                data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
                frames[place] = bytes(data)
            try:
                return wire.decode(frames)
            except WireError:
                return None
        if ask.frames is None and ask.payloads:  # what the decoder would have found
            header = wire.encode_header(ask.message)
            ask.frames = (header, xxhash.xxh3_64_intdigest(header + ask.payloads[0]))
        header, checksum = ask.frames or (b"", 0)
        return wire.Packet(ask.message, ask.payloads, ask.number, wire.REQUEST, header, checksum)

    def answer(self, ask: Ask, message: wire.Message, payloads: tuple[Any, ...]) -> None:
        """An answer leaves the service."""
        if self.note is not None:
            self.note(f"    {ask.process.name}/{ask.process.pid} #{ask.number} < {str(message)[:150]}")
        self.watch(ask, message)
        packet = wire.Packet(message, payloads, ask.number, wire.REPLY)
        if self.encoded and self.rng.random() < self.encoded:
            packet = wire.decode(wire.encode(message, payloads, request=ask.number, kind=wire.REPLY))
        for delay, what in self._fates("answer"):
            if not what:
                self.clock.at(delay, ask.process.answered, ask, packet)
            elif ask.process.alive and not ask.done:
                self.hits["lost_answer"] += 1
