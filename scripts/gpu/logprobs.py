"""Log-probs of tokens through a large output head, forward and backward: our forms and liger-kernel's, on one GPU.

    python3 scripts/gpu/logprobs.py [--tokens 16384] [--vocab 151936] [--hidden 2560 4096] [--repeats 5]

For each form: milliseconds of forward and backward, memory beyond the inputs at the peak, and greatest distance of log-probs (absolute)
and of gradients (relative, by norm) from float64 on some of the tokens. Writes logprobs.json to $OUT (default .) and prints a table.
liger-kernel is optional: without it its forms are reported as missing. `--device cpu` with small sizes tries the script out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from streamrl.algorithms import fused_head
from streamrl.algorithms.logprobs import GPU_CHUNK_ELEMENTS, LinearHead, linear_logprobs, token_logprobs

GIB = 1 << 30
CHECKED = 256
"""Tokens compared with float64."""


class Problem:
    """Inputs as a trained model gives them: hidden states of unit scale, logits of some tens, slopes as advantages have."""

    def __init__(self, tokens: int, width: int, vocab: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*shape, device=device, generator=generator)).bfloat16()

        self.vocab = vocab
        self.hidden = normal(tokens, width).requires_grad_()
        self.weight = normal(vocab, width, scale=3 * width**-0.5).requires_grad_()
        self.targets = torch.randint(0, vocab, (tokens,), device=device, generator=generator)
        self.slopes = torch.randn(tokens, device=device, generator=generator)
        self.temperature = torch.ones(tokens, device=device)

    def part(self, tokens: int) -> Problem:
        """The first tokens alone, with leaves of their own."""
        other = object.__new__(Problem)
        other.vocab = self.vocab
        other.hidden = self.hidden.detach()[:tokens].clone().requires_grad_()
        other.weight = self.weight.detach().clone().requires_grad_()
        other.targets, other.slopes, other.temperature = self.targets[:tokens], self.slopes[:tokens], self.temperature[:tokens]
        return other


Form = Callable[[Problem], Tensor]


def fused(problem: Problem, **more: Any) -> Tensor:
    """Ours."""
    options: dict[str, Any] = {"temperature_M": problem.temperature, "chunk_elements": GPU_CHUNK_ELEMENTS, **more}
    logprobs, entropy = linear_logprobs(problem.hidden, problem.targets, LinearHead(problem.weight), **options)
    return logprobs + 0.0 * entropy if more.get("entropy_gradient") else logprobs


def fused_with_entropy(problem: Problem) -> Tensor:
    """Ours; entropies carry a gradient too."""
    return fused(problem, entropy_gradient=True)


def fused_truncated(problem: Problem) -> Tensor:
    """Ours under top-p 0.95 and top-k 50; not compared with float64."""
    ones = torch.ones_like(problem.temperature)
    return fused(problem, top_p_M=0.95 * ones, top_k_M=torch.full_like(problem.targets, 50))


def fused_in_larger_chunks(problem: Problem) -> Tensor:
    """Ours, with four times the logits at a time."""
    return fused(problem, chunk_elements=4 * GPU_CHUNK_ELEMENTS)


def checkpointed(problem: Problem) -> Tensor:
    """Any head as a callable, chunks under activation checkpointing."""
    options: dict[str, Any] = {"vocab_size": problem.vocab, "temperature_M": problem.temperature, "chunk_elements": GPU_CHUNK_ELEMENTS}
    return token_logprobs(problem.hidden, problem.targets, lambda h: h @ problem.weight.T, **options)[0]


def naive(problem: Problem) -> Tensor:
    """All logits at once."""
    return -torch.nn.functional.cross_entropy((problem.hidden @ problem.weight.T).float(), problem.targets, reduction="none")


def liger_cross_entropy(accumulate: torch.dtype | None) -> Form:
    """Fused linear cross entropy of liger's: no temperature, no entropy; the weight's gradient in its own type unless told otherwise."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction  # pyright: ignore[reportMissingImports]

    def form(problem: Problem) -> Tensor:
        with_defaults = (None, None, -100, 0.0, 0.0, "none", None, False, accumulate)
        found = LigerFusedLinearCrossEntropyFunction.apply(problem.hidden, problem.weight, problem.targets, *with_defaults)
        return -(found[0] if isinstance(found, tuple) else found)

    return form


def liger_scaled_cross_entropy() -> Form:
    """Cross entropy of liger's with entropy and one temperature for all tokens; on Hopper it needs nvidia-cutlass-dsl."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction  # pyright: ignore[reportMissingImports]

    def form(problem: Problem) -> Tensor:
        found = LigerFusedLinearScaledCrossEntropyFunction.apply(problem.hidden, problem.weight, problem.targets, 1.0, -100, 1, True)
        return -found[0]

    return form


def liger_grpo_loss(problem: Problem) -> Tensor:
    """Fused linear GRPO loss of liger's: a whole loss over rows of sequences, so only time and memory compare."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    rows = 16 if len(problem.targets) % 16 == 0 else 1
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, temperature=1.0)
    targets = problem.targets.view(rows, -1)
    hidden = problem.hidden.view(rows, targets.shape[1], -1)
    return loss(hidden, problem.weight, targets, torch.ones_like(targets), problem.slopes[:rows])[0]


def compiled(problem: Problem) -> Tensor:
    """Ours with its elementwise parts under torch.compile."""
    return fused(problem)


def forms() -> dict[str, Callable[[], Form]]:
    """Return functions by the name of a form; each imports what its form needs."""
    return {
        "fused": lambda: fused,
        "fused, larger chunks": lambda: fused_in_larger_chunks,
        "fused, entropy gradient": lambda: fused_with_entropy,
        "fused, top-p top-k": lambda: fused_truncated,
        "fused, compiled": lambda: compiled,
        "checkpointed": lambda: checkpointed,
        "naive": lambda: naive,
        "liger cross entropy": lambda: liger_cross_entropy(None),
        "liger cross entropy, float32": lambda: liger_cross_entropy(torch.float32),
        "liger scaled cross entropy": liger_scaled_cross_entropy,
        "liger grpo loss": lambda: liger_grpo_loss,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, nargs="+", default=[2560, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="forms whose name contains this")
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "arguments": vars(args), "results": []}
    for width in args.hidden:
        problem = Problem(args.tokens, width, args.vocab, args.device)
        expected = float64(problem.part(min(CHECKED, args.tokens)))
        for form_name, make in forms().items():
            if args.only in form_name:
                result = {"hidden": width, "form": form_name, **attempt(form_name, make, problem, expected, args)}
                report["results"].append(result)
                print(line(result), flush=True)
                out = Path(os.environ.get("OUT", "."))
                out.mkdir(parents=True, exist_ok=True)
                (out / "logprobs.json").write_text(json.dumps(report, indent=1))


def attempt(name: str, make: Callable[[], Form], problem: Problem, expected: list[Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Numbers of one form, or why there are none: a form that is missing or out of memory leaves the others their turn."""
    try:
        form = make()
        if "compiled" not in name:
            return measure(name, form, problem, expected, args)
        parts: dict[str, Any] = {part: torch.compile(getattr(fused_head, part), dynamic=False) for part in ("statistics", "logit_slopes")}
        with patch.multiple(fused_head, **parts):
            return measure(name, form, problem, expected, args)
    except (ImportError, RuntimeError, TypeError, ValueError, AssertionError) as error:  # OutOfMemoryError is a RuntimeError
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def measure(name: str, form: Form, problem: Problem, expected: list[Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Errors on some tokens, then time and memory on all of them."""
    result: dict[str, Any] = {}
    if "top-p" not in name and "grpo" not in name:
        part = problem.part(len(expected[0]))
        logprobs = form(part)
        (logprobs * part.slopes).sum().backward()
        found = [logprobs.detach(), part.hidden.grad, part.weight.grad]
        result["logprob_error"] = float((found[0].double() - expected[0]).abs().max())
        for index, which in ((1, "hidden"), (2, "weight")):
            result[f"{which}_gradient_error"] = float((found[index].double() - expected[index]).norm() / expected[index].norm())
        del found, part, logprobs
    cuda = args.device == "cuda"
    times: list[tuple[float, float]] = []
    for repeat in range(args.repeats + 2):  # two to warm up
        problem.hidden.grad = problem.weight.grad = None
        before = 0
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache() if repeat == 0 else None
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        logprobs = form(problem)
        torch.cuda.synchronize() if cuda else None
        middle = time.perf_counter()
        (logprobs * problem.slopes).sum().backward() if logprobs.ndim else logprobs.backward()
        torch.cuda.synchronize() if cuda else None
        times.append((middle - begin, time.perf_counter() - middle))
        result["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB if cuda else None
        del logprobs
    problem.hidden.grad = problem.weight.grad = None
    timed = sorted(times[2:], key=sum)
    result["forward_ms"], result["backward_ms"] = (1000 * x for x in timed[len(timed) // 2])
    result["all_ms"] = [[1000 * x for x in pair] for pair in times[2:]]
    return result


def float64(problem: Problem) -> list[Tensor]:
    """Log-probs, and gradients of hidden states and weight, all logits at once."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (problem.hidden, problem.weight))
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, problem.targets[:, None])[:, 0]
    (logprobs * problem.slopes).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [logprobs.detach(), hidden.grad, weight.grad]


def line(result: dict[str, Any]) -> str:
    """A row of the table."""
    start = f"H={result['hidden']:<5} {result['form']:<30}"
    if "failed" in result:
        return f"{start} {result['failed'][:100]}"
    keys = ("logprob_error", "hidden_gradient_error", "weight_gradient_error")
    errors = " ".join(f"{result[key]:.1e}" if key in result else "   -   " for key in keys)
    peak = f"{result['peak_gib']:6.2f} GiB" if result["peak_gib"] is not None else ""
    return f"{start} forward {result['forward_ms']:7.1f} ms  backward {result['backward_ms']:7.1f} ms  {peak}  errors {errors}"


if __name__ == "__main__":
    main()
