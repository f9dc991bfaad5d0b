"""`python -m streamrl`."""

from __future__ import annotations

import sys

from streamrl.cli import main

if __name__ == "__main__":
    sys.exit(main())
