"""Encoding `full`: a bucket on the way is the bytes of its tensors. The baseline that every receiver understands.

The other encodings have files of their
own: `delta` is how the hops of a version are carried (its manifest stays that of the full weights), `adapter` is a
version of other tensors, `cast` comes before anything is planned. Digests are always of the decoded bytes.
"""

NAME = "full"
ENCODINGS = frozenset({NAME})
