"""Tables that map slime's flags to keys, and correct spellings that none of its versions takes."""

from __future__ import annotations

from streamrl.bridges.slime.script.explain import row
from streamrl.bridges.slime.script.flags import ALIASES, FAMILIES, SECTIONS


def flag_tables() -> str:
    """A table for each section."""
    lines: list[str] = []
    for name, flags in SECTIONS.items():
        lines += [f"### {name}", "", "| flag | | becomes | slime's default | |", "|---|---|---|---|---|", *map(row, flags), ""]
    lines += ["### Families", "", "| begins with | |", "|---|---|", *(f"| `{begin}` | {says} |" for begin, says in FAMILIES.items()), ""]
    lines += ["### Other spellings", "", "| spelling | read as | |", "|---|---|---|"]
    lines += [f"| `{name}` | {f'`{alias.flag}`' if alias.flag else 'nothing'} | {alias.says} |" for name, alias in ALIASES.items()]
    return "\n".join(lines)
