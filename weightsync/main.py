"""The weight-sync service: sockets, held requests and the log around `weightsync.coordinator.rounds`.

Run as `python -m weightsync.main --config RESOLVED.toml`. Talks to one publisher (the learner), to the receivers of the
producers and to observers. Guarantees:
1. it holds nothing that others cannot send again: after a restart members poll with what they hold, and the publisher
   publishes its manifest again when it hears that the service does not know it;
2. a held poll or request is answered when there is something to do, or after its own `wait_s`;
3. one line per decided round in metrics/weightsync.jsonl: version, digest, bytes carried, and for every member its
   digest or the reason for none, transport, encoding and source; one for an error outside of a round;
4. one service per run: the second one is `service.duplicate`.
Weights never pass through it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, WireError
from asyncrl.metrics import MetricsLog
from asyncrl.net.keys import Keys
from asyncrl.net.peers import Peers
from asyncrl.net.responder import Call, Responder
from asyncrl.runtime import role
from asyncrl.runtime.failpoints import failpoint
from asyncrl.runtime.liveness import Sign
from asyncrl.runtime.run_dir import RunDir, endpoint, run_id
from asyncrl.wire import (
    Hello,
    Instruction,
    MemberPoll,
    Message,
    Ok,
    Publish,
    RoundReply,
    RoundRequest,
    StatusReply,
    StatusRequest,
    Stop,
    Welcome,
)
from weightsync.coordinator import status as reports
from weightsync.coordinator.records import Publisher
from weightsync.coordinator.rounds import Rounds

TICK_S = 0.05
#: Of hundreds of held requests a look takes long: the next one after a request comes after this multiple of its time,
#: or with the tick.
LONG_LOOK_S, REST = 0.005, 3.0
LONGEST_HOLD_S = 10.0
MOST_LOG_BYTES = 256 << 20  # of metrics/weightsync.jsonl: errors of guests stand in it


@dataclass
class HeldCall:
    """A request without an answer yet."""

    call: Call
    until: float


class Service:
    """Made and used on one event loop."""

    def __init__(self, config: Config, *, address: str, keys: Keys | None, key_file: Path | None = None) -> None:
        started_ms = time.time_ns() // 1_000_000
        self._run_id = run_id(config)
        self._epoch = started_ms
        self._rounds = Rounds(config.weightsync, generation=started_ms)
        self._peers = Peers(silent_s=config.weightsync.member_timeout_s)
        self._polls: dict[str, HeldCall] = {}
        self._questions: dict[bytes, HeldCall] = {}
        self._sessions = 0
        self._stop_asked = ""
        self._look_at = 0.0
        self._log = MetricsLog(RunDir(config.run_dir).metrics / "weightsync.jsonl", most_bytes=MOST_LOG_BYTES)
        self._mode = config.weightsync.transport
        self._sign = Sign(RunDir(config.run_dir).alive, role="weightsync", name="weightsync")
        self._sign_s = config.log.heartbeat_s
        self._responder = Responder(
            address,
            self._handle,
            keys=keys,
            max_bytes=config.network.max_message_bytes,
            insecure=config.network.insecure_no_auth,
            key_file=key_file,
        )
        self.address = self._responder.address

    async def run(self, stop: role.Stop) -> None:
        """Answer until the end is requested."""
        try:
            while not stop.is_set() and not self._stop_asked:
                await asyncio.sleep(TICK_S)
                self._sign.beat(every_s=self._sign_s)
                self._advance()
            if self._stop_asked:
                stop.set(self._stop_asked)
                for name in list(self._polls):
                    self._polls.pop(name).call.reply(Instruction("stop", detail=self._stop_asked))
                await asyncio.sleep(TICK_S)
        finally:
            self._sign.close()
            self._responder.close()
            self._log.close()

    def _handle(self, calls: list[Call]) -> None:
        for call in calls:
            try:
                answer = self._answer(call)
            except AsyncRLError as error:
                call.refuse(error)
            else:
                if answer is not None:
                    call.reply(answer)
        if time.monotonic() >= self._look_at:
            self._advance()

    def _answer(self, call: Call) -> Message | None:
        """The answer to one request; None if it is held."""
        message, now = call.message, time.monotonic()
        self._peers.admit(call, now)
        if isinstance(message, MemberPoll):
            return self._hold_poll(call, message, now)
        if isinstance(message, RoundRequest):
            reply = self._rounds.ask(message, now=now)
            if reply is None:
                self._questions[call.peer] = HeldCall(call, now + min(message.wait_s, LONGEST_HOLD_S))
            return reply
        if isinstance(message, Publish):
            published = self._rounds.publish(message, now=now)
            failpoint("weightsync.at_publish")
            return published
        if isinstance(message, Hello):
            return self._welcome(message)
        if isinstance(message, StatusRequest):
            status = reports.status(self._rounds, now=now) | {"transport": self._mode, **self._responder.counters}
            return StatusReply(msgspec.json.encode(status).decode())
        if isinstance(message, Stop):
            self._stop_asked = message.reason or "asked to stop"
            return Ok("stopping")
        raise WireError("wire.unexpected", f"{type(message).__name__} at the weight-sync service")

    def _welcome(self, message: Hello) -> Welcome:
        if message.role == "learner":
            self._rounds.hello(message.name, Publisher(message.host, message.fingerprint))
        self._sessions += 1
        return Welcome(self._run_id, self._epoch, self._sessions, self._rounds.state.committed)

    def _hold_poll(self, call: Call, message: MemberPoll, now: float) -> Instruction | None:
        if self._rounds.queries.is_late(message):
            return None  # a copy of an older poll: its answer is not needed
        earlier = self._polls.pop(message.member, None)
        if earlier is not None and earlier.call.request != call.request:
            earlier.call.reply(Instruction("wait"))
        instruction = self._rounds.poll(message, now=now)
        if instruction is None:
            self._polls[message.member] = HeldCall(call, now + min(message.wait_s, LONGEST_HOLD_S))
        return instruction

    def _advance(self) -> None:
        """Advance the time, then look again at every held request."""
        now = time.monotonic()
        self._rounds.tick(now=now)
        self._write_finished()  # before the answers: the log has every round that they name
        for peer, held in list(self._questions.items()):
            self._retry_question(peer, held, now)
        for name, held in list(self._polls.items()):
            instruction = self._rounds.instruct(name, now=now)
            if instruction is not None or now >= held.until:
                del self._polls[name]
                held.call.reply(instruction or reports.wait(self._rounds, name, now=now))
        self._write_finished()
        ended = time.monotonic()
        self._look_at = ended + REST * (ended - now) if ended - now > LONG_LOOK_S else 0.0

    def _write_finished(self) -> None:
        for round_, ended in self._rounds.state.finished:
            numbers, text = reports.round_line(round_, ended=ended)
            self._log.try_write(numbers, **text)
        self._rounds.state.finished.clear()
        for name, error in self._rounds.state.complaints:
            numbers, text = reports.complaint_line(self._rounds, name, error)
            self._log.try_write(numbers, **text)
        self._rounds.state.complaints.clear()

    def _retry_question(self, peer: bytes, held: HeldCall, now: float) -> None:
        message: RoundRequest = held.call.message
        try:
            reply: RoundReply | None = self._rounds.ask(message, now=now)
            if reply is None and now >= held.until:
                reply = self._rounds.ask(msgspec.structs.replace(message, seen=""), now=now)
        except AsyncRLError as error:
            del self._questions[peer]
            held.call.refuse(error)
            return
        if reply is not None:
            del self._questions[peer]
            held.call.reply(reply)


async def serve(
    config: Config, stop: role.Stop, *, address: str, keys: Keys | None, key_file: Path | None = None
) -> None:
    """Run one service to its end."""
    await Service(config, address=address, keys=keys, key_file=key_file).run(stop)


def body(args: role.RoleArgs, config: Config, stop: role.Stop) -> None:
    """Hold the run's lock and serve."""
    lock = RunDir(config.run_dir).lock("weightsync")
    try:
        address, keys = endpoint(config, "weightsync"), role.run_key(args, config)
        uvloop.run(serve(config, stop, address=address, keys=keys, key_file=role.key_file(args, config)))
    finally:
        lock.close()


def main() -> None:
    sys.exit(role.run("weightsync", body))


if __name__ == "__main__":
    main()
