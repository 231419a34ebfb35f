"""Encoding `full`: a bucket on the way is the bytes of its tensors. The baseline that every receiver understands.

Called by the publisher (what to name in `Manifest.encoding`) and the receiver (which encodings it takes). An encoding
that changes bytes will get its own file here and a place in `ENCODINGS`; the digests stay those of the decoded bytes.
"""

NAME = "full"
ENCODINGS = frozenset({NAME})
