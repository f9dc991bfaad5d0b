"""Changes between snapshots on a GPU: bit for bit those that the host makes of the same versions."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from streamrl.schemas.versions import Version
from streamrl.trainers.torch.snapshot import SnapshotRing
from streamrl.weights import changes
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import COMPARED_BYTES, COMPARED_ELEMENTS
from tests.weights.compared import Model, compare, ranges_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("elements", [(256, 1024), (changes.BLOCK_ELEMENTS, COMPARED_ELEMENTS)])
def test_blocks_made_on_a_gpu_are_those_of_the_host(elements: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks that cut every tensor, and in those of a run."""
    monkeypatch.setattr(changes, "BLOCK_ELEMENTS", elements[0])
    monkeypatch.setattr(changes, "COMPARED_ELEMENTS", elements[1])
    with ThreadPoolExecutor(4) as pool:
        compare(Model(torch.device("cuda"), slots=3), pool)


def test_a_large_tensor_is_compared_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """2 GB of bfloat16 of which 2 in 100 elements change, and how long that takes (told, not judged)."""
    parameter = torch.randn(1 << 15, 1 << 15, device="cuda", dtype=torch.bfloat16)
    ring = SnapshotRing([("w", parameter)], parameter.device, slots=3)
    with ThreadPoolExecutor(8) as pool:
        before = changes.Before(pool)
        for number in range(1, 4):
            content = Content(ring.take())
            began = time.perf_counter()
            blocks = before.replace(Version(0, number), content, ranges_of(content))
            took_s = time.perf_counter() - began
            parameter.view(torch.int16)[torch.rand(parameter.shape, device="cuda") < 0.02] += 1
        assert blocks is not None and 0.005 * parameter.nbytes < sum(map(len, blocks)) < 0.03 * parameter.nbytes
        with capsys.disabled():
            sys.stdout.write(f"[measured] changes of {parameter.nbytes / 1e9:.1f} GB, 2 % of its elements: {took_s:.3f} s\n")


@pytest.mark.parametrize("part", [0.01, 0.24, 1.0])
def test_threads_that_compare_take_the_room_that_is_reckoned_with(part: float) -> None:
    parameter = torch.zeros(4 * COMPARED_ELEMENTS, device="cuda")
    ring = SnapshotRing([("w", parameter)], parameter.device, slots=2)
    with ThreadPoolExecutor(8) as pool:
        before = changes.Before(pool)
        content = Content(ring.take())
        before.replace(Version(0, 1), content, ranges_of(content))
        parameter[torch.rand(parameter.shape, device="cuda") < part] = 1
        content = Content(ring.take())
        content.devices()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        before.replace(Version(0, 2), content, ranges_of(content))
        taken = torch.cuda.max_memory_allocated() - held
    assert taken <= COMPARED_BYTES + (8 << 20)
