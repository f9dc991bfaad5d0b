"""Where user code stands: the innermost frame of a stack, or of an error, that is neither streamrl's nor the standard library's."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType

import streamrl

_OWN = (f"{sysconfig.get_paths()['stdlib']}/", f"{Path(streamrl.__file__).parent}/")
_PACKAGES = "/site-packages/"


def place_of(frame: FrameType | None) -> str:
    """`file:line in function` of the innermost frame that is the user's; of an installed package's when none is; empty for neither."""
    found = _innermost((one.f_code, line) for one, line in walk_stack(frame)) if frame is not None else None
    return "" if found is None else f"{found[0].co_filename}:{found[1]} in {found[0].co_qualname}"


def line_of(error: BaseException) -> str:
    """`file.py:3` of the innermost line of the user's that an error has passed; empty: it has passed none."""
    found = _innermost((frame.f_code, line) for frame, line in reversed(list(walk_tb(error.__traceback__))))
    return "" if found is None else f"{Path(found[0].co_filename).name}:{found[1]}"


def _innermost(frames: Iterable[tuple[CodeType, int]]) -> tuple[CodeType, int] | None:
    """The first that is the user's, or of an installed package."""
    installed = None
    for code, line in frames:
        name = code.co_filename
        if name.startswith(_OWN[1]):
            continue  # ours, where streamrl is an installed package too
        if _PACKAGES in name:
            installed = installed or (code, line)
        elif not name.startswith(("<", *_OWN)):
            return code, line
    return installed
