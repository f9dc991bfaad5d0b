"""The section `page`."""

from __future__ import annotations

from streamrl.config.bounds import Port, Section


class PageConfig(Section, frozen=True, kw_only=True):
    """The page that `up` serves beside a run (docs/page.md)."""

    enabled: bool = True
    """Serve it; `streamrl page RUN` does so without."""
    port: Port = 0
    """Port on 127.0.0.1; 0: the one it had before, or any free one."""
