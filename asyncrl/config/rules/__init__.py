"""Rules: contradictions between settings, and notes. Each rule states its arithmetic and the key to change."""

#: Code, message, path of the key.
Conflict = tuple[str, str, tuple[str, ...]]
