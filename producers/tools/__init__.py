"""Tools for a policy: schemas, parsers of calls, and the built-in tools."""
