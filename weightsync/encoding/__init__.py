"""Encodings of a version: whole weights, the hops of a delta chain, a LoRA adapter. Digests cover the decoded bytes."""

FULL = "full"
DELTA = "delta"
ADAPTER = "adapter"
