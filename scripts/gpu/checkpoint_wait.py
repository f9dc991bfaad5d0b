"""Measure what a checkpoint costs training: the optimizer's wait for the copy, and the time to save it in the background.

    python3 scripts/gpu/checkpoint_wait.py [--shape 4b] [--ranks 2 --shards 2] [--answers 1500] [--batch-tokens 98304] [--saves 3]

Random weights of the shape (benchmarks/shapes.py), equal batches: some steps without a checkpoint, then some each behind one. Prints a
table and writes checkpoint_wait.json to $OUT (default .). The disk (--place, default that of temporary files) must hold the model and a
checkpoint. `--shape tiny --device cpu` tries it out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.trainer.batch import at_step, make_batch
from benchmarks.trainer.contender import build_model
from benchmarks.trainer.spec import TrainerSpec, named_shape, our_config, resolved
from streamrl.schemas.versions import Version
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.trainer import COPY_WAIT


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=named_shape, default="4B")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    for name, default in (("ranks", 1), ("shards", 1), ("answers", 0), ("batch-tokens", 0), ("saves", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--place", type=Path)
    args = parser.parse_args()
    spec = resolved(
        TrainerSpec(
            shape=args.shape,
            device=args.device,
            ranks=args.ranks,
            answers=(args.answers,) if args.answers else (),
            batch_tokens=args.batch_tokens,
            rollouts=4,
            settings=(f"trainer.shards={args.shards}",),
        )
    )
    with tempfile.TemporaryDirectory(dir=args.place) as folder:
        rows = list[dict[str, Any]]()
        for row in measure(spec, Path(folder), args.saves):
            rows.append(row)
            print(json.dumps(row), flush=True)  # a run that is ended has told what it measured
    (Path(os.environ.get("OUT", ".")) / "checkpoint_wait.json").write_text(json.dumps({"args": vars(args) | {"place": ""}, "rows": rows}))
    names = list(rows[-1])
    print(" | ".join(names))
    for row in rows:
        print(" | ".join(f"{row[name]:.3g}" if isinstance(row.get(name), float) else str(row.get(name, "")) for name in names))


def measure(spec: TrainerSpec, folder: Path, saves: int) -> Iterator[dict[str, Any]]:
    """A row a step: seconds of the step, and behind a checkpoint those of the call, of the wait, and until it was complete."""
    build_model(spec, folder / "model")
    batch = make_batch(spec, spec.answers[0])
    with open_trainer(our_config(spec), folder / "model") as trainer:
        trainer.step(at_step(batch, 0))  # compiles
        for number in range(1, 1 + 2 * saves):
            row: dict[str, Any] = {"checkpoint": number > saves}
            began = time.perf_counter()
            if row["checkpoint"]:
                path = folder / f"at-{number}"
                saved = trainer.save(path, b"", version=Version(0, number))
                row["call_s"] = time.perf_counter() - began
                saved.add_done_callback(lambda _, row=row, began=began: row.update(complete_s=time.perf_counter() - began))
                stepped = time.perf_counter()
                result = trainer.step(at_step(batch, number))
                row |= {"step_s": time.perf_counter() - stepped, "wait_s": result.times.get(COPY_WAIT, 0.0)}
                saved.result()
                row["GB"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e9
                shutil.rmtree(path)
            else:
                trainer.step(at_step(batch, number))
                row["step_s"] = time.perf_counter() - began
            yield row


if __name__ == "__main__":
    main()
