"""A worker's log has a line per minute with its progress."""

from __future__ import annotations

from producers.support.progress_line import EVERY_S, ProgressLine


def test_a_line_per_minute() -> None:
    now, said = [0.0], list[str]()
    line = ProgressLine("samples", say=said.append, clock=lambda: now[0])
    for _ in range(13):
        now[0] += 10
        line.tick(int(now[0]) * 2, "version 3")
    assert EVERY_S == 60
    assert said == [
        "120 samples, 2 per second in the last 60 s; version 3",
        "240 samples, 2 per second in the last 60 s; version 3",
    ]
