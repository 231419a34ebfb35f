"""The process of one online tracker: reads the run's metrics and sends them.

`asyncrl launch` starts it as `python -m learners.trackers.main --config RESOLVED.toml --name tracker-wandb`.

Guarantees:
1. it cannot slow, block or end the run: it reads files, has a low priority, and the launcher continues without it;
2. it may fall behind, fail or be killed: the rest is sent later, by this process or the next one
   (`RUN/trackers/NAME.json` stores the position). A step may be sent twice, but is never lost;
3. numbers that a working tracker refuses for `GIVE_UP_S` are left out, and their steps are reported;
4. its sign of life (`asyncrl status`) and log show what it waits for and how far it is behind;
5. on SIGTERM it sends the rest for at most `DRAIN_S`: the launcher kills it soon after.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.config.sections.tracker import secret_of, tracker_label
from asyncrl.errors import UNREADABLE, ConfigError
from asyncrl.metrics import Position
from asyncrl.plugins import Tracker, TrackerRun, find
from asyncrl.runtime import role
from asyncrl.runtime.liveness import Sign, Ticker
from asyncrl.runtime.metrics_tail import Following, Point
from asyncrl.runtime.run_dir import RunDir, write_atomic

PREFIX = "tracker-"
NICE = 10
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
GIVE_UP_S = 600.0
DRAIN_S = 7.0
SAY_EVERY_S = 60.0


class Tracking:
    """Sends a run's metrics to one tracker. `clock` counts seconds."""

    def __init__(
        self,
        following: Following,
        *,
        make: Callable[[], Tracker],
        name: str,
        state: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.following = following
        self.waits = ""
        self.handed_on = 0
        self.left_out = 0
        self._make = make
        self._name = name
        self._state = state
        self._say = say
        self._clock = clock
        self._tracker: Tracker | None = None
        self._queue: deque[Point] = deque()
        self._failing: tuple[float, float, float] | None = None  # start of the failure, next try, wait
        self._said = -SAY_EVERY_S

    def look(self) -> bool:
        """Send new metrics. Return whether nothing is left for now."""
        now = self._clock()
        if self._failing is not None and now < self._failing[1]:
            return False
        if not self._queue:
            self._queue.extend(self.following.poll())
        while self._queue:
            if not self._hand_on(self._queue[0]):
                return False
            self._queue.popleft()
        self.waits = ""
        self._keep()
        return not self.following.behind_bytes

    def _hand_on(self, point: Point) -> bool:
        self.waits = f"{self._name} to take step {point.step}"
        try:
            if self._tracker is None:
                self.waits = f"{self._name} to begin"
                self._tracker = self._make()
            self._tracker.log(point.values, step=point.step)
        except ConfigError:
            raise  # a missing package or unknown tracker: another try cannot help
        except Exception as error:  # foreign code and network: try again
            return self._schedule_retry(point, error)
        if self._failing is not None:
            self._say(f"{self._name} works again; {self.following.behind_bytes} bytes of metrics are still to be read")
        self._failing = None
        self.handed_on += 1
        return True

    def _schedule_retry(self, point: Point, error: Exception) -> bool:
        """Schedule another try. Return True if the point is given up."""
        now = self._clock()
        since, _, wait = self._failing or (now, now, FIRST_WAIT_S / 2)
        if self._tracker is not None and now - since >= GIVE_UP_S:
            self.left_out += 1
            self._say(f"error: step {point.step} is left out: {self._name} refused it for {now - since:.0f} s: {error}")
            self._failing = None
            return True
        wait = min(2 * wait, MAX_WAIT_S)
        self._failing = (since, now + wait, wait)
        self.waits = f"{self._name}, which fails since {now - since:.0f} s: {type(error).__name__}"
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            self._say(
                f"warning: {self._name} failed at step {point.step}: {type(error).__name__}: {error}; the run is "
                f"not affected, trying again in {wait:g} s"
            )
        return False

    def _keep(self) -> None:
        """Store the position. On a full disk steps may be sent twice."""
        try:
            write_atomic(self._state, msgspec.json.encode(self.following.positions))
        except OSError as error:
            self._say(f"warning: {self._state} cannot be written: {error.strerror}")

    def close(self) -> None:
        """Send the rest and end."""
        until = self._clock() + DRAIN_S
        self._failing = None
        while self._clock() < until and not self.look() and self._failing is None:
            pass
        if self._queue or self.following.behind_bytes:
            left = f"{len(self._queue)} steps and {self.following.behind_bytes} bytes of metrics"
            self._say(f"warning: {left} were not sent to {self._name}; the same command sends them")
        self.waits = f"{self._name} to end"
        if self._tracker is not None:
            try:
                self._tracker.close()
            except Exception as error:  # the run does not depend on it
                self._say(f"warning: {self._name} could not end in order: {type(error).__name__}: {error}")
        self.following.close()


def read_positions(path: Path) -> dict[str, Position]:
    """Return the positions of an earlier process; empty if there was none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Position])
    except (OSError, *UNREADABLE):
        return {}


def run_id(folder: Path) -> str:
    """Return the identity of this run folder at trackers, created once: a new folder is another run."""
    path = folder / "id"
    try:
        with path.open("x") as file:
            file.write(os.urandom(8).hex())
    except FileExistsError:
        for _ in range(20):  # another process is about to write it
            if text := path.read_text().strip():
                return text
            time.sleep(0.05)
    return path.read_text().strip()


def tracker_run(config: Config, name: str, folder: Path) -> TrackerRun:
    """Return the arguments of the tracker. Raises `config.type` if its secret cannot be read."""
    trackers = config.trackers
    try:
        secret = secret_of(trackers, name)
    except OSError as error:
        raise ConfigError("config.type", error.strerror or str(error), where=f"trackers.key_file.{name}") from None
    own = folder / tracker_label(name)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    return TrackerRun(
        project=trackers.project,
        name=config.run.name,
        id=run_id(folder),
        folder=own,
        config=msgspec.to_builtins(config),
        options=trackers.options.get(name, {}),
        secret=secret,
        offline=trackers.offline,
    )


def body(args: role.RoleArgs, config: Config, stop: role.Stop) -> None:
    os.nice(NICE)
    label = args.name.removeprefix(PREFIX)
    name = next((one for one in config.trackers.use if tracker_label(one) == label), label)
    run = RunDir(config.run_dir)
    folder = run.trackers
    folder.mkdir(mode=0o700, exist_ok=True)
    made: Any = find("asyncrl.trackers", name)  # an unknown name fails before anything is read
    given = tracker_run(config, name, folder)
    state = folder / f"{label}.json"
    tracking = Tracking(
        Following(run, positions=read_positions(state)),
        make=lambda: _make_tracker(made, given, name),
        name=name,
        state=state,
        say=lambda text: print(f"{args.name}: {text}", flush=True),
    )
    sign = Sign(run.alive, role="tracker", name=args.name)
    with Ticker(sign, every_s=config.log.heartbeat_s, waits=lambda: tracking.waits):
        while not stop.is_set():
            tracking.look()
            stop.wait(config.trackers.every_s)
        tracking.close()
    print(f"{args.name}: {tracking.handed_on} points handed on, {tracking.left_out} left out", flush=True)


def _make_tracker(make: Callable[[TrackerRun], Tracker], run: TrackerRun, name: str) -> Tracker:
    try:
        return make(run)
    except ImportError as error:
        remedy = f"pip install 'asyncrl[{name}]'"
        raise ConfigError("config.extra", str(error), where=f"trackers.use: {name}", remedy=remedy) from None


def main() -> int:
    return role.run("tracker", body)


if __name__ == "__main__":
    sys.exit(main())
