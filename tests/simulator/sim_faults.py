"""The faults of whole processes and of the store, and the plan that spreads them over a run.

Each fault is a function of the world that says whether it hit something. The faults of single
messages are those of `sim_net`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from sim_actors import Producer
from sim_learner import Learner
from sim_net import Ask, Process, Task

from asyncrl import wire

if TYPE_CHECKING:
    from sim_world import World


def _living(world: World, role: str) -> Process | None:
    names = [name for name, process in world.processes.items() if process.role == role and process.alive]
    return world.processes[world.rng.choice(names)] if names else None


def _kill(role: str) -> Callable[[World], bool]:
    def fault(world: World) -> bool:
        process = _living(world, role)
        if process is None:
            return False
        process.kill()
        world.ended(process, "killed")
        return True

    return fault


def _stop(role: str, longest: float) -> Callable[[World], bool]:
    """SIGSTOP, and SIGCONT later; while it stands still another one may take its name or its place."""

    def fault(world: World) -> bool:
        process = _living(world, role)
        if process is None or process.paused:
            return False
        process.paused = True
        world.clock.at(0.5 + world.rng.random() * longest, process.resume)
        return True

    return fault


def _zombie(role: str) -> Callable[[World], bool]:
    """It stands still, somebody starts it anew under its name, and then it goes on."""

    def fault(world: World) -> bool:
        process = _living(world, role)
        if process is None or process.paused:
            return False
        process.paused = True
        world.zombies.append(process)
        del world.processes[process.name]
        world.clock.at(world.restart_after(), world.start, role, process.name)
        wakes = 3.0 + world.rng.random() * 8.0
        world.clock.at(wakes, process.resume)
        world.clock.at(wakes + world.rng.random() * 4.0, process.kill)  # two of one name for ever is no fault to bear
        return True

    return fault


def _lose(role: str) -> Callable[[World], bool]:
    """A host is gone for good, with the process on it; the others of its role must do."""

    def fault(world: World) -> bool:
        living = [p for p in world.processes.values() if p.role == role and p.alive and not p.paused]
        if len(living) < 2 or role in world.lost_roles:
            return False
        world.lost_roles.add(role)
        world.rng.choice(living).kill()
        return True

    return fault


def tune(world: World) -> bool:
    """Somebody changes a setting of the running system."""
    if world.net.service is None:
        return False
    rng = world.rng
    eta = rng.randint(0, 3)
    changes = rng.choice(
        [
            {"max_staleness": eta, "pipeline_depth": rng.randint(0, eta)},
            {"on_late": rng.choice(["wait", "drop"])},
            {"batch_groups": rng.randint(1, 3)},
            {"late_timeout_s": 3.0},
            {"max_groups_in_flight": rng.randint(1, 3)},
        ]
    )
    if "max_staleness" in changes:
        world.bounds.add(eta)
    if "batch_groups" in changes:
        world.strict_places = False
    operator = Process(world.net, role="operator", name="o", pid=0)

    def life() -> Task:
        yield Ask(wire.Tune(msgspec.json.encode(changes).decode(), "simulator"))

    operator.start(life())
    return True


def zombie_learner(world: World) -> bool:
    """The learner stands still, another one takes over, and then the first goes on."""
    process = _living(world, "learner")
    if process is None or process.paused:
        return False
    process.paused = True
    world.zombies.append(process)
    del world.processes[process.name]
    rng = world.rng
    takeover = rng.random() < 0.6
    world.clock.at(0.2 + rng.random() * 2.0, lambda: world.start("learner", process.name, takeover=takeover))
    world.clock.at(1.0 + rng.random() * 14.0, process.resume)
    return True


def second_learner(world: World) -> bool:
    """Somebody starts another learner by mistake."""
    name = "l1" if world.processes.get("l0", None) is not None else "l0"
    if _living(world, "learner") is None or (name in world.processes and world.processes[name].alive):
        return False
    world.start("learner", name)
    return True


def takeover(world: World) -> bool:
    """Somebody starts another learner with --takeover while the first one runs."""
    first = _living(world, "learner")
    if first is None:
        return False
    name = "l1" if first.name == "l0" else "l0"
    if name in world.processes and world.processes[name].alive:
        return False
    world.start("learner", name, takeover=True)
    return True


def older_checkpoint(world: World) -> bool:
    """The learner is killed and its newest checkpoints are damaged: it starts from an older one."""
    process = _living(world, "learner")
    if process is None or not world.checkpoints:
        return False
    for step in sorted(world.checkpoints)[-world.rng.randint(1, 2) :]:
        del world.checkpoints[step]
    process.kill()
    world.ended(process, "killed")
    return True


def stop_learner(world: World) -> bool:
    """SIGTERM of the learner: it ends between two steps with a checkpoint."""
    process = _living(world, "learner")
    if process is None or not isinstance(actor := world.actors[process.name], Learner) or actor.process is not process:
        return False
    actor.stop = True
    return True


def stop_producer(world: World) -> bool:
    """SIGTERM of a producer: it gives its leases back."""
    process = _living(world, "producer")
    if process is None or not isinstance(actor := world.actors[process.name], Producer) or actor.process is not process:
        return False
    actor.stop = True
    return True


# ---------------------------------------------------------------- the service and the store


def kill_buffer(world: World) -> bool:
    """SIGKILL between two drains; what had arrived and was not handled is gone."""
    host = world.net.service
    if host is None:
        return False
    host.die("killed")
    return True


def _bomb(when: str) -> Callable[[World], bool]:
    """The next write of the store kills the service before or after it, or finds no store."""

    def fault(world: World) -> bool:
        if world.net.service is None or world.medium.bomb:
            return False
        world.medium.bomb = when
        return True

    return fault


def bomb_segments(world: World) -> bool:
    """The service is killed while it writes payloads."""
    if world.net.service is None or world.files.bomb:
        return False
    world.files.bomb = True
    return True


def stop_buffer(world: World) -> bool:
    """SIGSTOP and SIGCONT of the service."""
    host = world.net.service
    if host is None or host.paused:
        return False
    host.paused = True
    world.clock.at(0.5 + world.rng.random() * 6.0, host.resume)
    return True


def zombie_buffer(world: World) -> bool:
    """The service stands still, another one starts, and then the first goes on: the store must refuse it."""
    host = world.net.service
    if host is None or host.paused:
        return False
    host.paused = True
    world.net.service = None
    world.stopped_hosts.append(host)
    world.clock.at(0.5 + world.rng.random(), world.start_buffer)
    world.clock.at(2.0 + world.rng.random() * 4.0, host.resume)
    return True


def _no_service(world: World, why: str) -> bool:
    """Every service process ends, a stopped one too: nobody restores a file under a process that has it open."""
    for stopped in world.stopped_hosts:
        stopped.die(why)
    world.stopped_hosts.clear()
    if world.net.service is None:
        return False
    world.net.service.die(why)
    return True


def power_loss(world: World) -> bool:
    """The host of the service loses power: everything that was not synced may be gone."""
    medium = world.medium
    if not _no_service(world, "power"):
        return False
    lost = medium.back(world.rng.randint(medium.synced, len(medium.log)))
    if lost:
        world.check.forget()
    world.files.power_loss(world.rng.randint(0, len(world.files.unsynced)))
    return True


def roll_back(world: World) -> bool:
    """An older copy of the store's log is restored; under a running service where that is possible."""
    medium = world.medium
    if medium.flavour == "sqlite" or world.rng.random() < 0.5:
        if not _no_service(world, "killed for a restore"):
            return False
        world.check.forget()
    return medium.back(max(0, len(medium.log) - world.rng.randint(1, world.rng.choice((3, 12, 40)))))


def flush_all(world: World) -> bool:
    """The store loses everything; under a running service where that is possible."""
    if world.medium.flavour == "sqlite" or world.rng.random() < 0.5:
        if not _no_service(world, "killed, and its store is removed"):
            return False
        world.check.forget()
    return world.medium.flushall()


def bit_rot(world: World) -> bool:
    """A record of the segment files is damaged."""
    if not world.files.written:
        return False
    world.files.rot(world.rng.choice(list(world.files.written)))
    return True


def goodbye_of_a_stranger(world: World) -> bool:
    """A message that no process should send: an old learner epoch, out of the blue."""
    host = world.net.service
    if host is None or world.check.epoch < 1:
        return False
    stranger = Process(world.net, role="stranger", name="x", pid=0)

    def life() -> Task:
        yield Ask(
            world.rng.choice(
                [
                    wire.Goodbye(world.check.epoch - 1, True),
                    wire.Checkpointed(world.check.epoch - 1, world.steps),
                    wire.Commit(world.check.epoch - 1, world.check.committed + 1, world.check.committed + 1),
                ]
            )
        )

    stranger.start(life())
    return True


FAULTS: dict[str, Callable[[World], bool]] = {
    "kill_producer": _kill("producer"),
    "kill_reward": _kill("reward"),
    "kill_learner": _kill("learner"),
    "kill_buffer": kill_buffer,
    "kill_before_write": _bomb("before"),
    "kill_after_write": _bomb("after"),
    "store_outage": _bomb("outage"),
    "kill_in_segments": bomb_segments,
    "power_loss": power_loss,
    "roll_back": roll_back,
    "flush_all": flush_all,
    "bit_rot": bit_rot,
    "stop_producer": _stop("producer", 8.0),
    "stop_reward": _stop("reward", 8.0),
    "stop_learner": _stop("learner", 8.0),
    "stop_buffer": stop_buffer,
    "zombie_producer": _zombie("producer"),
    "zombie_reward": _zombie("reward"),
    "zombie_learner": zombie_learner,
    "zombie_buffer": zombie_buffer,
    "second_learner": second_learner,
    "takeover": takeover,
    "older_checkpoint": older_checkpoint,
    "term_learner": stop_learner,
    "term_producer": stop_producer,
    "stranger": goodbye_of_a_stranger,
    "lose_producer": _lose("producer"),
    "lose_reward": _lose("reward"),
    "tune": tune,
}


#: Messages behind which the windows lie in which the learner knows more than the buffer, or the other way round.
WINDOWS = (wire.Register, wire.Claim, wire.Commit, wire.Quarantine, wire.LedgerRequest, wire.Checkpointed)
IN_WINDOWS = (
    "roll_back",
    "flush_all",
    "power_loss",
    "kill_buffer",
    "kill_learner",
    "zombie_learner",
    "takeover",
    "older_checkpoint",
    "stop_learner",
    "kill_after_write",
    "kill_before_write",
)


def ambushes_of(world: World, number: int) -> dict[type[wire.Message], tuple[int, str]]:
    """Right after which message (the how manieth of its kind) which fault happens."""
    rng = world.rng
    return {rng.choice(WINDOWS): (rng.randint(1, world.steps), rng.choice(IN_WINDOWS)) for _ in range(number)}


def plan_of(world: World, *, faults: int, messages: int) -> list[tuple[int, str]]:
    """When (in handled messages) which fault happens, the last one first."""
    rng = world.rng
    kinds = list(FAULTS)
    return sorted(((rng.randint(3, messages), rng.choice(kinds)) for _ in range(faults)), reverse=True)
