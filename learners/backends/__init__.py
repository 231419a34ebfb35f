"""Training backends: `base` defines the interface, `asyncrl.plugins` finds them by name."""
