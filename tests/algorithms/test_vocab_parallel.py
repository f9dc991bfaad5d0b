"""A head split over two gloo ranks against the whole head: values, and gradients of the hidden states and of each rank's rows."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.logprobs import LinearHead, linear_logprobs
from tests.support.preloaded import Preloaded

RANK = """
import sys
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.logprobs import LinearHead
from streamrl.algorithms.vocab_parallel import vocab_parallel_logprobs
from streamrl.trainers.ranks.process_group import leave

folder, rank, first, stop = sys.argv[1], int(sys.argv[2]), *(int(x) for x in sys.argv[3:5])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
problem = load_file(f"{folder}/problem.safetensors")
found = {}
added = LogitBias(problem["of"], (problem["ids"],), (problem["values"],))
for name, softcap, elements, entropy_gradient, biased in (
    ("plain", 0.0, 1 << 20, False, False), ("chunks", 0.0, 200, True, True), ("capped", 1.5, 1 << 20, True, True)
):
    hidden = problem["hidden"].clone().requires_grad_()
    weight, bias = (problem[x][first:stop].clone().requires_grad_() for x in ("weight", "bias"))
    logprobs, entropy = vocab_parallel_logprobs(
        hidden, problem["targets"], LinearHead(weight, bias, 2.0, softcap), first=first, group=dist.group.WORLD,
        temperature_M=problem["temperature"], entropy_gradient=entropy_gradient, chunk_elements=elements,
        logit_bias=added if biased else None,
    )
    loss = logprobs @ problem["slopes"]
    if entropy_gradient:
        loss = loss + entropy @ problem["slopes"].flip(0)
    loss.backward()
    assert entropy.requires_grad == entropy_gradient
    results = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad, "bias": bias.grad}
    found |= {f"{name}.{key}": value.contiguous() for key, value in results.items()}
save_file(found, f"{folder}/{rank}.safetensors")
del logprobs, entropy, loss  # they hold the group, whose threads would live until the interpreter is torn down
leave()
"""

TOKENS, WIDTH, VOCAB, SPLIT = 23, 6, 37, 16


@pytest.fixture(scope="module")
def folder(preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the problem, and what two ranks of 16 and 21 rows have found."""
    folder = tmp_path_factory.mktemp("vocab")
    generator = torch.Generator().manual_seed(5)
    problem = {
        "hidden": torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=generator),
        "weight": torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=generator),
        "bias": torch.randn(VOCAB, dtype=torch.float64, generator=generator),
        "slopes": torch.randn(TOKENS, dtype=torch.float64, generator=generator),
        "temperature": torch.rand(TOKENS, dtype=torch.float64, generator=generator) + 0.5,
        "targets": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
        # A bias of columns of both ranks, of every other token.
        "of": torch.arange(TOKENS) % 2 - 1,
        "ids": torch.tensor([3, SPLIT - 1, SPLIT, VOCAB - 1]),
        "values": torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64),
    }
    problem["targets"][:4] = torch.tensor([0, SPLIT - 1, SPLIT, VOCAB - 1])
    # One rank's logits of a token may lie so far below the other's that all its exponentials are 0.
    problem["hidden"][5] = 400 * problem["weight"][3]
    problem["slopes"][6] = 0.0
    save_file(problem, folder / "problem.safetensors")
    parts = [(0, SPLIT), (SPLIT, VOCAB)]
    children = [preloaded.start("-c", RANK, str(folder), *map(str, (rank, *part))) for rank, part in enumerate(parts)]
    try:
        assert [child.wait(timeout=120) for child in children] == [0, 0]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return folder


@pytest.mark.process
@pytest.mark.parametrize(("name", "softcap", "entropy_gradient"), [("plain", 0.0, False), ("chunks", 0.0, True), ("capped", 1.5, True)])
def test_two_parts_make_the_whole_head(folder: Path, name: str, softcap: float, entropy_gradient: bool) -> None:
    problem = load_file(folder / "problem.safetensors")
    hidden, weight, bias = (problem[x].clone().requires_grad_() for x in ("hidden", "weight", "bias"))
    head = LinearHead(weight, bias, 2.0, softcap)
    added = LogitBias(problem["of"], (problem["ids"],), (problem["values"],)) if name != "plain" else None
    more = {"temperature_M": problem["temperature"], "logit_bias": added, "entropy_gradient": entropy_gradient}
    logprobs, entropy = linear_logprobs(hidden, problem["targets"], head, **more)
    loss = logprobs @ problem["slopes"]
    (loss + entropy @ problem["slopes"].flip(0) if entropy_gradient else loss).backward()
    expected = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": hidden.grad}
    for rank, rows in enumerate([slice(0, SPLIT), slice(SPLIT, VOCAB)]):
        found = load_file(folder / f"{rank}.safetensors")
        assert weight.grad is not None and bias.grad is not None
        for key, value in (expected | {"weight": weight.grad[rows], "bias": bias.grad[rows]}).items():
            assert value is not None and torch.allclose(found[f"{name}.{key}"], value, rtol=1e-12, atol=1e-11), key
            assert value.abs().max() > 1e-3
