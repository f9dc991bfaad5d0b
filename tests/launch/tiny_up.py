"""`streamrl up` with workers that are `tiny_worker.py`: `tiny_up.py TOML MODE [--accept-gap|code|model ...] [SECTION.KEY=VALUE ...]`.

With `--screen-fails=N` the display raises an error N times.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from streamrl.config.load import load
from streamrl.errors import StreamRLError
from streamrl.launch.local import LocalLauncher
from streamrl.launch.up import Consent, up
from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.screen import PlainLines
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir


class Failing(PlainLines):
    """A display that raises `times` times."""

    def __init__(self, times: int) -> None:
        super().__init__(every_s=0.0)
        self._times = times

    def show(self, numbers: RunNumbers, view: RunView | None = None) -> None:
        if self._times:
            self._times -= 1
            raise ValueError("no such colour")
        super().show(numbers, view)


def main() -> int:
    toml, mode, *more = sys.argv[1:]
    config = load(toml, [text for text in more if not text.startswith("--")])
    consent = Consent(gap="--accept-gap" in more, code="--accept-code" in more, model="--accept-model" in more)
    run = RunDir(Path(config.run.dir) / config.run.name)
    fails = [int(text.partition("=")[2]) for text in more if text.startswith("--screen-fails=")]
    display = Failing(*fails) if fails else PlainLines()
    worker = str(Path(__file__).with_name("tiny_worker.py"))

    def command(kind: str, index: int) -> Sequence[str]:
        return (sys.executable, worker, kind, str(run.path), mode)

    try:
        outcome = asyncio.run(up(config, display, launcher=LocalLauncher(run, config, command=command), consent=consent))
    except StreamRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    outcome.print()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
