"""What `data.curriculum` may name."""

from __future__ import annotations

from streamrl.config.plugins import Form

CURRICULUM = Form(
    key="data.curriculum",
    what="curriculum",
    takes=("version", "sources"),
    hint="write `def name(version, sources)`, which returns a weight by source; see docs/data.md",
)
