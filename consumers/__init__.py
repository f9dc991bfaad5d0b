"""Processes whose effect leaves the bus: the trainer (optimizer state), the engine worker (served weights), replay."""
