"""What only files can do: outlive their publisher, stay mapped after they are gone, belong to one host, fill up."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest

from streamrl.config.tree import WeightsConfig
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.weights.factory import free_weights, weights_directory
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard
from streamrl.weights.shm import ShmTransport, host_id
from tests.support.errors import raises
from tests.support.wanted import fetched, host, slices

V1, V2 = Version(0, 1), Version(0, 2)


def shards(value: float) -> list[Shard]:
    return [Shard(name="w", dtype="float32", global_shape=(64,), shape=(64,), data=np.full(64, value, np.float32).view(np.uint8))]


def transport(directory: Path) -> ShmTransport:
    return ShmTransport(run="r", policy="policy", directory=directory, part_bytes=100)


async def read(reader: ShmTransport, manifest) -> bytes:
    return (await fetched(reader, manifest)).tobytes()


def names(directory: Path) -> list[str]:
    return sorted(path.suffix for path in directory.iterdir())


async def test_a_file_has_its_name_when_it_is_complete_and_what_a_dead_publisher_left_unfinished_goes(tmp_path, monkeypatch):
    seen: list[list[str]] = []
    fill = Content.fill

    def watched(self, start, out):
        seen.append(names(tmp_path))
        fill(self, start, out)

    monkeypatch.setattr(Content, "fill", watched)
    (tmp_path / "policy.0-1.00ff.partial").touch()
    writer = transport(tmp_path)
    manifest = await writer.publish(V1, iter(shards(1)))
    assert seen == [[".lock", ".partial"]] * 3
    assert names(tmp_path) == [".lock", ".weights"]
    assert await read(transport(tmp_path), manifest) == host(shards(1)[0]).tobytes()
    writer.close()


async def test_finished_files_outlive_their_publisher_until_they_are_retired(tmp_path):
    first = transport(tmp_path)
    old = await first.publish(V1, iter(shards(1)))
    first.close()
    second = transport(tmp_path)
    new = await second.publish(V2, iter(shards(2)))
    assert await second.holds(old) and await read(second, old) == host(shards(1)[0]).tobytes()
    await second.retire(V2)
    assert not await second.holds(old) and await second.holds(new)
    second.close()


async def test_a_live_publishers_unfinished_file_is_left_alone(tmp_path, caplog):
    first = transport(tmp_path)
    await first.publish(V1, iter(shards(1)))
    unfinished = tmp_path / "policy.0-2.00ff.partial"
    unfinished.touch()
    second = transport(tmp_path)
    await second.publish(V2, iter(shards(2)))
    assert unfinished.exists()
    assert "event=weights_publisher_alive" in caplog.text
    first.close()
    second.close()


async def test_a_reader_keeps_what_it_has_mapped(tmp_path):
    writer = transport(tmp_path)
    manifest = await writer.publish(V1, iter(shards(1)))
    parts = [part async for part in transport(tmp_path).fetch(manifest, slices(manifest))]
    await writer.retire(V2)
    assert names(tmp_path) == [".lock"]
    assert b"".join(bytes(part.data) for part in parts) == host(shards(1)[0]).tobytes()
    assert all(part.data.readonly for part in parts)
    writer.close()


async def test_another_hosts_manifest_is_refused_with_a_hint(tmp_path):
    writer = transport(tmp_path)
    manifest = msgspec.structs.replace(await writer.publish(V1, iter(shards(1))), host="elsewhere")
    assert not await writer.holds(manifest)
    with raises(WeightSyncError, host="elsewhere", expected=host_id(tmp_path)) as caught:
        await read(writer, manifest)
    assert "weights.transport = 'bus'" in caught.value.hint
    writer.close()


@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "policy.0-1.zz.weights", "policy.0-1.00ff.partial"])
async def test_a_manifest_cannot_point_at_other_files(tmp_path, location):
    writer = transport(tmp_path)
    good = await writer.publish(V1, iter(shards(1)))
    parts = tuple(msgspec.structs.replace(part, location=location) for part in good.parts)
    with raises(WeightSyncError, location=location):
        await read(writer, msgspec.structs.replace(good, parts=parts))
    writer.close()


async def test_a_shorter_file_is_refused_before_it_is_mapped(tmp_path):
    writer = transport(tmp_path)
    manifest = await writer.publish(V1, iter(shards(1)))
    os.truncate(tmp_path / manifest.parts[0].location, 255)
    assert not await writer.holds(manifest)
    with raises(WeightSyncError, expected=256, got=255):
        await read(writer, manifest)
    writer.close()


async def test_a_file_that_finds_no_room_is_said_and_leaves_nothing(tmp_path):
    writer = transport(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (255, hard))
    try:
        with raises(WeightSyncError, path=str(tmp_path), size_bytes=256) as caught:
            await writer.publish(V1, iter(shards(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "weights.keep" in caught.value.hint
    assert names(tmp_path) == [".lock"]
    writer.close()


def test_the_folder_belongs_to_one_run_in_one_place(tmp_path):
    config = WeightsConfig()
    one, other = (weights_directory(config, "run", tmp_path / place / "run") for place in ("a", "b"))
    assert one != other and one.parent == other.parent
    assert one == weights_directory(config, "run", tmp_path / "a" / ".." / "a" / "run")
    assert weights_directory(WeightsConfig(keep=0), "run", tmp_path / "a") == tmp_path / "a" / "weights"


async def test_a_run_that_has_ended_frees_its_memory_but_not_what_it_was_told_to_keep(tmp_path):
    for keep, stays in ((1, False), (0, True)):
        config = WeightsConfig(keep=keep)
        directory = weights_directory(config, "run", tmp_path)
        writer = transport(directory)
        await writer.publish(V1, iter(shards(1)))
        writer.close()
        for _ in range(2):
            free_weights(config, "run", tmp_path)
            assert directory.exists() == stays
