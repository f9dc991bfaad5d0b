"""What a server refuses, and that it then serves what it served before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from streamrl.engines.live_swap.control import commit_body
from streamrl.engines.live_swap.messages import Failed, Hello, decode_reply, frame, frame_length, socket_path
from streamrl.engines.sglang.server import SglangServer
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import FileSource
from tests.sglang.updates import Image, Updates, ask
from tests.support import models
from tests.support.errors import raises


@pytest.fixture(scope="module")
def served():
    return models.build("qwen3", 3)


@pytest_asyncio.fixture
async def updates(sglang_server: SglangServer, epochs: Iterator[int], tmp_path: Path, served) -> AsyncIterator[Updates]:
    """A server with a version, which it must still serve when the test is over."""
    updates = Updates(sglang_server, tmp_path, epoch=next(epochs))
    manifest, _ = await updates.put(served)
    before = await ask(sglang_server, [3, 4, 5], 8)
    try:
        yield updates
        assert await updates.host.served_digest(manifest) == (manifest.version, manifest.digest)
        after = await ask(sglang_server, [3, 4, 5], 8)
        assert (after.ids, after.logprobs, after.stamps) == (before.ids, before.logprobs, before.stamps)
    finally:
        await updates.host.close()


def changed(image: Image, **fields) -> Image:
    return Image(msgspec.structs.replace(image.manifest, **fields), image.source)


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def test_wrong_digest_is_refused_by_name(updates, served):
    good = updates.next(served)
    spec = good.manifest.tensors[3]
    flip_bit(Path(good.source.path), spec.offset + 5)
    with raises(WeightSyncError, tensor=spec.name, version=str(good.manifest.version)):
        await updates.host.stage_from(good.manifest, good.source)
    with raises(WeightSyncError, version=str(good.manifest.version)):
        await updates.host.commit(good.manifest.version)


async def test_commit_compares_before_it_sets(updates, served):
    serving = updates.host.serving
    assert serving is not None
    again = await updates.host.commit(serving)
    older = await updates.host.commit(Version(serving.epoch, 0))
    assert not again.committed
    assert not older.committed
    with raises(WeightSyncError, version=f"{serving.epoch}.99"):
        await updates.host.commit(Version(serving.epoch, 99))
    # The plugin itself refuses what was not staged, whoever asks.
    await updates.commit_unseen(Version(serving.epoch, 98))
    log = await updates.host.clients[0].commits()
    assert not log.commits[-1].committed
    assert log.serving == serving
    # An older version that is staged after all is not served either.
    old = changed(updates.next(served), version=Version(serving.epoch, 0))
    await updates.host.stage_from(old.manifest, old.source)
    assert not (await updates.host.commit(old.manifest.version)).committed


async def test_staging_takes_back_what_was_staged(updates, served):
    staged, broken = updates.next(served), updates.next(served)
    await updates.host.stage_from(staged.manifest, staged.source)
    with pytest.raises(WeightSyncError):
        await updates.host.stage_from(broken.manifest, FileSource("/nowhere"))
    await updates.commit_unseen(staged.manifest.version)
    assert not (await updates.host.clients[0].commits()).commits[-1].committed


async def test_files_that_are_none(updates, served, tmp_path):
    one = updates.next(served)
    with pytest.raises(WeightSyncError, match="No such file"):
        await updates.host.stage_from(one.manifest, FileSource(str(tmp_path / "gone")))
    short = tmp_path / "short"
    short.write_bytes(b"\0" * 100)
    with pytest.raises(WeightSyncError, match="got 100"):
        await updates.host.stage_from(one.manifest, FileSource(str(short)))


async def test_tensors_of_another_model(updates, served, tmp_path):
    one = updates.next(served)
    missing = changed(one, tensors=one.manifest.tensors[:-1])
    with pytest.raises(WeightSyncError, match=r"model\.norm|elements"):
        await updates.host.stage_from(missing.manifest, missing.source)
    wider = updates.next(models.build("llama", 0))
    with pytest.raises(WeightSyncError, match=r"elements|fit"):
        await updates.host.stage_from(wider.manifest, wider.source)
    halves = updates.next(models.build("qwen3", 3).bfloat16())
    with pytest.raises(WeightSyncError, match="expected float32 for"):
        await updates.host.stage_from(halves.manifest, halves.source)


async def test_tied_head_may_be_published_if_it_is_the_embeddings(updates, served):
    embeddings = served.get_input_embeddings().weight
    twice = updates.next(served, also={"lm_head.weight": embeddings})
    assert await updates.host.stage_from(twice.manifest, twice.source) == twice.manifest.digest
    untied = updates.next(served, also={"lm_head.weight": embeddings + 1})
    with raises(WeightSyncError, tensor="lm_head.weight", known=False):
        await updates.host.stage_from(untied.manifest, untied.source)


async def test_garbage_on_the_socket_is_answered_and_harms_nobody(updates, sglang_server):
    path = socket_path(str(sglang_server.directory), 0)
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write((5).to_bytes(4, "little") + b"\x80\x04pi.")
    answer = decode_reply(await reader.readexactly(frame_length(await reader.readexactly(4))))
    assert isinstance(answer, Failed)
    writer.write(frame(Hello()))
    assert not isinstance(decode_reply(await reader.readexactly(frame_length(await reader.readexactly(4)))), Failed)
    writer.write(b"\xff\xff\xff\xff")
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()
    assert (await updates.host.hello())[0].serving == updates.host.serving


async def test_other_server_settings_still_go_through(updates, sglang_server):
    body = commit_body(Version(0, 1))["server_args"] | {"pp_max_micro_batch_size": 4}
    del body["streamrl_number"], body["streamrl_epoch"]
    assert await sglang_server.client.post("/set_internal_state", {"server_args": body}, timeout_s=30.0, expect=list[bool]) == [True]
