"""What tells the folder of a model from that of another, wherever they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

from streamrl.config.tree import Config

SETTINGS = ("config.json", "table.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".npz", ".npy")
BLOCK = 1 << 20
"""Bytes that are read at a time."""
BLOCKS = 16
"""A file of more is not read as a whole: its beginning, which has the header of safetensors, its end, and blocks evenly between them."""


def model_digests(config: Config) -> dict[str, str]:
    """By key, the SHA-256 (hex) of the folders that are there: settings, and names, sizes and sampled blocks of the weights' files."""
    loss = config.loss
    named = {
        "loss.kl.reference": loss.kl.reference,
        "loss.critic.path": loss.critic.path,
        "loss.distillation.teacher": loss.distillation.teacher,
    }
    return {key: _digest(Path(folder)) for key, folder in named.items() if folder and Path(folder).is_dir()}


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if not path.is_file() or (path.name not in SETTINGS and path.suffix not in WEIGHTS):
            continue
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        count = -(-size // BLOCK)
        places = range(count) if count <= BLOCKS else sorted({place * (count - 1) // (BLOCKS - 1) for place in range(BLOCKS)})
        with path.open("rb") as file:
            for place in places:
                file.seek(place * BLOCK)
                found.update(file.read(BLOCK))
    return found.hexdigest()
