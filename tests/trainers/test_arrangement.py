"""How layers are arranged by memory, on a CPU with a reckoned room: what is kept, followed, given up, refused."""

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
from streamrl.trainers.activations import ModelShape, kept_layers
from streamrl.trainers.mesh import Mesh
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
def test_a_model_that_cannot_be_packed_is_said_or_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, bool] | None, key: str
) -> None:
    monkeypatch.setattr(CausalLM, "_packing_works", lambda self: False)
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
