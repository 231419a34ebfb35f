"""Transports of buckets: one interface (`base`), one file per transport, one contract test suite over all."""
