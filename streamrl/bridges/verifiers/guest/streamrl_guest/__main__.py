"""Says on the descriptor that was its standard output, a JSON object a line; what others print goes to the log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import traceback
from typing import Any


class Voice:
    """The way to streamrl, of any thread."""

    def __init__(self) -> None:
        self._file = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def say(self, **said: Any) -> None:
        """One line; ends the process when nobody hears it."""
        data = json.dumps(said).encode() + b"\n"
        try:
            with self._lock:
                while data:
                    data = data[os.write(self._file, data) :]
        except OSError:
            os._exit(0)


def main() -> None:
    """Do what the first line asks for; end, with all that was started, when the input does."""
    voice = Voice()
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_die_with_streamrl, daemon=True).start()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    try:
        from streamrl_guest.modes import run

        asyncio.run(run(spec, voice.say))
    except BaseException as error:
        traceback.print_exc()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        voice.say(error=f"{type(error).__name__}: {error}"[:2000])
        sys.exit(1)


def _die_with_streamrl() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
