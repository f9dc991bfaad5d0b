"""A version as a model directory, from a checkpoint and from the bus: transformers loads it, and its logits are the policy's."""

import asyncio
import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.bus.memory import MemoryBus
from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config, WeightsConfig
from streamrl.errors import CheckpointDamaged, ConfigError, TrainingError, WeightSyncError
from streamrl.history.export import Found, NewFile, choose, export, find_versions
from streamrl.models import checkpoint as files
from streamrl.models.directories import write_directory
from streamrl.models.tensor_files import TensorFiles, host_bytes, part_folder
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Link, TensorSpec
from streamrl.tensors.digest import digest_text, tensor_digest
from streamrl.tensors.mesh import Mesh
from streamrl.tensors.names import ARCHITECTURES, KEPT
from tests.support.digests import digest_of
from tests.support.errors import raises
from tests.support.harness import read_ledger, run_to_end, services
from tests.support.refusals import refused
from tests.support.torch_runs import ppo_config
from tests.support.ups import begun
from tests.support.world.world import table_config
from tests.tensors.test_names import tiny

pytestmark = pytest.mark.process


def exporting(base: Path, dtype: Any) -> Config:
    config = ppo_config(base)
    return replace(
        config,
        run=replace(config.run, name=f"exports-{dtype}"),
        model=replace(config.model, dtype=dtype, layers=2),
        tasks=replace(config.tasks, num_rollouts=2),
        trainer=replace(config.trainer, checkpoint_every=4, minibatches=1, export_every=4),
        weights=WeightsConfig(transport="bus", keep=4, anchor_every=3),
        loss=LossConfig(),
    )


class Exported:
    """A finished run on its bus."""

    def __init__(self, config: Config, run: RunDir, bus: MemoryBus, ledger: list[LedgerEntry], found: Found) -> None:
        self.config, self.run, self.bus, self.found = config, run, bus, found
        self.digests = {entry.version: entry.digest for entry in ledger}
        self.newest = ledger[-1].version

    async def export(self, version: Version, out: Path, **found: Any) -> str:
        return await export(self.config, self.bus, self.run.model_dir, replace(self.found, **found), version, out)


async def make(base: Path, dtype: str) -> Exported:
    async with begun(base, exporting(base, dtype)) as (run, config, bus):
        await run_to_end(config, run, bus)
        ledger = await read_ledger(bus, config.run.name)
        return Exported(config, run, bus, ledger, await find_versions(config, bus, run.checkpoints))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return asyncio.run(make(tmp_path_factory.mktemp("exports"), request.param))


def logits(path: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 18)[None]).logits


def write_parts(path: Path, mesh: Mesh, state: Callable[[int], files.TorchState], extra: bytes) -> Path:
    """A checkpoint as the ranks of a mesh write it."""

    def write(directory: Path) -> None:
        files.write_checkpoint(directory, state(0), extra, mesh)
        for part in range(1, mesh.shard):
            (directory / part_folder(part, mesh.shard)).mkdir()
            files.write_tensors(directory / part_folder(part, mesh.shard), state(part), mesh, part)

    write_directory(path, write, seal=True)
    return path


def in_parts(whole: Path, path: Path) -> Path:
    """The same checkpoint as three ranks would have written it."""
    mesh = Mesh(shard=3)
    states, extras = zip(*(files.read_checkpoint(whole, mesh, part) for part in range(3)), strict=True)
    return write_parts(path, mesh, states.__getitem__, extras[0])


def checkpoint_of(model: Any, path: Path, shards: int) -> Path:
    """What as many ranks write of a model: its parameters, by the names that the installed transformers gives them."""
    mesh = Mesh(shard=shards)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def state(part: int) -> files.TorchState:
        rows = {name: mesh.rows(shapes[name][0], part) for name in shapes}
        held = {name: value.detach()[rows[name].start : rows[name].stop].contiguous() for name, value in model.named_parameters()}
        policy = files.ModelState(parameters=held, optimizer={}, digest="0" * 16, shapes=shapes)
        return files.TorchState(policy=policy, critic=None, random=files.random_state(torch.device("cpu")), stage="rl", version="0.3")

    return write_parts(path, mesh, state, b"")


@pytest.mark.parametrize("model_type", ["qwen3", *ARCHITECTURES])
async def test_transformers_loads_every_tensor_of_an_architecture_that_renames_its_experts(model_type: str, tmp_path: Path) -> None:
    """Also those that nobody trains, which only the initial policy has."""
    model, version = tiny(model_type), Version(0, 3)
    with torch.no_grad():
        for _, buffer in model.named_buffers():
            buffer.add_(torch.rand_like(buffer))
    model.save_pretrained(tmp_path / "initial")
    saved = load_file(tmp_path / "initial" / "model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(tmp_path / "trained")
    wanted = load_file(tmp_path / "trained" / "model.safetensors")
    assert saved.keys() == wanted.keys()
    for shards in (1, 3):
        found = Found({version: checkpoint_of(model, tmp_path / f"main-v0000000{shards}-e0", shards)}, {})
        out = tmp_path / f"{shards}"
        await export(Config(), MemoryBus("names"), tmp_path / "initial", found, version, out)
        got = load_file(out / "model.safetensors")
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) and got[name].dtype == wanted[name].dtype for name in wanted)
        both: Any = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        loaded, told = both
        assert not any(told.values()), told
        assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_file_that_is_filled_from_the_bus_has_what_nobody_trains_too(tmp_path: Path) -> None:
    trained, bias = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.arange(5, dtype=torch.float64)
    save_file({"a.weight": torch.zeros(2, 3), f"a{KEPT[0]}": bias}, tmp_path / "initial")
    kept = TensorFiles([tmp_path / "initial"], KEPT)
    data = host_bytes(trained)
    spec = TensorSpec(name="a.weight", dtype="float32", shape=(2, 3), offset=0, nbytes=24, digest=digest_text(tensor_digest(data, 4)))
    NewFile(tmp_path / "new", [spec], kept).write(Link(version=Version(0, 1), parts=()), 0, memoryview(bytes(data)))
    found = load_file(tmp_path / "new")
    assert found.keys() == {"a.weight", f"a{KEPT[0]}"}
    assert torch.equal(found["a.weight"], trained) and torch.equal(found[f"a{KEPT[0]}"], bias)
    # One that the version has is the version's.
    NewFile(tmp_path / "own", [replace(spec, name=f"a{KEPT[0]}")], kept)
    assert {name: value.shape for name, value in load_file(tmp_path / "own").items()} == {f"a{KEPT[0]}": (2, 3)}


def nothing_beside(path: Path) -> bool:
    return not list(path.parent.glob(f".{path.name}*"))


async def test_it_is_what_the_trainer_exports_wherever_it_comes_from(made: Exported, tmp_path: Path) -> None:
    newest, own = made.newest, made.run.hf / f"v{made.newest.number:08d}"
    assert {path.name for path in made.run.hf.iterdir()} == {"v00000004", "v00000006"}, "every 4 versions, and at the end"
    assert await made.export(newest, tmp_path / "a") == "checkpoint main-v00000006-e0"
    assert await made.export(newest, tmp_path / "b", checkpoints={}) == "the bus"
    parts = in_parts(made.run.checkpoints / "main-v00000006-e0", tmp_path / "main-v00000006-e1")
    assert await made.export(newest, tmp_path / "c", checkpoints={newest: parts}) == f"checkpoint {parts.name}"
    expected = logits(own)
    for name in ("a", "b", "c"):
        assert torch.equal(logits(tmp_path / name), expected), name
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == AutoModelForCausalLM.from_pretrained(own).dtype
        assert AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() == AutoTokenizer.from_pretrained(own).get_vocab()
    assert any(len(way) > 1 for _, way in made.found.log.values()), "some are an anchor and changes"
    for version in made.found.log:
        path = tmp_path / f"v{version.number}"
        await made.export(version, path, checkpoints={})
        if version in made.digests:
            model = AutoModelForCausalLM.from_pretrained(path)
            assert digest_of(model.named_parameters(), model.config.model_type) == made.digests[version]
        assert nothing_beside(path)


@pytest.mark.parametrize("made", ["bfloat16"], indirect=True)
async def test_what_is_not_there_is_named_and_what_is_there_is_not_replaced(made: Exported, tmp_path: Path) -> None:
    assert choose(made.found, None) == choose(made.found, "6") == choose(made.found, "0.6") == made.newest
    with refused(ConfigError, "0.6", versions=tuple(map(str, made.found.versions))):
        choose(made.found, "700")
    with raises(ConfigError, versions=()):
        choose(Found({}, {}), None)
    out = tmp_path / "there"
    out.mkdir()
    (out / "mine").write_text("kept")
    with raises(ConfigError, path=str(out)):
        await made.export(made.newest, out)
    assert [path.name for path in out.iterdir()] == ["mine"]
    whole = made.run.checkpoints / "main-v00000006-e0"
    broken = Path(shutil.copytree(whole, tmp_path / whole.name))
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointDamaged):
        await made.export(made.newest, tmp_path / "none", checkpoints={made.newest: broken}, log={})
    assert await made.export(made.newest, tmp_path / "whole", checkpoints={made.newest: broken}) == "the bus"
    manifest, way = made.found.log[made.newest]
    parts = [part for link in {*way, *manifest.links["bus"]} if link.version == made.newest for part in link.parts]
    taken = {part.location: await made.bus.blobs.get(part.location) for part in parts}
    for name in taken:
        await made.bus.blobs.delete(name)
    with pytest.raises(WeightSyncError):
        await made.export(made.newest, tmp_path / "none", checkpoints={})
    assert made.newest not in (await find_versions(made.config, made.bus, made.run.checkpoints)).log
    for name, data in taken.items():
        await made.bus.blobs.put(name, data)
    wrong = replace(manifest, tensors=(replace(manifest.tensors[0], digest="0" * 16), *manifest.tensors[1:]))
    other = next(version for version in made.found.log if version != made.newest)
    with pytest.raises(WeightSyncError, match="expected digest 0000000000000000"):
        await made.export(made.newest, tmp_path / "none", checkpoints={}, log={made.newest: (wrong, made.found.log[other][1])})
    assert not (tmp_path / "none").exists() and nothing_beside(tmp_path / "none")


@pytest.mark.parametrize("made", ["bfloat16"], indirect=True)
async def test_a_disk_without_room_is_left_as_it_was(made: Exported, tmp_path: Path) -> None:
    """By a limit on the size of a file, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for checkpoints in (made.found.checkpoints, {}):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(TrainingError, match="cannot write"):
                await made.export(made.newest, tmp_path / "full", checkpoints=checkpoints)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not (tmp_path / "full").exists() and nothing_beside(tmp_path / "full")


def small(tmp_path: Path, dtype: str = "F32") -> tuple[Found, Version, Path]:
    """A checkpoint of one tensor, and the folder of its model."""
    checkpoint, model = tmp_path / "main-v00000003-e0", tmp_path / "model"
    for folder in (checkpoint, model):
        folder.mkdir()
    header = json.dumps({"one": {"dtype": dtype, "shape": [2], "data_offsets": [0, 8]}}).encode()
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (model / "config.json").write_text("{}")
    version = Version(0, 3)
    return Found({version: checkpoint}, {}), version, model


async def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    found, version, model = small(tmp_path, "I32")
    with pytest.raises(TrainingError, match="got int32"):
        await export(Config(), MemoryBus("types"), model, found, version, tmp_path / "out")
    assert not (tmp_path / "out").exists() and nothing_beside(tmp_path / "out")


async def test_a_trainer_that_writes_the_same_directory_is_not_disturbed(tmp_path: Path) -> None:
    found, version, model = small(tmp_path)
    out = tmp_path / "hf" / "v00000003"
    asked: list[str] = []

    def write(directory: Path) -> None:
        (directory / "first").touch()
        asked.append(asyncio.run(export(Config(), MemoryBus("beside"), model, found, version, out)))
        (directory / "last").touch()

    await asyncio.to_thread(write_directory, out, write)
    assert asked == ["checkpoint main-v00000003-e0"]
    assert {path.name for path in out.iterdir()} == {"first", "last"} and nothing_beside(out)


async def test_a_directory_that_comes_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, version, model = small(tmp_path)
    out = tmp_path / "v00000003"

    def others(source: Path, target: Path) -> None:
        copy(source, target)
        out.mkdir(exist_ok=True)
        (out / "others").touch()

    copy = shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", others)
    with raises(ConfigError, path=str(out)):
        await export(Config(), MemoryBus("meanwhile"), model, found, version, out)
    assert [path.name for path in out.iterdir()] == ["others"] and nothing_beside(out)


async def test_a_table_is_exported_from_its_checkpoint(tmp_path: Path) -> None:
    async with begun(tmp_path, table_config(tmp_path, run={"name": "table", "steps": 4})) as (run, config, bus):
        await run_to_end(config, run, bus)
        found = await find_versions(config, bus, run.checkpoints)
        version = choose(found, None)
        await export(config, bus, run.model_dir, found, version, tmp_path / "out")
        own = run.hf / f"v{version.number:08d}"
        read = await asyncio.to_thread(lambda: [(path / "logits.npy").read_bytes() for path in (own, tmp_path / "out")])
        assert read[0] == read[1]


@pytest.mark.parametrize("every", [0, 1000])
async def test_a_run_that_is_stopped_leaves_its_newest_version_where_that_is_asked_for(tmp_path: Path, every: int) -> None:
    async with begun(tmp_path, table_config(tmp_path, run={"name": "stopped", "steps": 500}, trainer={"export_every": every})) as (
        run,
        config,
        bus,
    ):
        async with services(config, run, bus, ["engine", "producer", "feeder", "trainer"]):
            while len(await read_ledger(bus, "stopped")) < 3:
                await asyncio.sleep(0.05)
        newest = (await read_ledger(bus, "stopped"))[-1].version.number
        assert [path.name for path in run.hf.iterdir()] == ([f"v{newest:08d}"] if every else [])


async def test_a_disk_that_is_full_for_an_export_ends_no_training(tmp_path: Path) -> None:
    """A file lies where its directory would; what is written between is left out, and the end's is an error."""
    async with begun(tmp_path, table_config(tmp_path, run={"name": "full", "steps": 4}, trainer={"export_every": 1})) as (run, config, bus):
        shutil.rmtree(run.hf)
        run.hf.touch()
        with pytest.raises(TrainingError, match="v0000"):
            await run_to_end(config, run, bus)
        versions = [entry.version.number for entry in await read_ledger(bus, "full")]
        newest = await bus.last(Subjects("full").events("notice"))
        assert versions[-1] >= 4 and newest is not None
        assert f"version 0.{versions[-1]} is not exported" in str(decode(newest.body, Event).detail)
