"""What becomes of one flag of slime, in words."""

from __future__ import annotations

from streamrl.bridges.slime.script.flag import Flag, canonical
from streamrl.bridges.slime.script.flags import ALIASES, find, nearest
from streamrl.errors import ConfigError

FATES = {
    "mapped": "mapped",
    "approximated": "approximated",
    "nothing": "nothing to set",
    "refused": "refused",
}


def explain(name: str) -> str:
    """A few lines: the flag's fate, keys, default, and what to do instead of one that is refused.

    Raises:
        ConfigError: nobody knows the flag; the nearest one is in the hint.
    """
    flag = find(canonical(name.partition("=")[0].lstrip("-")))
    if flag is None:
        close = nearest(canonical(name))
        hint = f"did you mean {close}?" if close else "docs/import-slime.md has all flags"
        raise ConfigError(f"expected a flag of slime, got {name!r}", hint=hint, flag=name)
    lines = [f"{flag.name}: {FATES[flag.fate]}"]
    if flag.keys:
        lines[0] += f" to {', '.join(flag.keys)}"
    if flag.says:
        lines.append(f"  {flag.says}")
    if (alias := ALIASES.get(flag.name)) and alias.flag:
        lines += [f"  {line}" for line in explain(alias.flag).split("\n")]
    if flag.default is not None:
        lines.append(f"  default of slime: {flag.default}")
    if flag.nearest:
        lines.append(f"  nearest: {flag.nearest}")
    return "\n".join(lines)


def row(flag: Flag) -> str:
    """The flag as a row of the table in docs/import-slime.md."""
    becomes = ", ".join(f"`{key}`" for key in flag.keys) or "-"
    says = "; ".join(filter(None, (flag.says, f"nearest: {flag.nearest}" if flag.nearest else "")))
    default = "" if flag.default is None else f"`{flag.default}`"
    return f"| `{flag.name}` | {FATES[flag.fate]} | {becomes} | {default} | {says} |"
