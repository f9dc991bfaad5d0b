"""The process of a child: `python -m streamrl.producers.children DOWN UP ALIVE`, three inherited descriptors."""

from __future__ import annotations

import os
import signal
import sys


def guard(down: int, up: int, alive: int) -> None:
    """Fork a process that kills this one's whole group once the worker is gone, however it went; the group dies with it.

    prctl(PR_SET_PDEATHSIG) would reach this process alone, and not what user code has started.
    """
    if os.fork():
        os.close(alive)
        return
    # Nothing of the child's may stay open here: the worker would not see it end.
    for descriptor in (0, 1, 2, down, up):
        os.close(descriptor)
    os.read(alive, 1)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Guard the group first, while this process is small and has one thread; then load what runs user code."""
    down, up, alive = map(int, sys.argv[1:4])
    guard(down, up, alive)
    sys.argv = sys.argv[:1]
    from streamrl.producers.children.host import run

    run(down, up)


if __name__ == "__main__":
    main()
