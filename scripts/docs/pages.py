"""Which pages are made from the code, and how: all of a page, or what stands between two marks of one that people write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from scripts.docs.configuration import configuration_page
from scripts.docs.error_page import errors_page
from scripts.docs.gateway_fields import fields_tables
from scripts.docs.grafana import grafana_dashboard
from scripts.docs.loop_picture import loop_picture
from scripts.docs.metrics import metrics_table
from scripts.docs.registry import registry_tables
from scripts.docs.rights import rights_table
from scripts.docs.slime_flags import flag_tables
from scripts.docs.slime_hooks import hooks_table, names_table, refused_table
from scripts.docs.slime_metrics import slime_table

WHOLE: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "docs/configuration.md": configuration_page,
        "docs/errors.md": errors_page,
        "docs/grafana.json": grafana_dashboard,
        "docs/pictures/loop.svg": loop_picture,
    }
)
PARTS: Mapping[tuple[str, str], Callable[[], str]] = MappingProxyType(
    {
        ("docs/metrics.md", "metrics"): metrics_table,
        ("docs/metrics.md", "slime"): slime_table,
        ("docs/slime-hooks.md", "hooks"): hooks_table,
        ("docs/slime-hooks.md", "refused"): refused_table,
        ("docs/slime-hooks.md", "names"): names_table,
        ("docs/algorithms.md", "registry"): registry_tables,
        ("docs/gateway.md", "fields"): fields_tables,
        ("docs/import-slime.md", "flags"): flag_tables,
        ("docs/security.md", "rights"): rights_table,
    }
)
"""Functions by page and by the name of its marks."""


def stale(root: Path) -> dict[str, str]:
    """Path and new text of every page below `root` that is not what the code gives."""
    fresh = {path: make() for path, make in WHOLE.items()}
    for (path, name), make in PARTS.items():
        fresh[path] = between(fresh.get(path) or (root / path).read_text(encoding="utf-8"), name, make(), where=path)
    return {path: text for path, text in fresh.items() if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text}


def between(text: str, name: str, new: str, *, where: str) -> str:
    """`text` with `new` between the marks called `name`; raises ValueError where a mark is not there exactly once."""
    begin, end = f"<!-- {name}: begin (written by make docs) -->", f"<!-- {name}: end -->"
    for mark in (begin, end):
        if text.count(mark) != 1:
            raise ValueError(f"expected the mark {mark!r} once in {where}, got it {text.count(mark)} times")
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{new.strip()}\n\n{end}{rest.partition(end)[2]}"
