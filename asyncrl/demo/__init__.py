"""The demonstration run and its tasks; imports nothing heavy."""
