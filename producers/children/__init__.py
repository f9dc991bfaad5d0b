"""User code in processes of its own: the worker keeps leases, deadlines, records and engines, its children only run what may hang or die.

```text
worker (parent)                                        child
jobs.py   a task: which child, what is left, judged    host.py      loads the user's code, runs its calls, threads for plain functions
pool.py   seats in children                            remote.py    `engine`, `checkpoint`: questions to the parent
graders.py  the reward's calls; hung.py: which hang    main_thread.py  plain graders, which a signal ends
crew.py   processes, the one clock                     returned.py  episodes, with turns by number instead of what they say
child.py  one process: start, limits, kill             watchdog.py  who holds the loop, with file and line
calls.py  one call: turns recorded, time counted       output.py    what is printed and logged, limited
                                                       canary.py   tasks that nobody else cancels; calls that show whether all is well
cores.py  what a process has had of the machine's cores
                       frames.py: what they say
```
"""
