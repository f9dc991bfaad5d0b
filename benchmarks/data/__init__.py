"""How soon a feeder issues its first task, and what that takes: `python -m benchmarks.data`.

```text
measure.py     the sets, the rounds, the table
first_task.py  one feeder in a process of its own, on a bus in the same process
```
"""
