"""How layers are arranged by memory: the arithmetic, and on a CPU with a reckoned room what is kept, followed, given up, refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch._dynamo.utils import counters

from streamrl.core.packing import ROW
from streamrl.errors import ConfigError
from streamrl.schemas.ledger import Choices
from streamrl.tensors.mesh import Mesh
from streamrl.trainers import activations
from streamrl.trainers.activations import GIB, Cut, Estimate, ModelShape, kept_layers
from streamrl.trainers.torch import arrangement, kernels
from streamrl.trainers.torch.arrangement import Arrangement
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.parallel import Parallel
from tests.support.errors import raises
from tests.support.scoring import policy_of
from tests.support.trainers import Rollouts, make

BUDGET = 2 * ROW
SHAPE = ModelShape(2, 256, 256, 128, 1024, 1000)
"""Of two layers, as the tests' models have."""


def free_bytes(kept: int, tokens: int, itemsize: int = 4) -> int:
    """The least memory that is enough for this."""
    low, high = 0, 1 << 50
    while high - low > 1:
        middle = (low + high) // 2
        found = kept_layers(SHAPE, free_bytes=middle, needed_bytes=0, tokens=tokens, itemsize=itemsize, compiled=False)
        low, high = (low, middle) if found.fits and found.kept >= kept else (middle, high)
    return high


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how much memory there is."""

    def fixed(free: int) -> None:
        monkeypatch.setattr(Arrangement, "_reckon", lambda self, copies: arrangement.Room((SHAPE,), free, 0))

    return fixed


def arrange(model: CausalLM, asked: Kernels, budget: int) -> Arrangement:
    alone = Parallel(Mesh(), torch.device("cpu"))
    return Arrangement(asked, trained=[model], frozen=[], parallel=alone, budget=budget, deterministic=False, copies=0)


def arranged(model_dir: Path, dtype: torch.dtype = torch.float32) -> Arrangement:
    packed = Kernels(attention="packed", free_attention=True, free_compile=True, kept_layers="auto")
    model = CausalLM(model_dir, dtype, torch.device("cpu"), kernels=packed)
    model.module.float()  # as the parameters of a model that is cut are, whatever it computes in
    return arrange(model, packed, BUDGET)


def test_rows_are_long_where_all_layers_keep_activations_in_the_type_of_the_pass(model_dir: Path, room: Callable[[int], None]) -> None:
    room(free_bytes(2, BUDGET))
    assert arranged(model_dir).least_row(None) == BUDGET
    room(free_bytes(2, BUDGET) - 1)
    found = arranged(model_dir)
    assert found.least_row(None) == ROW and found.least_row(Choices(row_length=40)) == 40
    assert any("1 of 2 layers" in notice for notice in found.notices()), "the arithmetic is told"
    room(free_bytes(2, BUDGET, itemsize=2))
    assert free_bytes(2, BUDGET, itemsize=2) < free_bytes(2, BUDGET)
    assert arranged(model_dir, dtype=torch.bfloat16).least_row(None) == BUDGET


def test_as_many_layers_keep_activations_as_was_recorded_or_memory_has_room_for(model_dir: Path, room: Callable[[int], None]) -> None:
    room(free_bytes(1, ROW))
    found = arranged(model_dir)
    for recorded, kept in ((None, 1), (0, 0), (1, 1), (2, 1)):
        found.follow(Choices(kept_layers=recorded), ROW)
        choices = found.choices(ROW)
        assert choices is not None and choices.kept_layers == kept
    room(free_bytes(2, BUDGET))
    found = arranged(model_dir)
    found.notices()
    assert found.keep_fewer() and "1 of 2 layers" in found.notices()[0]
    for row in (BUDGET, ROW):
        found.follow(None, row)
        choices = found.choices(row)
        assert choices is not None and choices.kept_layers == 1, "another row length does not forget it"
    assert found.keep_fewer() and not found.keep_fewer(), "none is left"


def test_a_step_that_is_out_of_memory_gives_up_activations_before_its_budget(
    model_dir: Path, rollouts: Rollouts, room: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    room(free_bytes(2, 24))
    monkeypatch.setattr(kernels, "_kept_layers", lambda activations, *, cuda: "auto")
    plain, trainer = (make(model_dir, attention="packed", micro_tokens=24) for _ in range(2))
    policy, left = policy_of(trainer), [1]
    states = policy.states

    def fails(micro: Any) -> torch.Tensor:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("planted")
        return states(micro)

    monkeypatch.setattr(policy, "states", fails)
    ours, theirs = trainer.step(rollouts()), plain.step(rollouts())
    assert ours.micro_tokens == theirs.micro_tokens == 24 and ours.digest == theirs.digest
    assert ours.choices is not None and ours.choices.kept_layers == 1
    assert any("out of memory" in notice for notice in ours.notices)


@pytest.mark.parametrize(("free", "key"), [({}, "trainer.attention"), ({"free_attention": True}, "trainer.compile"), (None, "")])
def test_no_packing_is_said_or_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, bool] | None, key: str) -> None:
    monkeypatch.setattr(CausalLM, "_packing_works", lambda self, *windows: False)
    asked = Kernels(attention="packed", compile=True, **({"free_attention": True, "free_compile": True} if free is None else free))
    model = CausalLM(model_dir, torch.float32, torch.device("cpu"), kernels=asked)
    if key:
        with raises(ConfigError, key=key):
            arrange(model, asked, 24)
    else:
        assert "rows are not packed" in arrange(model, asked, 24).notices()[0]


@pytest.mark.soak
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_every_row_length_is_compiled_however_many_come(model_dir: Path, rollouts: Rollouts) -> None:
    """torch would stop at 8 shapes and run the others as they are, in silence."""
    torch.compiler.reset()
    trainer = make(model_dir, attention="packed", micro_tokens=24, compile="on")
    batch = rollouts()
    longest = int(batch.lengths.max())
    graphs = counters["stats"]["unique_graphs"]
    for budget in range(longest, longest + 10):
        chosen = Choices(attention="packed", compiled=True, row_length=budget)
        assert trainer.step(replace(batch, micro_tokens=budget, choices=chosen)).finite
        assert counters["stats"]["unique_graphs"] > graphs, budget
        graphs = counters["stats"]["unique_graphs"]


HEADS = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
OF_QWEN: dict[str, Any] = {"hidden_size": 2560, "intermediate_size": 9728, "vocab_size": 151_936, "tie_word_embeddings": True, **HEADS}
QWEN = ModelShape(36, 2560, 4096, 1024, 9728, 151_936, tied=True)


def estimate(free_gib: float, tokens: int = 8192, *, compiled: bool = True, needed: int = 40 * GIB) -> Estimate:
    return activations.kept_layers(QWEN, free_bytes=int(free_gib * GIB), needed_bytes=needed, tokens=tokens, itemsize=2, compiled=compiled)


def test_the_shape_is_read_from_a_models_configuration() -> None:
    assert activations.model_shape(OF_QWEN) == activations.model_shape({"text_config": OF_QWEN, "vision_config": {}}) == QWEN
    assert 4.0e9 < QWEN.parameters < 4.05e9
    mixture = activations.model_shape(OF_QWEN | {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128})
    assert mixture is not None and (mixture.inner, mixture.experts) == (6144, 16)
    for broken in ({}, {"hidden_size": 8}, OF_QWEN | {"num_attention_heads": None}, OF_QWEN | {"num_attention_heads": 0, "head_dim": 0}):
        assert activations.model_shape(broken) is None


def test_bytes_of_a_parameter_before_the_first_step_and_while_training() -> None:
    assert [activations.training_bytes(10, itemsize) for itemsize in (2, 4)] == [180, 160]
    for itemsize, shards, held in ((2, 1, 6), (4, 1, 4), (2, 2, 2), (4, 4, 1)):
        assert activations.held_bytes(100, itemsize, shards) == 100 * held
        assert activations.training_bytes(100, itemsize, shards) >= activations.held_bytes(100, itemsize, shards)


def test_more_memory_keeps_more_layers_and_the_arithmetic_is_told() -> None:
    found = [estimate(gib).kept for gib in (20, 60, 75, 90, 200)]
    assert found == sorted(found) and found[0] == 0 and found[-1] == 36 and 0 < found[2] < 36
    assert estimate(80, 16_384).kept < estimate(80).kept
    assert estimate(80, compiled=False).kept < estimate(80).kept
    assert not estimate(20).fits and estimate(90).fits
    found = estimate(75)
    layer = 8192 * QWEN.layer_bytes(2, compiled=True) / GIB
    assert found.text.startswith(f"{found.kept} of 36 layers ") and "95% of 75.0 GiB" in found.text
    assert found.text.endswith(f"= {layer:.2f}")


def test_of_two_models_the_one_with_room_for_the_fewest_layers_counts() -> None:
    small, large = QWEN._replace(layers=8), QWEN._replace(layers=64)

    def found(gib: float, *shapes: ModelShape) -> Estimate:
        return activations.least_kept(shapes, free_bytes=int(gib * GIB), needed_bytes=40 * GIB, tokens=8192, itemsize=2, compiled=True)

    alone = found(75, small)
    assert alone.all_kept and alone.kept == 8, "the policy's few layers fit"
    both = found(75, small, large)
    assert not both.all_kept and 0 < both.kept < 64 and "of 64 layers" in both.text, "the critic's many do not"
    assert found(500, small, large).all_kept
    assert found(58, small).fits and not found(58, small, large._replace(layers=4000)).fits
    assert found(75, small, large).kept > found(75, large, small).kept, "a critic has no head"


def test_parts_take_their_part_and_what_is_gathered() -> None:
    assert [activations.training_bytes(101, itemsize, 2) for itemsize in (2, 4)] == [16 * 51] * 2
    assert activations.gathered_bytes(QWEN, 2, once=True) == 6 * QWEN.parameters
    ends = 151_936 * 2560
    tied, untied = (activations.gathered_bytes(QWEN._replace(tied=one), 2, once=False) for one in (True, False))
    assert (tied, untied - tied) == (4 * ends + 8 * (QWEN.parameters - ends) // 36, 4 * ends)
    assert 2 * activations.looked_at_bytes(QWEN, 2) == tied
    assert QWEN.body == QWEN and QWEN._replace(tied=False).body == QWEN, "what is tied has one matrix already"


def test_tensor_ranks_and_stages_have_room_for_their_parts() -> None:
    """Each has half of the layers; the first stage two rows on their way and no head, the last one a row and the head."""
    same: dict[str, Any] = {"needed_bytes": 10 * GIB, "itemsize": 2, "compiled": True}

    def kept(cut: Cut, free_gib: float) -> Estimate:
        return cut.least_kept([QWEN], tokens=8192, free_bytes=int(free_gib * GIB), **same)

    def alone(free_gib: float, tokens: int, **parts: int) -> Estimate:
        return activations.least_kept([QWEN._replace(**parts)], tokens=tokens, free_bytes=int(free_gib * GIB), **same)

    assert kept(Cut(), 40) == alone(40, 8192)
    assert kept(Cut(tensors=2), 25) == alone(25, 4096, vocab=151_936 // 2)
    for free in range(24, 60, 4):
        first, last = alone(free, 2 * 8192, layers=18, vocab=0), alone(free, 8192, layers=18)
        assert kept(Cut(stages=2), free).kept == min(first.kept, last.kept)
        assert kept(Cut(stages=2), free).fits == (first.fits and last.fits)
    assert kept(Cut(stages=2), 80).all_kept and not kept(Cut(stages=2), 12).fits
