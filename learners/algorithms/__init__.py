"""Advantages, corrections, losses and aggregation as pure functions. `registry` finds them by their TOML name."""
