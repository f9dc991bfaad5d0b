"""What a guest can be asked for: a look at the taskset, its rows, or episodes for sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SERIES = "0.4"
"""Of verifiers."""
Say = Callable[..., None]


async def run(spec: Mapping[str, Any], say: Say) -> None:
    """Raises whatever the taskset does."""
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise RuntimeError(f"expected the package verifiers {SERIES}, there is none") from None
    if found.split(".")[:2] != SERIES.split("."):
        raise RuntimeError(f"expected verifiers {SERIES}, got {found}")
    if spec["mode"] != "serve":  # a call that is refused on purpose is no news
        logging.getLogger("verifiers").setLevel(logging.ERROR)
    # Only now: another version may not have what these import.
    from streamrl_guest import rows, sessions
    from streamrl_guest.setting import Setting

    setting = await asyncio.to_thread(Setting, spec)
    modes: dict[str, Callable[[Setting, Mapping[str, Any], Say], Awaitable[None]]] = {
        "check": check,
        "rows": rows.main,
        "serve": sessions.main,
    }
    await modes[spec["mode"]](setting, spec, say)


async def check(setting: Any, spec: Mapping[str, Any], say: Say) -> None:
    """The taskset loads, and its first task can be read."""
    task = next(iter(setting.tasks()), None)
    if task is None:
        raise ValueError("expected a taskset of at least one task, got none; look at producer.options.select")
    say(done=True, verifiers=version("verifiers"))
