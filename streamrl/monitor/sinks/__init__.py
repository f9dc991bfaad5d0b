"""Where a run's rows go besides its metrics file.

Each sink is a process of its own, `python -m streamrl.monitor.sinks KIND --run DIR`, a reader of the bus
that folds rows as the supervisor does. Nothing waits for it.
"""
