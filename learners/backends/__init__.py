"""Training backends: `base` is what they promise, `fsdp2` the built-in one. `asyncrl.plugins` finds them by name."""
