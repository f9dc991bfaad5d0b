"""Ranks that share packed rows over GPUs: FlashAttention, NCCL and compiled layers, beside one GPU. `scripts/gpu/context.sh` runs them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.config.tree import Config
from streamrl.core.context import share_row
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.attention import by_flash, by_piece
from tests.core.test_context import row
from tests.support import trainers
from tests.support.gpus import LONG
from tests.support.measured import say
from tests.support.meshes import BOUND, apart, batch, in_float64, parameters, run
from tests.support.needs import need
from tests.support.steps import LEARNED, check_alike
from tests.support.trainers import DIRECT, Models

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(400)]


def config(ranks: int, shards: int, **settings: Any) -> Config:
    return trainers.config(DIRECT, ranks=ranks, shards=shards, context=ranks, device="cuda", rank_timeout_s=120.0, **settings)


@pytest.mark.parametrize("lengths", [[1024], [700, 200], [3, 9, 300, 4, 1, 600], [1]])
def test_flash_attention_of_a_chunk_is_that_of_float64(lengths: list[int]) -> None:
    """With pieces that have keys and no queries, whose slopes must be written: 0, and not what was in memory."""
    need("gpu")
    micro = row(lengths, 1024)
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (torch.randn(n, heads, 64, device="cuda", generator=generator) for n, heads in ((256, 4), (1024, 2), (1024, 2)))
    for place in (0, 1):
        cut = share_row(micro, place, 2).micro.cut
        assert cut is not None
        for half in (0, 1):
            bounds = [torch.from_numpy(found[half]).cuda() for found in (cut.queries, cut.keys)]
            results: list[list[torch.Tensor]] = []
            for attend, dtype in ((by_piece, torch.float64), (by_flash, torch.bfloat16)):
                given = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in (query, key, value)]
                junk = torch.full((64 << 20,), float("nan"), device="cuda")  # what an empty tensor of theirs would hold
                del junk
                found = attend(given[0], given[1], given[2], bounds[0], bounds[1], (256, micro.longest), None)
                found.backward(torch.ones_like(found))
                results.append([found.detach(), *(x.grad for x in given if x.grad is not None)])
            for exact, flash in zip(*results, strict=True):
                assert float((flash.double() - exact).abs().max()) <= 0.02 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("shards", [1, 2])
def test_in_float32_two_gpus_end_as_near_to_one_as_that_to_float64(model_dir: Path, tmp_path: Path, shards: int) -> None:
    need("two gpus")
    asked: dict[str, Any] = {"dtype": "float32", "micro_tokens": 48, "minibatches": 2}
    one = run(make_trainer(config(1, 1, **asked), model_dir), tmp_path / "one")
    truth = run(in_float64(config(1, 1, **asked), model_dir), tmp_path / "exact")
    far = apart(parameters(one.checkpoint), parameters(truth.checkpoint))
    with open_trainer(config(2, shards, **asked), model_dir) as trainer:
        made = run(trainer, tmp_path / "two")
    distance = apart(parameters(made.checkpoint), parameters(one.checkpoint))
    say(f"float32, context 2, {shards} parts: {distance:.1e} away from one GPU, bound {BOUND * far:.1e}")
    assert made.begun == one.begun
    assert distance <= BOUND * far
    assert made.norms == pytest.approx(one.norms, rel=1e-3)


@pytest.mark.parametrize(("shards", "compile_"), [(1, "off"), (1, "on"), (2, "on")])
def test_two_gpus_learn_what_one_does_and_again_the_same_bits(make_model: Models, tmp_path: Path, shards: int, compile_: str) -> None:
    need("two gpus")
    directory = make_model("bfloat16", **LONG)
    asked: dict[str, Any] = {"dtype": "bfloat16", "micro_tokens": 64, "activations": 1, "minibatches": 2, "compile": compile_}
    torch.compiler.reset()
    alone = make_trainer(config(1, 1, numerics="bitwise", **asked), directory)
    expected = [alone.step(batch(step)) for step in range(4)]
    torch.compiler.reset()
    with open_trainer(config(2, shards, numerics="bitwise", **asked), directory) as trainer:
        found = [trainer.step(batch(step)) for step in range(2)]
        trainer.save(tmp_path / "at", b"at", version=Version(0, 2)).result()
        found += [trainer.step(batch(step)) for step in (2, 3)]
        check_alike(found, expected, *LEARNED, rel=5e-2, abs=5e-3)
        for choices in (ours.choices for ours in found):
            assert choices is not None and (choices.compiled, choices.attention) == (compile_ == "on", "packed")
        assert trainer.load(tmp_path / "at") == b"at"
        assert [trainer.step(batch(step)).digest for step in (2, 3)] == [result.digest for result in found[2:]]
