"""Turn GSM8K's files into the rows of this example.

Usage: python examples/gsm8k/prepare.py SOURCE [DIRECTORY]

SOURCE holds train.jsonl and test.jsonl of https://github.com/openai/grade-school-math (folder grade_school_math/data); DIRECTORY gets
train.parquet, test.parquet and short.jsonl. A row has `prompt` (the question), `label` (the worked solution, which ends in `#### 42`;
the calculator's notes `<<6*7=42>>` are taken out) and `answer` (the number as plain digits).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NUM_SHORT = 48
"""Rows of short.jsonl: those of train with the shortest solutions, for a model that fits a CPU."""


def row(line: str) -> dict[str, str]:
    """The row of one line of the source; raises ValueError when its answer does not end in a number."""
    source = json.loads(line)
    label = re.sub(r"<<[^<>]*>>", "", source["answer"]).strip()
    steps, mark, answer = label.rpartition("\n#### ")
    if not mark or not re.fullmatch(r"-?[\d,]+(\.\d+)?", answer):
        raise ValueError(f"expected a solution that ends in '#### number', got {label[-40:]!r}")
    return {"prompt": source["question"].strip(), "label": steps + mark + answer, "answer": answer.replace(",", "")}


def main(source: Path, directory: Path) -> None:
    for name in ("train", "test"):
        rows = [row(line) for line in (source / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        schema = pa.schema([(key, pa.string()) for key in ("prompt", "label", "answer")])
        pq.write_table(pa.Table.from_pylist(rows, schema), directory / f"{name}.parquet", compression="zstd", compression_level=19)
        if name == "train":
            short = sorted(rows, key=lambda each: (len(each["label"]) + len(each["prompt"]), each["prompt"]))[:NUM_SHORT]
            text = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in short)
            (directory / "short.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent)
