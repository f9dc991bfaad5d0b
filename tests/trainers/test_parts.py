"""Tensors of a checkpoint in several files: put together again by any mesh, by torch's own reader, and refused where they do not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from streamrl.errors import CheckpointDamaged, TrainingError
from streamrl.trainers.checkpoints import write_directory
from streamrl.trainers.mesh import Mesh
from streamrl.trainers.parts import find_tensors, join_tensors, part_folder
from streamrl.trainers.torch.checkpoint import ModelState, TorchState, random_state, read_checkpoint, write_checkpoint, write_tensors
from tests.support.errors import raises

WHOLE = {
    "wide": torch.arange(5 * 3, dtype=torch.float32).reshape(5, 3),
    "narrow": torch.arange(7, dtype=torch.bfloat16),
    "one": torch.full((1, 4), 2.5),
}
MOMENTS = {
    **{f"{name}.exp_avg": -value.float() for name, value in WHOLE.items()},
    **{f"{name}.step": torch.tensor(float(place)) for place, name in enumerate(WHOLE)},
}


def rows(value: torch.Tensor, mesh: Mesh, part: int) -> torch.Tensor:
    if not value.shape:
        return value
    held = mesh.rows(value.shape[0], part)
    return value[held.start : held.stop].contiguous()


def written(path: Path, shards: int) -> Path:
    """A checkpoint of these tensors by a mesh of so many parts."""
    mesh = Mesh(shard=shards)

    def state(part: int) -> TorchState:
        policy = ModelState(
            parameters={name: rows(value, mesh, part) for name, value in WHOLE.items()},
            optimizer={name: rows(value, mesh, part) for name, value in MOMENTS.items()},
            digest="0" * 16,
            shapes={name: tuple(value.shape) for name, value in WHOLE.items()},
        )
        return TorchState(policy=policy, critic=None, random=random_state(torch.device("cpu")), stage="rl", version="0.1")

    def write(directory: Path) -> None:
        write_checkpoint(directory, state(0), b"extra", mesh)
        for part in range(1, shards):
            (directory / part_folder(mesh, part)).mkdir()
            write_tensors(directory / part_folder(mesh, part), state(part), mesh, part)

    write_directory(path, write, seal=True)
    return path


@pytest.mark.parametrize("by", [1, 2, 3, 8])
def test_what_any_mesh_has_written_any_mesh_reads(tmp_path: Path, by: int) -> None:
    path = written(tmp_path / "at", by)
    for shards in (1, 2, 4, 7):
        mesh = Mesh(shard=shards)
        for part in range(shards):
            state, extra = read_checkpoint(path, mesh, part)
            assert extra == b"extra" and state.policy.shapes == {name: tuple(value.shape) for name, value in WHOLE.items()}
            for found, whole in ((state.policy.parameters, WHOLE), (state.policy.optimizer, MOMENTS)):
                assert found.keys() == whole.keys()
                for name, value in found.items():
                    wanted = rows(whole[name], mesh, part)
                    assert value.dtype == wanted.dtype and value.shape == wanted.shape and torch.equal(value, wanted), (shards, part, name)


@pytest.mark.parametrize("by", [1, 3])
def test_parts_are_joined_to_the_file_that_one_rank_writes(tmp_path: Path, by: int) -> None:
    path = written(tmp_path / "at", by)
    for file, whole in (("model.safetensors", WHOLE), ("optimizer.safetensors", MOMENTS)):
        join_tensors(path, file, tmp_path / file)
        found = load_file(tmp_path / file)
        assert found.keys() == whole.keys()
        assert all(value.dtype == whole[name].dtype and torch.equal(value, whole[name]) for name, value in found.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_reads_the_parts(tmp_path: Path) -> None:
    path, flat = written(tmp_path / "at", 3), tmp_path / "flat"
    flat.mkdir()
    for part in range(3):
        shutil.copyfile(path / part_folder(Mesh(shard=3), part) / "model.safetensors", flat / f"{part}.safetensors")
    found = {name: torch.zeros_like(value) for name, value in WHOLE.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(flat)), no_dist=True)
    assert all(torch.equal(value, WHOLE[name]) for name, value in found.items())


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the header of the second part's file, and leave its bytes as they are."""

    def spoil(path: Path) -> None:
        file = path / "part-2-of-3" / "model.safetensors"
        data = file.read_bytes()
        nbytes = int.from_bytes(data[:8], "little")
        told = json.loads(data[8 : 8 + nbytes])
        change(told)
        text = json.dumps(told).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + nbytes :])

    return spoil


def offsets(told: dict[str, Any]) -> None:
    told["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps({name: {"saved_offsets": [1, 0]} for name in told})


def cut(path: Path, left: int) -> None:
    file = path / "part-2-of-3" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a part is gone": lambda path: shutil.rmtree(path / "part-3-of-3"),
    "a file is gone": lambda path: (path / "part-2-of-3" / "model.safetensors").unlink(),
    "empty": lambda path: cut(path, 0),
    "cut in its header": lambda path: cut(path, 40),
    "cut": lambda path: cut(path, -5),
    "a part of others": lambda path: (path / "part-4-of-9").mkdir(),
    "other rows": header(offsets),
    "no rows told": header(lambda told: told.pop("__metadata__")),
    "another type": header(lambda told: told["wide"].update(dtype="I32")),
    "a list": header(lambda told: told.update(wide=[])),
}


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_do_not_make_a_whole_are_damage(tmp_path: Path, damage: str, sealed: bool) -> None:
    path = written(tmp_path / "at", 3)
    DAMAGES[damage](path)
    if not sealed:
        (path / "files.json").unlink()
    with pytest.raises(CheckpointDamaged):
        read_checkpoint(path, Mesh(shard=2), 1)


def test_one_bit_of_a_part_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "at", 2)
    for file in (path / "part-2-of-2").iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointDamaged, match=f"part-2-of-2/{file.name}"):
            read_checkpoint(path, Mesh(), 0)
        file.write_bytes(whole)
    assert read_checkpoint(path, Mesh(), 0)[1] == b"extra"
    assert find_tensors(path, "model.safetensors")["wide"].shape == (5, 3)


def test_a_format_of_a_later_build_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "at", 2)
    (path / "files.json").unlink()
    meta = json.loads((path / "meta.json").read_bytes())
    (path / "meta.json").write_text(json.dumps(meta | {"format": 3}))
    with raises(TrainingError):
        read_checkpoint(path, Mesh(), 0)
