"""Staging: what an engine accepts into its idle buffer, and that the serving one never notices what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from streamrl.config.tree import EngineConfig
from streamrl.engines.batching.buffers import ALIGNMENT, TensorLayout, WeightBuffers, offsets
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import WeightSyncError
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import Part, Slice
from tests.support.errors import raises
from tests.support.models import ask, started
from tests.support.publishing import Published, load, publish

LAYOUT = (TensorLayout("a", "float32", (3, 5)), TensorLayout("b", "float32", (2, 5), glued=True), TensorLayout("c", "float32", (7,)))


def tensors(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {tensor.name: rng.normal(size=tensor.shape).astype(np.float32) for tensor in LAYOUT}


def test_glued_tensors_follow_without_a_gap_and_others_are_aligned():
    at = offsets(LAYOUT)
    assert at == {"a": 0, "b": 60, "c": 128}
    for array in WeightBuffers(LAYOUT).arrays:
        assert array.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("count", [1, 2, 7, 128])
def test_parts_may_cut_tensors_anywhere_and_come_in_any_order(count: int):
    buffers = WeightBuffers(LAYOUT)
    values = tensors(0)
    published = publish({name: values[name] for name in ("c", "a", "b")}, Version(0, 1))
    size = -(-len(published.data) // count)
    starts = list(range(0, len(published.data), size))
    written = sum(
        buffers.write(1, published.manifest, Part(start, memoryview(published.data)[start : start + size])) for start in reversed(starts)
    )
    assert written == sum(spec.nbytes for spec in published.manifest.tensors)
    assert buffers.digest(1) == published.manifest.digest
    at = offsets(LAYOUT)
    for name, value in values.items():
        assert buffers.arrays[1][at[name] : at[name] + value.nbytes].tobytes() == value.tobytes()
    assert not buffers.arrays[0].any(), "the other buffer is untouched"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda values: values.pop("c"), {"missing": ["c"]}),
        (lambda values: values.update(d=values["c"]), {"unexpected": ["d"]}),
        (lambda values: values.update(c=values["c"][:3]), {"tensor": "c", "got": ("float32", (3,))}),
        (lambda values: values.update(c=values["c"].astype(np.float16)), {"tensor": "c", "got": ("float16", (7,))}),
    ],
)
def test_another_models_version_is_refused(change, found):
    values = tensors(0)
    change(values)
    with raises(WeightSyncError, **found):
        WeightBuffers(LAYOUT).wants(publish(values, Version(0, 1)).manifest)


def test_an_adapter_is_refused_and_a_version_that_comes_as_changes_is_not():
    """The transport applies the changes; what it hands over is the whole version."""
    published = publish(tensors(0), Version(0, 1))
    manifest = published.manifest
    for known in (manifest, msgspec.structs.replace(manifest, kind="delta")):
        assert WeightBuffers(LAYOUT).wants(known) == (Slice(0, len(published.data)),)
    with raises(WeightSyncError, kind="adapter"):
        WeightBuffers(LAYOUT).wants(msgspec.structs.replace(manifest, kind="adapter"))


# Through an engine that serves.


def table(number: int, *, like: int | None = None) -> Published:
    """A version with weights of its own, or with those of another."""
    logits = np.random.default_rng(number if like is None else like).normal(size=(2, 8, 8)).astype(np.float32)
    return publish({"logits": logits}, Version(0, number))


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[TableEngine]:
    (tmp_path / "table.json").write_text('{"vocab": 8, "max_position": 2, "eos": 1}')
    async with started(TableEngine(tmp_path, EngineConfig(slots=4), engine_id="e", policy="policy"), table(0)) as engine:
        yield engine


async def tokens(engine: TableEngine) -> list[int]:
    sampling = Sampling(max_new_tokens=50, ignore_eos=True)
    (answer,) = await ask(engine, GenerateRequest(request_id="r", prompt_ids=(3,), seeds=(1,), sampling=sampling))
    return answer.ids


async def test_bytes_that_changed_on_the_way_are_refused_and_the_next_version_is_taken(engine: TableEngine):
    before = await tokens(engine)
    good = table(1)
    changed = bytearray(good.data)
    changed[17] ^= 1
    with raises(WeightSyncError, expected=good.manifest.digest):
        await load(engine, Published(good.manifest, bytes(changed)))
    with raises(WeightSyncError, version="0.1", staged=None):
        await engine.commit(Version(0, 1))
    assert await tokens(engine) == before
    assert (await load(engine, table(2))).committed
    assert await tokens(engine) != before


async def test_a_transport_that_fails_or_is_cancelled_leaves_the_engine_usable(engine: TableEngine):
    before = await tokens(engine)
    good = table(1)
    entered = asyncio.Event()

    async def failing() -> AsyncIterator[Part]:
        yield Part(0, memoryview(good.data)[:100])
        raise WeightSyncError("publisher gone", hint="")

    async def hanging() -> AsyncIterator[Part]:
        yield Part(0, memoryview(good.data)[:100])
        entered.set()
        await asyncio.Event().wait()

    async def some() -> AsyncIterator[Part]:
        yield Part(0, memoryview(good.data)[:100])

    with raises(WeightSyncError, got=100):
        await engine.stage(good.manifest, some())
    with pytest.raises(WeightSyncError, match="publisher gone"):
        await engine.stage(good.manifest, failing())
    task = asyncio.ensure_future(engine.stage(good.manifest, hanging()))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await tokens(engine) == before
    assert (await load(engine, good)).committed


async def test_a_newer_version_may_be_staged_over_one_never_committed(engine: TableEngine):
    first, second = table(1), table(2)
    await engine.stage(first.manifest, first.parts())
    await engine.stage(second.manifest, second.parts())
    with raises(WeightSyncError, version="0.1"):
        await engine.commit(Version(0, 1))
    commit = await engine.commit(Version(0, 2))
    assert commit.committed
    info = await engine.info()
    assert (info.serving, info.last_swap_ms) == (Version(0, 2), commit.took_ms)
    served = await tokens(engine)
    assert (await load(engine, table(3, like=2))).committed
    assert await tokens(engine) == served
    assert (await load(engine, table(4, like=1))).committed
    assert await tokens(engine) != served
