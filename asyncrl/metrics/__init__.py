"""Metrics: the catalogue of names, and the JSONL files with their values."""

from asyncrl.metrics.catalogue import CATALOGUE, NUMBERS, OPEN, SERIES, Metric, is_series
from asyncrl.metrics.log import JsonTail, MetricsLog, Position, decoded, read_lines

__all__ = [
    "CATALOGUE",
    "NUMBERS",
    "OPEN",
    "SERIES",
    "JsonTail",
    "Metric",
    "MetricsLog",
    "Position",
    "decoded",
    "is_series",
    "read_lines",
]
