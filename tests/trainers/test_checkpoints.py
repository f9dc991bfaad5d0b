"""Directories that are whole or not there, whoever is killed at whatever call; files of several ranks that any mesh reads."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from streamrl.errors import CheckpointDamaged, TrainingError
from streamrl.models import directories
from streamrl.models.checkpoint import ModelState, TorchState, random_state, read_checkpoint, write_checkpoint, write_tensors
from streamrl.models.directories import BackgroundWriter, list_checkpoints, prune, recover, write_directory
from streamrl.models.tensor_files import OFFSETS, TensorFiles, host_bytes, join_tensors, part_files, part_folder
from streamrl.schemas.versions import Version
from streamrl.tensors.mesh import Mesh
from tests.support.errors import raises
from tests.support.joint import NAME
from tests.support.meshes import slow
from tests.support.preloaded import PRELOADED
from tests.support.same_tensors import same_tensors

# Ends itself without any clean-up at the n-th call that the protocol makes.
KILLED = """
import os, shutil, sys
from pathlib import Path
from streamrl.models.directories import write_directory

path, content, left = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def counted(function):
    def call(*args, **options):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        return function(*args, **options)
    return call

def write(directory):
    (directory / "a").write_text(content)
    (directory / "b").write_text(content)

os.fsync, os.rename, os.chmod, shutil.rmtree = map(counted, (os.fsync, os.rename, os.chmod, shutil.rmtree))
write_directory(path, write)
"""


def content(path: Path) -> str | None:
    if not path.exists():
        return None
    a, b = (path / "a").read_text(), (path / "b").read_text()
    assert a == b
    return a


def fill(text: str, names: str = "f") -> Callable[[Path], None]:
    """Writes files of one letter."""

    def write(directory: Path) -> None:
        for name in names:
            (directory / name).write_text(text)

    return write


@pytest.mark.process
@pytest.mark.parametrize("former", [None, "old"])
def test_a_kill_at_any_call_leaves_one_whole_content(tmp_path: Path, former: str | None) -> None:
    seen: list[str | None] = []
    for calls in range(30):
        path = tmp_path / str(calls) / "main-v00000001-e0"
        if former is not None:
            write_directory(path, fill("old", "ab"))
        child = subprocess.run([sys.executable, "-c", KILLED, str(path), "new", str(calls)], check=False)
        assert child.returncode in (0, 9)
        before_recovery = content(path)
        recover(path)
        seen.append(content(path))
        assert before_recovery in (seen[-1], None)
        assert [p.name for p in path.parent.iterdir()] == ([path.name] if seen[-1] else [])
        if child.returncode == 0:
            break
    # Killed early: as before; killed late or not at all: the new content; nothing else in between.
    assert seen[-1] == "new"
    assert seen == sorted(seen, key=lambda found: found == "new")
    assert set(seen) == {former, "new"}


def test_a_write_that_fails_leaves_nothing_and_says_where(tmp_path: Path) -> None:
    def write(directory: Path) -> None:
        (directory / "a").write_text("half")
        raise ValueError("stopped")

    with pytest.raises(ValueError, match="stopped"):
        write_directory(tmp_path / "at", write)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "at").write_text("a file, not a directory")
    with raises(TrainingError, path=str(tmp_path / "at" / "below")):
        write_directory(tmp_path / "at" / "below", lambda _: None)


def test_the_writer_writes_in_order_and_reports_failures(tmp_path: Path) -> None:
    writer = BackgroundWriter()

    def fail(directory: Path) -> None:
        raise OSError("disk full")

    first = writer.submit(tmp_path / "one", fill("1"))
    second = writer.submit(tmp_path / "two", fail)
    third = writer.submit(tmp_path / "three", fill("3"))
    assert first.done() and second.done()
    with raises(TrainingError, path=str(tmp_path / "two")):
        second.result()
    third.result()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "three"]


def test_lists_and_prunes_by_version_and_prefix(tmp_path: Path) -> None:
    names = ["main-v00000009-e0", "main-v00000010-e0", "main-v00000003-e1", "main-v00000012-e0", "other-v00000001-e0", "main-notes"]
    spoiled = ["main-v00000008-e0.damaged", "main-v00000011-e0.damaged"]
    unfinished = [".main-v00000011-e0.writing-abc", ".other-v00000002-e0.writing-abc"]
    for name in [*names, *spoiled, *unfinished]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("")
    listed = [version for version, _ in list_checkpoints(tmp_path, "main-")]
    assert listed == [Version(0, 9), Version(0, 10), Version(0, 12), Version(1, 3)]
    assert prune(tmp_path, keep=(), prefix="main-") == []
    keep = {tmp_path / "main-v00000010-e0", tmp_path / "main-v00000003-e1"}
    removed = {path.name for path in prune(tmp_path, keep=keep, prefix="main-")}
    assert removed == {"main-v00000009-e0", "main-v00000008-e0.damaged"}, "what is newer than the newest that is kept stays"
    left = {*names, *spoiled, ".other-v00000002-e0.writing-abc"} - removed
    assert {p.name for p in tmp_path.iterdir()} == left
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_a_checkpoint_is_read_back_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that gives back other bytes than it was given."""
    digests = iter(["what was written", "what is read"])
    monkeypatch.setattr(directories, "file_digest", lambda path: next(digests))
    with pytest.raises(CheckpointDamaged):
        BackgroundWriter().submit(tmp_path / "at", fill("1")).result()
    assert list(tmp_path.iterdir()) == []


async def told(folder: Path, *scenario: str) -> Any:
    code, out, err = await PRELOADED.run("-m", "tests.support.joint", str(folder), *scenario, folder=folder)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("former", [slow(""), "old"])
async def test_a_kill_of_either_rank_at_any_call_leaves_one_whole_checkpoint(tmp_path: Path, former: str) -> None:
    seen = await told(tmp_path, "sweep", former)
    by_rank = [[one for one in seen if one["victim"] == victim] for victim in range(2)]
    for victim, ones in enumerate(by_rank):
        assert [one["codes"][victim] for one in ones] == [-signal.SIGKILL] * (len(ones) - 1) + [0]
        afters = [one["after"] for one in ones]
        assert afters[-1] == "new" and set(afters) == {former or None, "new"}
        assert afters == sorted(afters, key=lambda found: found == "new")
        for one in ones:
            assert one["before"] in (one["after"], None)
            assert one["left"] == ([NAME] if one["after"] else [])
    # Rank 1's last two calls tell rank 0 of its files, which are all there by then: without that nothing gets the name.
    assert {one["after"] for one in by_rank[1][:-1]} == {former or None}
    # Rank 0 says that it has not been written, and that a rank has ended.
    assert {one["codes"][0] for one in by_rank[1][:-1]} == {7}


@pytest.mark.process
@pytest.mark.timeout(300)
async def test_a_rank_that_does_not_see_the_place_sends_its_part(tmp_path: Path) -> None:
    assert await told(tmp_path, "unseen") == {"codes": [0, 0], "after": "new", "left": []}


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", [slow(0), 1])
async def test_a_disk_that_is_full_on_one_rank_fails_the_checkpoint_and_not_the_next(tmp_path: Path, victim: int) -> None:
    found = await told(tmp_path, "full", str(victim))
    assert found["codes"] == [0, 0] and found["after"] == "two"
    said = found["said"]["said-0"]
    assert "No space left" in said and ("rank 1" in said) == (victim == 1)


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
            (directory / part_folder(part, mesh.shard)).mkdir()
            write_tensors(directory / part_folder(part, mesh.shard), state(part), mesh, part)

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
                assert same_tensors(found, {name: rows(value, mesh, part) for name, value in whole.items()}), (shards, part)


@pytest.mark.parametrize("by", [1, 3])
def test_parts_are_joined_to_the_file_that_one_rank_writes(tmp_path: Path, by: int) -> None:
    path = written(tmp_path / "at", by)
    for file, whole in (("model.safetensors", WHOLE), ("optimizer.safetensors", MOMENTS)):
        join_tensors(path, file, tmp_path / file)
        assert same_tensors(load_file(tmp_path / file), whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_reads_the_parts(tmp_path: Path) -> None:
    path, flat = written(tmp_path / "at", 3), tmp_path / "flat"
    flat.mkdir()
    for part in range(3):
        shutil.copyfile(path / part_folder(part, 3) / "model.safetensors", flat / f"{part}.safetensors")
    found = {name: torch.zeros_like(value) for name, value in WHOLE.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(flat)), no_dist=True)
    assert same_tensors(found, WHOLE)


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


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_do_not_make_a_whole_are_damage(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path / "at", 3)
    DAMAGES[damage](path)
    with pytest.raises(CheckpointDamaged):
        read_checkpoint(path, Mesh(shard=2), 1)
    (path / "files.json").unlink()
    with pytest.raises(CheckpointDamaged):
        read_checkpoint(path, Mesh(shard=2), 1)


@pytest.mark.parametrize("shape", [(2, 4), (2, 4, 3)])
def test_columns_are_copied_to_their_places(tmp_path: Path, shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    files = {tmp_path / "left": (0, 1), tmp_path / "right": (1, 4)}
    for file, (first, end) in files.items():
        offsets = {"wide": {"saved_offsets": [0, first, *[0] * (len(shape) - 2)]}}
        save_file({"wide": whole[:, first:end].contiguous()}, file, metadata={OFFSETS: json.dumps(offsets)})
    out = np.zeros(whole.nbytes, np.uint8)
    with TensorFiles(files) as found:
        found.copy("wide", out)
    assert out.tobytes() == host_bytes(whole).tobytes()


def test_one_bit_of_a_part_is_found_and_a_later_format_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "at", 2)
    for file in (path / "part-2-of-2").iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointDamaged, match=f"part-2-of-2/{file.name}"):
            read_checkpoint(path, Mesh(), 0)
        file.write_bytes(whole)
    assert read_checkpoint(path, Mesh(), 0)[1] == b"extra"
    assert TensorFiles(part_files(path, "model.safetensors")).tensors["wide"].shape == (5, 3)
    path = written(tmp_path / "at", 2)
    (path / "files.json").unlink()
    meta = json.loads((path / "meta.json").read_bytes())
    (path / "meta.json").write_text(json.dumps(meta | {"format": 3}))
    with raises(TrainingError):
        read_checkpoint(path, Mesh(), 0)
