"""slime's hooks (THUDM/slime 624b824a): what each is here, or why it has no place."""

from __future__ import annotations

from streamrl.bridges.slime.flags import run_flags
from streamrl.bridges.slime.known import HOOKS, REFUSED
from streamrl.bridges.slime.modules import NAMES
from streamrl.config.tree import Config


def hooks_table() -> str:
    """Render the hooks that have a place here."""
    lines = ["| slime's flag | called as | becomes | differs |", "|---|---|---|---|"]
    for name, hook in HOOKS.items():
        signature = hook.signature.replace("|", "\\|")
        lines.append(f"| `--{name.replace('_', '-')}` | `{signature}` | `{hook.becomes}` | {hook.differs} |")
    return "\n".join(lines)


def refused_table() -> str:
    """Render the hooks that have none."""
    lines = ["| slime's flag | why not | nearest |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| `--{name.replace('_', '-')}` | {why} | {nearest} |" for name, (why, nearest) in REFUSED.items())])


def names_table() -> str:
    """Render the names that may be imported, and those that `args` has."""
    lines = ["| module | names |", "|---|---|"]
    lines += [f"| `{module}` | {', '.join(f'`{name}`' for name in names)} |" for module, names in NAMES.items()]
    flags = ", ".join(f"`{name}`" for name in run_flags(Config(), "") if not name.endswith("_path"))
    return "\n".join([*lines, "", f"`args` has {flags}, the paths of hooks, and what `custom_config` says."])
