"""Where the time of a group goes: the durable path in one thread, stage by stage, without sockets.

Alone: `python benchmarks/stages.py [--how place|frames]`. The same calls as in the
processes (client's packing, service, store, history, learner's reading), with the CPU time of each stage taken out of
the stage that calls it. What a group costs beyond the sum is sockets, event loops, wake-ups and cold caches.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from asyncrl import wire  # noqa: E402, RUF100
from asyncrl.allocator import keep_memory
from asyncrl.config import dump, parse  # noqa: E402, RUF100
from asyncrl.runtime.run_dir import RunDir
from asyncrl.wire import Packet  # noqa: E402, RUF100
from buffers import main as server
from buffers.client import learner as learner_client
from buffers.client.learner import LearnerClient
from buffers.client.place_reader import PlaceReader
from buffers.client.place_writer import PlaceWriter
from buffers.client.producer import ProducerClient
from buffers.service import service

STEPS_TO_CHECKPOINT = 4


class Clock:
    """CPU time of this thread by stage; a stage inside another is not counted twice."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self._open: list[list[Any]] = []  # [stage, since]

    def wrap(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its time counted under `stage`."""

        def timed(*args: Any, **named: Any) -> Any:
            self._switch()
            self._open.append([stage, time.thread_time_ns()])
            try:
                return call(*args, **named)
            finally:
                self._switch()
                self._open.pop()
                if self._open:
                    self._open[-1][1] = time.thread_time_ns()

        return timed

    def outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, its time counted nowhere but under the stages it opens itself."""
        return self.wrap("", call)

    def _switch(self) -> None:
        if self._open:
            now = time.thread_time_ns()
            stage, since = self._open[-1]
            self.spent[stage] += now - since
            self._open[-1][1] = now

    def patch(self, stage: str, owner: Any, name: str) -> None:
        """Count all calls of `owner.name` under `stage`."""
        setattr(owner, name, self.wrap(stage, getattr(owner, name)))


class Ask:
    """A call without a socket: keeps the answer."""

    numbers = itertools.count(1)

    def __init__(self, message: Any, payloads: Any = ()) -> None:
        frames = wire.encode(message, payloads, request=next(self.numbers))
        packet = wire.decode([bytes(frame) for frame in frames])
        self.message, self.payloads, self.header = packet.message, packet.payloads, packet.header
        self.request, self.checksum, self.received, self.peer = packet.request, packet.checksum, time.monotonic(), b"p"
        self.answer: Any = None
        self.holder = None

    def reply(self, message: Any, payloads: Any = ()) -> None:
        """Encode the answer, as the sockets do."""
        frames = wire.encode(message, payloads, request=self.request, kind=wire.REPLY)
        self.answer = wire.decode(frames)


def measure(toml: str, groups: list[Any], *, count: int, batch: int, row: Any, rewards: Any, how: str) -> Any:
    """Microseconds of CPU per group by stage."""
    keep_memory()
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = parse(toml.format(dir=f"{folder}/run", steps=count // batch))
        run = RunDir(config.run_dir).create()
        run.config.write_text(dump(config))
        store = server.open_store(config, lambda: False)
        serving = server.open_service(config, store)
        restore = _patch(clock, serving)
        try:
            _work(clock, serving, groups, steps=count // batch, batch=batch, row=row, rewards=rewards, how=how)
        finally:
            for owner, name, value in restore:
                setattr(owner, name, value)
            serving.close()
    return {stage: round(spent / 1000 / count, 1) for stage, spent in clock.spent.items() if stage}


def _patch(clock: Clock, serving: Any) -> list[tuple[Any, str, Any]]:
    kept = [(wire, name, getattr(wire, name)) for name in ("pack_parts", "validate_samples", "decode_samples")]
    kept += [(service, "lines_of", service.lines_of), (wire, "encode", wire.encode), (wire, "decode", wire.decode)]
    kept += [(learner_client, "decode_batch", learner_client.decode_batch)]
    machine = serving.machine
    for stage, owner, name in (
        ("producer: pack arrays", wire, "pack_parts"),
        ("validate", wire, "validate_samples"),
        ("decode header", wire, "decode_samples"),
        ("frames and checksums", wire, "encode"),
        ("frames and checksums", wire, "decode"),
        ("service: read and verify the place", serving.segments.guests, "read"),
        ("service: write the segment", serving.segments, "flush"),
        ("service: release", serving.segments, "release"),
        ("service: samples into the state machine", machine.intake, "take"),
        ("service: leases", machine, "lease"),
        ("service: claim, commit, retire", machine, "claim"),
        ("service: claim, commit, retire", machine, "commit"),
        ("service: claim, commit, retire", machine.batches, "checkpointed"),
        ("service: rows", machine, "take"),
        ("service: history lines", service, "lines_of"),
        ("service: history seal", serving.history, "seal"),
        ("service: store", serving.store, "apply"),
        ("service: history file", serving.history, "write"),
        ("service: running lengths", serving.context.lengths, "take"),
        ("service: drain, calls, answers", serving, "handle"),
        ("learner: arrays", learner_client, "decode_batch"),
    ):
        clock.patch(stage, owner, name)
    return kept


def _work(
    clock: Clock, serving: Any, groups: list[Any], *, steps: int, batch: int, row: Any, rewards: Any, how: str
) -> None:
    def ask(message: Any, payloads: Any = ()) -> Any:
        call: Any = clock.outside(Ask)(message, payloads)
        serving.handle([call])
        if isinstance(call.answer.message, wire.Refused):
            raise AssertionError(call.answer.message)
        return call.answer

    drain: list[Ask] = []
    producer, learner = ProducerClient.__new__(ProducerClient), LearnerClient.__new__(LearnerClient)
    producer.name, learner.name = "p", "l"
    welcome = ask(wire.Hello("producer", "p", 1, "h")).message
    producer._writer = PlaceWriter.open(welcome) if how == "place" else None
    if producer._writer is not None:
        clock.patch("producer: write the place", producer._writer, "write")
        producer.place_from = 0
    answer = wire.SamplesReply(())

    @clock.outside
    def keep(message: Any, payloads: Any) -> None:
        drain.append(Ask(message, payloads))

    async def note(message: Any, payloads: Any = (), *, wait_s: float = 0.0) -> Packet:
        keep(message, payloads)
        return Packet(answer)

    producer._ask = note  # type: ignore[method-assign]
    registered = ask(wire.Register("l", 1, "h", 0, "")).message
    reader = PlaceReader.open(registered)
    assert reader is not None
    clock.patch("learner: read and verify", reader, "fill")
    submit = clock.wrap("producer: message", lambda *given, **named: _finish(producer.submit(*given, **named)))
    for step in range(1, steps + 1):
        leases = ask(wire.LeaseRequest("p", step - 1, batch, 0.0)).message.leases
        for lease in leases:
            prompt, made = groups[lease.group % len(groups)]
            made = [msgspec.structs.replace(sample, runs=((step - 1, sample.token_ids.size),)) for sample in made]
            submit(lease, prompt_ids=prompt, samples=made, digests={}, row=row, rewards=rewards)
            if len(drain) == 16 or lease is leases[-1]:
                serving.handle(drain)
                assert all(len(call.answer.message.accepted) == 8 for call in drain), drain[0].answer.message
                drain.clear()
        found = ask(wire.Claim(registered.epoch, step, step - 1, 0.0, True)).message
        filled, payloads = reader.fill(found)
        assert len(learner_client.decode_batch(filled, payloads).groups) == batch
        ask(wire.Commit(registered.epoch, step, step))
        if step % STEPS_TO_CHECKPOINT == 0:
            ask(wire.Checkpointed(registered.epoch, step))
    reader.close()


def _finish(work: Any) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


def show(stages: dict[str, float], title: str) -> None:
    """Print the stages, dearest first."""
    print(f"{title}: {sum(stages.values()):.0f} us of CPU per group without sockets")
    for stage, spent in sorted(stages.items(), key=lambda item: -item[1]):
        print(f"  {spent:7.1f}  {stage}")


def main() -> None:
    """Measure and print."""
    import bench_buffer as bench

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--groups", type=int, default=3200)
    parser.add_argument("--size", choices=sorted(bench.SIZES), default="typical")
    parser.add_argument("--store", default="sqlite")
    parser.add_argument("--how", choices=["place", "frames"], default="place")
    args = parser.parse_args()
    show(bench.stages_of(args.size, args.groups, args.store, "everysec", args.how), f"{args.store}, by {args.how}")


if __name__ == "__main__":
    main()
