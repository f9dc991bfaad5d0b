"""`python -m benchmarks` in a clone: the same as `streamrl bench`."""

from __future__ import annotations

import sys

from streamrl.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
