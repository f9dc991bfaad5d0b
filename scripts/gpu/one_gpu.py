"""The parts of one_gpu.sh that are more than a command: a random model, what the GPU's memory is taken by, and the result.

```text
one_gpu.py model SHAPE DIR       a Hugging Face folder of that shape (benchmarks/shapes.py)
one_gpu.py memory FILE           until SIGTERM: the greatest use by worker, in MiB
one_gpu.py ballast GIB           until SIGTERM: leave that much of the first GPU free
one_gpu.py result RUN OUT PYTHON summary.json and page.txt from what the other parts have left in OUT
```
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
NAMES = {"worker trainer": "trainer", "sglang": "engine", "one_gpu.py ballast": "ballast"}
"""A process with this in its command line is called by this name."""


def write_model(name: str, directory: Path) -> None:
    """Random weights of that shape, and a tokenizer trained on GSM8K's rows, which has fewer tokens than the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.shapes import shape_of, write_model
    from streamrl.config.tree import DataConfig
    from streamrl.data.byte_pairs import training_texts, write_byte_pairs
    from streamrl.data.characters import END, SPECIALS

    shape = shape_of(name)
    write_model(shape, directory)
    rows = DataConfig(train=str(ROOT / "examples" / "gsm8k" / "train.parquet"))
    write_byte_pairs(directory, training_texts(rows), vocab_size=min(16_384, shape.vocab))
    end, pad = SPECIALS.index(END), SPECIALS.index("<|pad|>")
    config = AutoConfig.from_pretrained(directory, eos_token_id=end, pad_token_id=pad, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    model.save_pretrained(directory)
    print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters in {directory}")


def watch_memory(path: Path) -> None:
    """Ask nvidia-smi twice a second; write the peaks when told to end: of each GPU and the fullest, and by worker on all GPUs together."""
    peaks: dict[str, int] = {}
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    while not ended:
        of_gpus = [int(line) for line in _lines("--query-gpu=memory.used") if line.isdigit()]
        used = {"all": max(of_gpus, default=0), **{f"gpu {number}": mib for number, mib in enumerate(of_gpus)}}
        for line in _lines("--query-compute-apps=pid,used_memory"):
            pid, _, mib = (part.strip() for part in line.partition(","))
            name = _name(pid)
            used[name] = used.get(name, 0) + (int(mib) if mib.isdigit() else 0)
        peaks = {name: max(peaks.get(name, 0), used.get(name, 0)) for name in {*peaks, *used}}
        time.sleep(0.5)
    path.write_text(json.dumps(peaks))


def _name(pid: str) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "unknown"
    return next((name for part, name in NAMES.items() if part in command), "unknown")


def _lines(*query: str) -> list[str]:
    try:
        done = subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=False)
    except OSError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def hold_ballast(free_gib: float) -> None:
    """Take memory of the first GPU until `free_gib` of it is free, as on a smaller one."""
    import torch

    free, _ = torch.cuda.mem_get_info(0)
    torch.empty(1, device="cuda")
    held = [torch.empty(GIB // 4, dtype=torch.uint8, device="cuda") for _ in range(int(4 * (free / GIB - free_gib)))]
    print(f"ballast of {len(held) / 4:.1f} GiB, {torch.cuda.mem_get_info(0)[0] / GIB:.1f} GiB free", flush=True)
    signal.pause()


def write_result(run: Path, out: Path, python: str) -> int:
    """summary.json and page.txt; 1 where the run did not train, or its replay gives other digits."""
    totals, verified, memory, summary = (_read(path) for path in _inputs(run, out))
    gpus = _lines("--query-gpu=name")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpu": gpus[0] if gpus else "none",
        "versions": {"sglang": _sglang(python), **{name: metadata.version(name) for name in ("torch", "transformers")}},
        "steps": totals.get("batches", 0),
        "seconds_a_step": totals["seconds"] / totals["batches"] if totals else None,
        "sampled_tokens_per_s": totals.get("made_per_s"),
        "trained_tokens_per_s": totals.get("trained_per_s"),
        "memory_peak_mib": memory,
        "replay": {name: verified.get(name) for name in ("ok", "versions", "equal")},
        "totals": totals,
        "summary": summary,
    }
    (out / "summary.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "page.txt").write_text(_line(result) + "\n")
    print(_line(result))
    return 0 if totals and verified.get("ok") is True else 1


def _inputs(run: Path, out: Path) -> tuple[Path, ...]:
    return out / "totals.json", out / "verify.json", out / "memory.json", run / "summary.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _sglang(python: str) -> str:
    code = "from importlib.metadata import version; print(version('sglang'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _line(result: dict[str, Any]) -> str:
    """For docs/gpu.md."""
    if not result["steps"]:
        return "nothing was trained: see logs.tar.gz"
    versions, memory, replay, totals = result["versions"], result["memory_peak_mib"], result["replay"], result["totals"]
    peaks = ", ".join(f"{name} {memory[name] / 1024:.1f} GiB" for name in ("trainer", "engine", "all") if memory.get(name))
    return (
        f"{result['gpu']}, {result['date']}, SGLang {versions['sglang']}, torch {versions['torch']}: {result['steps']} steps of "
        f"{result['seconds_a_step']:.1f} s; the engine sampled {result['sampled_tokens_per_s']:,.0f} tokens/s "
        f"({totals['response_mean']:.0f} an answer), the trainer took {result['trained_tokens_per_s']:,.0f} tokens/s and waited "
        f"{totals['trainer_waits']:.0%} of the time; {totals['swaps']} changes of weights; memory at the peak: {peaks or 'not measured'}; "
        f"log-probs of trainer and engine apart by {totals['diff_mean']:.2g} in the mean; "
        f"`replay --verify`: {replay['equal']} of {replay['versions']} versions equal"
    )


def main() -> int:
    """See the module."""
    match sys.argv[1:]:
        case ["model", shape, directory]:
            write_model(shape, Path(directory))
        case ["memory", path]:
            watch_memory(Path(path))
        case ["ballast", free_gib]:
            hold_ballast(float(free_gib))
        case ["result", run, out, python]:
            return write_result(Path(run), Path(out), python)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
