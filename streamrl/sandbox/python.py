"""The interpreter of the programs: that of this process without its virtual environment, whose packages are on its path."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import cache

MAIN = "main.py"


@cache
def interpreter() -> str:
    """Its path. A virtual environment's own would read every .pth file of it at each start."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


@cache
def packages() -> tuple[str, ...]:
    """Directories of what is installed here."""
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys((paths["purelib"], paths["platlib"])))


@cache
def packages_and_library() -> tuple[str, ...]:
    """What an interpreter reads: its prefixes without what people keep beside them, and the packages."""
    prefixes = {sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.dirname(interpreter()))}
    named = [os.path.join(prefix, part) for prefix in prefixes for part in ("bin", "lib", "lib64")]
    found = {*named, *packages()}
    return tuple(sorted(found | {os.path.realpath(path) for path in found}))
