"""Metrics: the catalogue of names, and the JSONL files with their values."""

from asyncrl.metrics.catalogue import CATALOGUE, NUMBERS, OPEN, SERIES, Metric, is_series
from asyncrl.metrics.log import (
    JsonTail,
    MetricsLog,
    Position,
    decode_line,
    drop_repeated_steps,
    iterate_lines,
    line_number,
    line_time,
    open_lines,
    read_lines,
    report_loss,
)

__all__ = [
    "CATALOGUE",
    "NUMBERS",
    "OPEN",
    "SERIES",
    "JsonTail",
    "Metric",
    "MetricsLog",
    "Position",
    "decode_line",
    "drop_repeated_steps",
    "is_series",
    "iterate_lines",
    "line_number",
    "line_time",
    "open_lines",
    "read_lines",
    "report_loss",
]
