"""How many token ids a model has, by its description alone: for processes without torch."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.errors import ConfigError


def vocab_size(directory: Path) -> int:
    """Number of token ids of the model in `directory`; raises ConfigError when its description does not say."""
    for name, key in (("table.json", "vocab"), ("config.json", "vocab_size")):
        path = directory / name
        if path.is_file():
            described = json.loads(path.read_text(encoding="utf-8"))
            found = described.get(key) or described.get("text_config", {}).get(key)
            if isinstance(found, int):
                return found
    raise ConfigError(
        f"expected a config.json with a vocab_size in {directory}, got none", hint="is it a model directory?", path=str(directory)
    )
