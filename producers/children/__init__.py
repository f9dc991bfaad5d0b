"""User code in processes of its own: the worker keeps leases, deadlines, records and engines, its children only run what may hang or die.

```text
worker (parent)                                        child
jobs.py   a task: which child, what is left, judged    host.py      loads the user's code, runs its calls, threads for plain functions
pool.py   seats in children, the one clock             remote.py    `engine`, `checkpoint`: questions to the parent
child.py  one process: start, limits, kill             returned.py  episodes, with turns by number instead of what they say
calls.py  one call: turns recorded, time counted       watchdog.py  who holds the loop, with file and line
                       frames.py: what they say            output.py: what is printed and logged, limited
```
"""
