"""Processes whose effect leaves the bus: the trainer (optimizer state) and the engine worker (served weights)."""
