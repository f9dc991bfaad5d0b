"""`python -m benchmarks.data` in a clone."""

from __future__ import annotations

import sys

from benchmarks.data.measure import main

sys.exit(main(sys.argv[1:]))
