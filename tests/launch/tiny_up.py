"""`streamrl up` with workers that are `tiny_worker.py`: `tiny_up.py TOML MODE [--accept-gap|code|model ...] [SECTION.KEY=VALUE ...]`."""

import asyncio
import sys
from pathlib import Path

from streamrl.config.load import load
from streamrl.errors import StreamRLError
from streamrl.launch.local import LocalLauncher
from streamrl.launch.up import Consent, up
from streamrl.monitor.screen import PlainLines
from streamrl.runtime.rundir import RunDir
from tests.support.tiny import tiny_command


def main() -> int:
    toml, mode, *more = sys.argv[1:]
    config = load(toml, [text for text in more if not text.startswith("--")])
    consent = Consent(gap="--accept-gap" in more, code="--accept-code" in more, model="--accept-model" in more)
    run = RunDir(Path(config.run.dir) / config.run.name)
    launcher = LocalLauncher(run, config, command=tiny_command(run, mode))
    try:
        outcome = asyncio.run(up(config, PlainLines(), launcher=launcher, consent=consent))
    except StreamRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    outcome.print()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
