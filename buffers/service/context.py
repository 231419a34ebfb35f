"""What the request handlers of the buffer service share: the state machine, the payload files, the queued answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from asyncrl import wire
from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, HandshakeError
from asyncrl.metrics.length_bias import LengthWatch
from asyncrl.net.peers import Peers
from asyncrl.net.responder import Call
from asyncrl.runtime.model_folder import model_fingerprint
from asyncrl.wire import Buffer, Message
from buffers.evaluation.evaluations import Evaluations
from buffers.groups.machine import GroupMachine
from buffers.payloads.dead_letters import DeadLetters
from buffers.payloads.segments import Segments
from buffers.service.polls import Poll

MAX_WAIT_S = 30.0
FINGERPRINT_CHARS = 200  # of what a guest says; a real one has 32
MOST_UNCHECKED = 4096  # names that are remembered until the model of the run is known


def _read_fingerprint(config: Config) -> str:
    """The fingerprint of the run's model; empty if its folder is not on this host."""
    try:
        return model_fingerprint(config.model.path, dtype=config.model.dtype)
    except (AsyncRLError, OSError):
        return ""


class Context:
    """Shared state of the request handlers. An answer is queued here and leaves with the flush of its drain."""

    def __init__(
        self,
        config: Config,
        *,
        machine: GroupMachine,
        evaluations: Evaluations,
        segments: Segments,
        dead_letters: DeadLetters,
    ) -> None:
        self.config = config
        self.machine = machine
        self.evaluations = evaluations
        self.segments = segments
        self.dead_letters = dead_letters
        self.peers = Peers(silent_s=config.buffer.lease_timeout_s, log_every_s=config.log.heartbeat_s / 2)
        self.counters: Counter[str] = Counter()
        self.bad_frames = 0
        self.lengths = LengthWatch()  # running means of the length-bias alarm
        self.stop_reason = ""
        # A complete run that is started again with more steps: workers may ask before the learner has registered.
        self.continues = machine.table.meta.done and machine.table.meta.version < config.learner.steps
        self.polls_changed = True  # a poll was added since the polls were last looked at
        self._answers: list[tuple[Call, Message, Sequence[Buffer]]] = []
        self._fingerprint = _read_fingerprint(config)
        self._unchecked: dict[str, str] = {}  # producer -> model that it runs, while that of the run is unknown

    @property
    def now(self) -> float:
        """The time of this drain."""
        return self.machine.tx.now

    def poll(self, call: Call, wait_s: float) -> Poll:
        """A poll for a request that waits for `wait_s`."""
        self.polls_changed = True
        return Poll(call, self.now + min(max(0.0, wait_s), MAX_WAIT_S))

    def answer(self, call: Call, message: Message, payloads: Sequence[Buffer] = ()) -> None:
        """Queue an answer."""
        self._answers.append((call, message, payloads))

    def refuse(self, call: Call, error: AsyncRLError) -> None:
        """Queue a refusal."""
        self.counters[f"refused:{error.code}"] += 1
        self.answer(call, wire.Refused(error.code, error.message, error.where))

    def send_answers(self) -> None:
        """Send every queued answer."""
        answers, self._answers = self._answers, []
        for call, message, payloads in answers:
            call.reply(message, payloads)

    def mark_answered(self, role: str, name: str, call: Call) -> None:
        """Copies of this request, and of those before it, get nothing new."""
        worker = self.machine.workers.get(role, name)
        if worker is not None:  # it may have been forgotten
            worker.answered = max(worker.answered, call.request)

    @property
    def ended(self) -> bool:
        """No more work will come: the run is complete, or the service stops."""
        return (self.machine.table.meta.done and not self.continues) or bool(self.stop_reason)

    @property
    def end_reason(self) -> str:
        """Why no more work will come."""
        return f"the buffer stops: {self.stop_reason}" if self.stop_reason else "the run is complete"

    def check_fingerprint(self, name: str, fingerprint: str, *, leads: bool = False) -> None:
        """All processes run the model of the configuration. Raises `handshake.mismatch`.

        If the model's folder is not on this host, the learner says which it is (`leads`). Until then nothing is
        trained, and a producer of another model is refused at its first request after that.
        """
        if not fingerprint:
            return
        if leads and not self._fingerprint:
            self._fingerprint = fingerprint
        if not leads and not self._fingerprint:
            self._unchecked[name] = fingerprint[:FINGERPRINT_CHARS]
            if len(self._unchecked) > MOST_UNCHECKED:
                del self._unchecked[next(iter(self._unchecked))]
        elif fingerprint != self._fingerprint:
            raise HandshakeError(
                "handshake.mismatch", f"{name} runs model {fingerprint}, the run has {self._fingerprint}"
            )
        else:
            self._unchecked.pop(name, None)

    def check_early(self, name: str) -> None:
        """Check what a producer said before the model of the run was known. Raises `handshake.mismatch`."""
        if self._fingerprint and name in self._unchecked:
            self.check_fingerprint(name, self._unchecked[name])
