"""Tools that a policy may call: schemas, parsers of calls, and the tools that come with the library."""
