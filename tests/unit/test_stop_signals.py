"""Signals of launchers and roles: what asks for a stop, what belongs to it, and what ends a process at once."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest

from asyncrl.launcher.stop_signals import REPEAT_S, StopSignals, stop_signals
from asyncrl.runtime import role

HUP, INT, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("arrivals", "requests"),
    [
        ([(0.0, TERM)], [TERM]),
        ([(0.0, TERM), (0.01, TERM)], [TERM]),  # a service manager and a launcher above this one
        ([(0.0, HUP), (0.01, TERM)], [HUP]),  # a session that ends
        ([(0.0, HUP), (REPEAT_S + 1, HUP)], [HUP]),  # the shell's and the kernel's
        ([(0.0, INT), (0.01, INT)], [INT, INT]),
        ([(0.0, INT), (0.01, TERM), (REPEAT_S + 1, TERM)], [INT, TERM]),
    ],
)
def test_only_a_later_signal_asks_again(
    arrivals: list[tuple[float, signal.Signals]], requests: list[signal.Signals]
) -> None:
    now = [0.0]
    signals = StopSignals(clock=lambda: now[0])
    for at, number in arrivals:
        now[0] = 100.0 + at
        signals.note(number)
    assert signals.requests == requests


def test_a_hang_up_counts_unless_it_is_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_DFL)
    try:
        assert stop_signals() == [INT, TERM, HUP]
        signal.signal(HUP, signal.SIG_IGN)
        assert stop_signals() == [INT, TERM]
    finally:
        signal.signal(HUP, before)


def test_a_role_outlives_sigterm_that_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(faulthandler, "register", lambda *_, **__: None)
    before = {number: signal.getsignal(number) for number in (INT, TERM)}
    stop = role.Stop()
    try:
        role.install_signals(stop)
        for _ in range(3):
            os.kill(os.getpid(), TERM)
        assert stop.is_set() and stop.reason == "SIGTERM" and ends == []
        os.kill(os.getpid(), INT)
        assert ends == [130]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("reason", ["SIGTERM", ""])
def test_the_end_of_a_log_names_the_signal(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'[run]\ndir = "{tmp_path}"\n[model]\npath = "m"\n[data]\npath = "d"\n[[reward]]\nfunction = "x:y"\n'
    )
    for name in ("die_with_parent", "install_signals"):  # of this process
        monkeypatch.setattr(role, name, lambda *_: None)
    before = os.umask(0o077)
    try:
        assert role.run("producer", lambda _args, _config, stop: stop.set(reason), ["--config", str(config)]) == 0
    finally:
        os.umask(before)
    assert role.find_end_signal(capsys.readouterr().out.encode()) == reason
