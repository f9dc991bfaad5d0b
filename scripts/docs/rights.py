"""The table of what each role may do on the bus, from `streamrl/bus/permissions.py`."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.bus.address import API
from streamrl.bus.permissions import ROLES, allowed

RUN = "RUN"
"""Stands for the name of the run."""


def rights_table() -> str:
    """Every subject that a role's account imports."""
    rows = [
        "| role | stores under | asks JetStream's API (`$JS.API.` in front) | follows what is stored on |",
        "|---|---|---|---|",
    ]
    for role in ROLES:
        rights = allowed(role, RUN)
        asks = rights.asks + rights.batches
        stores = _code(subject for subject in asks if not subject.startswith(API))
        api = _code(subject.removeprefix(f"{API}.") for subject in asks if subject.startswith(API))
        follows = _code(subject.removeprefix("$STORED.").removesuffix(".>") for subject in rights.hears)
        rows.append(f"| {role} | {stores} | {api} | {follows} |")
    return "\n".join(rows)


def _code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "nothing"
