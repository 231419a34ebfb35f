"""Ready-made tasks and data for demonstrations and tests; imports nothing heavy."""
