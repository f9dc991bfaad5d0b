r"""Programs that nobody has looked at, such as a model's: run with limits, without network, apart from the host (docs/sandbox.md).

```python
from streamrl.sandbox import Limits, run_python

result = await run_python("print(6 * 7)", limits=Limits(seconds=2))
result.stdout, result.exit_code, result.reason      # "42\n", 0, "ok"
```

```text
sandbox.py   what is called: arguments checked, slots        server.py     forks a supervisor for each program
run.py       one program: its output, its end                supervise.py  starts, watches and ends it
handle.py    the server's start                              namespaces.py | confined.py   the isolation (isolation.py: the seam)
messages.py  what both sides say                             landlock.py seccomp.py kernel.py   what it asks of Linux
```
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence

from streamrl.sandbox.limits import Limits, Reason, Result
from streamrl.sandbox.sandbox import Sandbox

__all__ = ["Limits", "Reason", "Result", "Sandbox", "run", "run_python"]

_shared: dict[int, Sandbox] = {}
"""By process: what has been forked starts its own."""


def shared() -> Sandbox:
    """That of this process."""
    process = os.getpid()
    if process not in _shared:
        _shared[process] = Sandbox()
        atexit.register(_shared[process].close)
    return _shared[process]


async def run_python(
    code: str, *, stdin: str | bytes = "", files: Mapping[str, str | bytes] | None = None, limits: Limits | None = None
) -> Result:
    """`Sandbox.run_python` in the sandbox of this process."""
    return await shared().run_python(code, stdin=stdin, files=files, limits=limits)


async def run(
    argv: Sequence[str],
    *,
    stdin: str | bytes = "",
    files: Mapping[str, str | bytes] | None = None,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    readable: Sequence[str] = (),
) -> Result:
    """`Sandbox.run` in the sandbox of this process."""
    return await shared().run(argv, stdin=stdin, files=files, limits=limits, env=env, readable=readable)
