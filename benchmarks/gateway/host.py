"""The run of `bench gateway`, in a process of its own: `python -m benchmarks.gateway.host CONFIG.json`."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

from streamrl.config.load import from_json
from streamrl.launch.up import up
from streamrl.monitor.screen import PlainLines


def main() -> None:
    """Run it until it is told to stop."""
    path = Path(sys.argv[1])
    asyncio.run(up(from_json(path.read_text(encoding="utf-8"), where=str(path)), PlainLines(sys.stderr, every_s=math.inf)))


if __name__ == "__main__":
    main()
