"""`streamrl convert` against real megatron-core: it loads what was converted, on any mesh, and what it saved is converted back."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from streamrl.models.megatron.convert import convert
from streamrl.models.megatron.names import Place, architecture, parameters
from tests.support.meshes import slow, soak
from tests.support.preloaded import Forked, Preloaded
from tests.support.same_tensors import same_tensors
from tests.trainers.megatron.gpt_tokens import PADDED_TO, TOKENS
from tests.trainers.megatron.models import write_model

pytestmark = pytest.mark.process


def ranks(preloaded: Preloaded, what: str, tensors: int, stages: int, place: Path, model: Path, checkpoint: Path) -> None:
    """Run `gpt_rank.py` on each rank of a mesh."""
    children: list[Forked] = []
    for rank in range(tensors * stages):
        words = [what, rank, tensors, stages, place / f"{what}-store", model, checkpoint, place]
        children.append(preloaded.start("-m", "tests.trainers.megatron.gpt_rank", *map(str, words)))
    try:
        assert [child.wait(timeout=170) for child in children] == [0] * len(children)
    finally:
        for child in children:
            child.kill()


LOADED = [
    ("Qwen3", True, 2, 1),
    slow("Qwen3Moe", False, 1, 1),
    slow("Llama", False, 2, 2),
    soak("Qwen3", True, 1, 2),
    soak("Qwen3", True, 1, 1),
    soak("Qwen2", True, 2, 1),
]
SAVED = [slow("Qwen3", True, 2, 2), soak("Llama", False, 2, 1), soak("Qwen3Moe", False, 1, 1)]


@pytest.mark.parametrize(("kind", "tied", "tensors", "stages"), LOADED)
def test_it_has_transformers_logits(preloaded: Preloaded, tmp_path: Path, kind: str, tied: bool, tensors: int, stages: int) -> None:
    model = tmp_path / "model"
    write_model(model, kind, tied=tied, dtype=torch.float32)
    convert(model, tmp_path / "megatron")
    ranks(preloaded, "load", tensors, stages, tmp_path, model, tmp_path / "megatron" / "release")
    arch = architecture(json.loads((model / "config.json").read_text()), "config.json")
    whole, logits = load_file(model / "model.safetensors"), None
    for rank in range(tensors * stages):
        got = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        place = Place(tensor=rank % tensors, tensors=tensors, stage=rank // tensors, stages=stages)
        expected = list(parameters(arch, place, PADDED_TO))
        assert got["parameters"].keys() == {one.name for one in expected}
        for one in expected:
            value = got["parameters"][one.name]
            for part in one.parts:
                box = tuple(slice(first, first + size) for first, size in zip(part.offset, part.held, strict=True))
                found = value.unflatten(0, (-1, part.period))[:, part.first : part.first + part.run].reshape(part.held)
                assert torch.equal(found, whole[part.name][box]), (rank, one.name, part.name)
        logits = got["logits"] if got["logits"] is not None else logits
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        exact = reference(torch.tensor(TOKENS)).logits
    assert logits is not None
    # Float32 against float64: the largest difference that was seen is 2e-6 of logits below 2.
    assert (logits[..., : arch.vocabulary].double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize(("kind", "tied", "tensors", "stages"), SAVED)
def test_what_it_saved_is_converted_back(preloaded: Preloaded, tmp_path: Path, kind: str, tied: bool, tensors: int, stages: int) -> None:
    model, saved = tmp_path / "model", tmp_path / "megatron" / "iter_0000007"
    write_model(model, kind, tied=tied, dtype=torch.float32)
    saved.mkdir(parents=True)
    ranks(preloaded, "save", tensors, stages, tmp_path, model, saved)
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7\n")
    convert(tmp_path / "megatron", tmp_path / "back", model)
    assert same_tensors(*(load_file(place / "model.safetensors") for place in (model, tmp_path / "back")))
