"""The tables of what becomes of each field of a request to the gateway, from `streamrl.producers.gateway.fields`."""

from __future__ import annotations

import json

from streamrl.producers.gateway.fields import TABLES, Field


def fields_tables() -> str:
    """A table for each API; fields with the same decision share a row."""
    parts: list[str] = []
    for api, fields in TABLES.items():
        rows: dict[tuple[str, str], list[str]] = {}
        for name, field in fields.items():
            rows.setdefault((_verdict(field), field.note), []).append(f"`{name}`")
        lines = [f"| {', '.join(names)} | {verdict} | {note} |" for (verdict, note), names in rows.items()]
        title = f"`{api}`" if api.startswith("/") else api
        parts.append("\n".join([f"| {title} | | |", "|---|---|---|", *lines]))
    return "\n\n".join(parts)


def _verdict(field: Field) -> str:
    values = " or ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"refused, except {values}" if field.verdict == "refused" and values else field.verdict
