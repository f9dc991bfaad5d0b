"""One long sample on one GPU and on several that share its row: peak of a rank's activations, log-probs, gradient, seconds.

    python3 scripts/gpu/context.py [--shape 4b] [--tokens 65536] [--trained 4096] [--ranks 2] [--compile] [--out context.json]

Both ways run the same: random weights in bfloat16, every layer is run again in the backward pass (`trainer.activations = 0`), the last
`--trained` tokens are predicted. The second of two passes is measured: gradients are there by then, and nothing is compiled any more. The
activations are the peak of the allocated memory less what was allocated before the pass. Ends with 1 where a rank's are more than `--most`
of one GPU's, or log-probs or gradients are further apart than bfloat16 explains (`BOUNDS`). `--device cpu --shape tiny` tries it out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from streamrl.core.batches import TrainBatch
from streamrl.core.packing import plan_micro_batches
from streamrl.schemas.versions import Version
from streamrl.tensors.mesh import Mesh
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.parallel import Parallel

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
BOUNDS = {"logprobs_mean": 0.02, "gradient_norm": 0.02, "gradients": 0.05}
"""Mean distance of log-probs; relative distances of the whole gradient's norm, and of the gradients of the first and last layer."""


def sample(tokens: int, trained: int, vocab: int) -> TrainBatch:
    """One sample, whose last tokens are predicted."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocab, tokens).tolist()
    prompt, answer = ids[: tokens - trained], ids[tokens - trained :]
    return TrainBatch.from_lists(
        [prompt],
        [answer],
        loss_mask=[[True] * trained],
        sampler_logprobs=[[0.0] * trained],
        rewards=[0.0],
        tasks=[0],
        rollouts=[0],
        temperature=[1.0],
        top_p=[1.0],
        top_k=[-1],
        kind="rl",
        version=Version(),
        stage_step=0,
    )


def measure(options: argparse.Namespace, model_dir: Path, out: Path, rank: int, ranks: int) -> None:
    """Two passes on one rank; writes rank-<rank>.json, and rank 0 the log-probs and some gradients."""
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if ranks > 1:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks)
    parallel = Parallel(Mesh(replicate=ranks, context=ranks), device)
    kernels = Kernels(attention="packed", compile=options.compile, kept_layers=0)
    model = CausalLM(model_dir, torch.bfloat16 if cuda else torch.float32, device, kernels=kernels)
    model.cut(parallel, trained=True)
    batch = sample(options.tokens, options.trained, model.vocab_size)
    length = Mesh(context=options.ranks).whole(options.tokens)  # the same row both ways
    (micro,) = plan_micro_batches(batch, batch.loss_mask, np.arange(1), budget=length, row_length=length)
    slopes = torch.randn(options.trained, generator=torch.Generator().manual_seed(0)).to(device)
    found: dict[str, Any] = {}
    logprobs = torch.zeros(0)
    for _ in range(2):
        for _, parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            found["before"] = torch.cuda.memory_allocated()
        start_s = time.perf_counter()
        logprobs, _ = model.predict(micro, batch)
        (logprobs * slopes[: len(logprobs)]).sum().backward()
        if cuda:
            torch.cuda.synchronize()
            found["activations"] = torch.cuda.max_memory_allocated() - found["before"]
        found["seconds"] = time.perf_counter() - start_s
    square, kept = torch.zeros((), dtype=torch.float64), {}
    last = f".layers.{model.num_layers - 1}."
    for name, parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parallel.sum(parameter.grad.float())
        square += gradient.double().square().sum().cpu()
        if ".layers.0." in name or last in name:
            kept[name] = gradient.cpu()
    found["gradient_norm"] = float(square.sqrt())
    if rank == 0:
        torch.save({"logprobs": logprobs.detach().float().cpu(), "gradients": kept}, out / "values.pt")
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(options: argparse.Namespace, model_dir: Path, out: Path, ranks: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All ranks of one way; what each measured, and rank 0's values."""
    out.mkdir()
    given = ["--model", str(model_dir), "--work", str(out), "--of", str(ranks), *sys.argv[1:]]
    children = [subprocess.Popen([sys.executable, __file__, "--rank", str(rank), *given], cwd=ROOT) for rank in range(ranks)]
    try:
        # One that fails ends the others, which wait for it.
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            time.sleep(0.5)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    if any(child.returncode for child in children):
        raise SystemExit(f"{ranks} ranks ended with {[child.returncode for child in children]}")
    told = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return told, torch.load(out / "values.pt", weights_only=True)


def compare(options: argparse.Namespace, model_dir: Path, work: Path) -> dict[str, Any]:
    """Both ways, and how far they are apart."""
    (alone,), values = run(options, model_dir, work / "one", 1)
    shared, others = run(options, model_dir, work / "several", options.ranks)
    apart = (others["logprobs"] - values["logprobs"]).abs()
    gradients = {
        name: float((others["gradients"][name] - one).norm() / one.norm().clamp_min(1e-30)) for name, one in values["gradients"].items()
    }
    result: dict[str, Any] = {
        "tokens": options.tokens,
        "trained": options.trained,
        "ranks": options.ranks,
        "seconds": [alone["seconds"], max(one["seconds"] for one in shared)],
        "logprobs_mean": float(apart.mean()),
        "logprobs_max": float(apart.max()),
        "gradient_norms": [alone["gradient_norm"], shared[0]["gradient_norm"]],
        "gradient_norm": abs(shared[0]["gradient_norm"] / alone["gradient_norm"] - 1),
        "gradients": max(gradients.values()),
        "gradients_of": max(gradients, key=lambda name: gradients[name]),
    }
    if "activations" in alone:
        result["activations_gib"] = [one["activations"] / GIB for one in (alone, *shared)]
        result["part"] = max(one["activations"] for one in shared) / alone["activations"]
    result["beyond"] = [name for name, bound in BOUNDS.items() if not result[name] <= bound]
    result["beyond"] += ["part"] if result.get("part", 0.0) > options.most else []
    return result


def main() -> int:
    """One rank where `--rank` says which, else the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--trained", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=float, default=0.6)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("context.json"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options, options.model, options.work, options.rank, options.of)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model_dir = options.model
        if model_dir is None:
            model_dir = Path(folder) / "model"
            subprocess.run([sys.executable, str(ROOT / "scripts/gpu/one_gpu.py"), "model", options.shape, str(model_dir)], check=True)
        result = compare(options, model_dir, Path(folder))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["beyond"] else 0


if __name__ == "__main__":
    sys.exit(main())
