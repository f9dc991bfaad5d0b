"""`convert`: a model directory as Megatron's distributed checkpoint, and back; a GGUF file as a model directory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    convert = verbs.add_parser(
        "convert",
        help="a Hugging Face model directory as Megatron's distributed checkpoint, or back; a GGUF file as a model directory",
        description="The direction is that which SOURCE says. Megatron's file is the same for every mesh, so none is asked for.",
    )
    convert.add_argument("source", metavar="SOURCE", type=Path, help="model directory, Megatron's checkpoint (torch_dist), or a .gguf file")
    convert.add_argument("dest", metavar="DEST", type=Path, help="new directory")
    convert.add_argument(
        "--model", type=Path, metavar="DIR", help="to Hugging Face: config.json and tokenizer of the model; default: SOURCE/hf"
    )
    convert.add_argument("--json", action="store_true", help="print JSON")
    convert.set_defaults(run_verb=run_convert)


def run_convert(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint."""
    if arguments.source.suffix == ".gguf":
        from streamrl.models.gguf import write_from_gguf

        to, (tensors, nbytes) = "hf", write_from_gguf(arguments.source, arguments.dest)
    else:
        from streamrl.models.megatron.convert import convert

        to, tensors, nbytes = convert(arguments.source, arguments.dest, arguments.model)
    if arguments.json:
        print(json.dumps({"to": to, "path": str(arguments.dest), "tensors": tensors, "bytes": nbytes}))
    else:
        kind = {"megatron": "Megatron's distributed checkpoint", "hf": "a Hugging Face model directory"}[to]
        print(f"converted {tensors} tensors ({nbytes:,} bytes) into {kind}: {arguments.dest}")
    return 0
