"""Recording load_weights on models that load as SGLang's do, without SGLang."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamrl.engines.live_swap.buffers import Buffers
from streamrl.engines.live_swap.expand import expand
from streamrl.engines.live_swap.forwards import Forwards
from streamrl.engines.live_swap.messages import Pace, Prepare, Prepared, Region, Stage, Staged, TensorEntry
from streamrl.engines.live_swap.model import aliases, twin
from streamrl.engines.live_swap.pace import Pacer
from streamrl.engines.live_swap.rank_digests import DigestBooks
from streamrl.engines.live_swap.recorder import record
from streamrl.engines.live_swap.staging import Stager
from streamrl.engines.live_swap.swap import Swap
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Copying, Manifest
from streamrl.tensors.digest import tensor_digest
from streamrl.weights.manifest import Content, build
from streamrl.weights.protocol import CudaSource, DeviceMemory, FileSource, Shard
from tests.support.errors import raises
from tests.support.wanted import filled


class Fused(nn.Module):
    """Rank `rank` of two: q and v fused by rows, a projection sliced by columns, embeddings with padding rows."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.qv = nn.Parameter(torch.zeros(8, 6))
        self.down = nn.Parameter(torch.zeros(6, 4))
        self.embed = nn.Parameter(torch.full((7, 6), 9.0))
        self.norm = nn.Parameter(torch.zeros(6))
        self.cached = dict(self.named_parameters())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("q", "v"):
                rows = tensor.narrow(0, 4 * self.rank, 4)
                self.cached["qv"].data.narrow(0, 0 if name == "q" else 4, 4).copy_(rows)
            elif name == "down":
                self.cached["down"].data.copy_(tensor.to(self.down.device)[:, 4 * self.rank : 4 * self.rank + 4])
            elif name == "embed":
                self.cached["embed"][:5].data.copy_(tensor)
                self.cached["embed"][5:].data.fill_(0)
            elif name == "norm":
                self.cached["norm"].data.copy_(tensor)


class Derived(Fused):
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, tensor + 1 if name == "norm" else tensor) for name, tensor in weights)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"q": (8, 6), "v": (8, 6), "down": (6, 8), "embed": (5, 6), "norm": (6,), "unused": (3,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def content(named: dict[str, Tensor]) -> Content:
    return Content(shard(name, tensor) for name, tensor in named.items())


def shard(name: str, tensor: Tensor) -> Shard:
    shape = tuple(tensor.shape)
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return Shard(name=name, dtype=str(tensor.dtype)[6:], global_shape=shape, shape=shape, data=data)


def entries(named: dict[str, Tensor]) -> tuple[TensorEntry, ...]:
    return tuple(TensorEntry(s.name, s.dtype, s.shape, s.offset, s.nbytes) for s in content(named).tensors)


def stager(model: nn.Module) -> tuple[Stager, Swap]:
    buffers = Buffers(model, pinned=False)
    buffers.fill()
    swap = Swap(buffers, None)
    return Stager(swap, Forwards(keep=False, device=torch.device("cpu")), []), swap


def prepared(model: nn.Module, named: dict[str, Tensor] | None = None) -> tuple[Stager, Swap, Prepared]:
    """A worker that knows the tensors of layout `one`."""
    worker, swap = stager(model)
    return worker, swap, worker.prepare(Prepare(layout="one", tensors=entries(named or tensors())))


def stage_of(source: FileSource | CudaSource, number: int = 1, **more: Any) -> Stage:
    return Stage(version=Version(0, number), layout="one", source=source, **more)


def manifest_of(named: dict[str, Tensor]) -> Manifest:
    return build(content(named), run="r", policy="p", version=Version(0, 1), parts=(), transport="shm")


def check_staged(swap: Swap, expected: Fused, named: dict[str, Tensor] | None = None) -> None:
    """The idle buffer has what `load_weights` gives."""
    expected.load_weights((named or tensors()).items())
    for found, wanted in zip(swap.buffers.sets[1], expected.parameters(), strict=True):
        assert torch.equal(found.cpu(), wanted)


def write(named: dict[str, Tensor], path) -> FileSource:
    filled(content(named)).tofile(path)
    return FileSource(str(path))


def test_staging_from_a_device_begins_with_what_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers that are copied to meanwhile: no byte is read before its bucket is marked, and none is waited for that others need."""
    named = tensors()
    whole = content(named)
    data = torch.from_numpy(filled(whole))
    half = next(spec.offset for spec in whole.tensors if spec.name == "norm")
    buffers = {b"one": data[:half], b"two": data[half:]}
    marked = {handle: torch.zeros(len(part) // 64 * 64 + 64 + 16, dtype=torch.uint8) for handle, part in buffers.items()}
    copying: dict[str, Copying] = {}
    for handle, part in buffers.items():
        copying[handle.decode()] = Copying(7, len(part) // 64 * 64 + 64, (64, len(part)))
    monkeypatch.setattr("streamrl.tensors.cuda_ipc.open_shared", lambda handle, device: marked[handle])
    memory = tuple(DeviceMemory(handle, 0, len(part), handle.decode(), None) for handle, part in buffers.items())
    request = stage_of(CudaSource(memory, copying))
    for kind in (Fused, Derived):
        for one in marked.values():
            one.zero_()
        worker, swap, _ = prepared(kind())
        staged: list[Staged] = []
        thread = threading.Thread(target=lambda worker=worker, staged=staged: staged.append(worker.stage(request)))
        thread.start()
        for handle, bucket in ((b"one", 0), (b"two", 0), (b"two", 1), (b"one", 1)):
            thread.join(0.02)
            assert thread.is_alive()
            one, ends = copying[handle.decode()], copying[handle.decode()].ends
            first = ends[bucket - 1] if bucket else 0
            marked[handle][first : ends[bucket]] = buffers[handle][first : ends[bucket]]
            marked[handle][one.at :].view(torch.int64)[bucket] = 7
        thread.join()
        check_staged(swap, kind())
        # The next version lies in the same buffers: this one is gone, and nothing of it may be committed.
        marked[b"two"][copying["two"].at :].view(torch.int64).fill_(8)
        with raises(WeightSyncError, taken_back="a version in device memory"):
            worker.stage(request)
        assert not swap.commit(Version(0, 1), forward=0, stream=None).committed


@pytest.mark.parametrize("copying", [Copying(7, 1 << 20, (64, 640)), Copying(7, 4, (640,))])
def test_marks_that_do_not_lie_in_the_buffer_are_refused(copying: Copying, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.tensors.cuda_ipc.open_shared", lambda handle, device: torch.zeros(2048, dtype=torch.uint8))
    worker, _, _ = prepared(Fused())
    with raises(WeightSyncError, at=copying.at):
        worker.stage(stage_of(CudaSource((DeviceMemory(b"one", 0, 1000, "owner"),), {"owner": copying})))


@pytest.mark.parametrize("kind", [Fused, Derived])
def test_staged_buffer_is_what_load_weights_gives(kind, tmp_path):
    named = tensors()

    def staged() -> tuple[list[Prepared], list[tuple[int, ...]]]:
        known, sums = [], []
        for rank in (0, 1):
            model = kind(rank)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            worker, swap, found = prepared(model, named)
            assert found.recorded == (kind is Fused)
            sums.append(worker.stage(stage_of(write(named, tmp_path / "one"), pace=Pace(max_gap_ms=1))).digests)
            check_staged(swap, kind(rank), named)
            # Padding is the only thing that recording may set in the served weights.
            assert all(torch.equal(a[:5], b[:5]) for a, b in zip(before, model.parameters(), strict=True))
            assert kind is Fused or all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            known.append(found)
        return known, sums

    ranks, sums = staged()
    if kind is Fused:
        assert all("unused" in found.ignored for found in ranks)
        with raises(WeightSyncError, tensor="unused", known=False):
            DigestBooks(manifest_of(named).tensors, ranks).check(manifest_of(named), sums)
        named.pop("unused")
        ranks, sums = staged()
    manifest = manifest_of(named)
    books = DigestBooks(manifest.tensors, ranks)
    assert books.check(manifest, sums) == manifest.digest
    wrong = [list(one) for one in sums]
    wrong[1][0] ^= 1
    with pytest.raises(WeightSyncError):
        books.check(manifest, wrong)


class Even(nn.Module):
    """Rank `rank` of two: half of the rows of a fused matrix, half of the columns of another; all are whole words of 8 bytes."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self._rank = rank
        self.fused = nn.Parameter(torch.zeros(12, 8, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.zeros(8, 12, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "down":
                self.down.data.copy_(tensor.narrow(1, 12 * self._rank, 12))
            elif name == "norm":
                self.norm.data.copy_(tensor)
            else:
                rows = tensor.shape[0] // 2
                self.fused.data.narrow(0, {"q": 0, "k": 8}[name], rows).copy_(tensor.narrow(0, rows * self._rank, rows))


def even() -> dict[str, Tensor]:
    shapes = {"q": (16, 8), "k": (8, 8), "down": (8, 24), "norm": (8,)}
    return {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_words_say_as_much_as_elements(device, tmp_path):
    named = even()
    manifest = manifest_of(named)
    source = write(named, tmp_path / "one")
    ranks, sums = [], {True: [], False: []}
    for rank in (0, 1):
        worker, _, found = prepared(Even(rank).to(device), named)
        ranks.append(found)
        for number, words in enumerate(sums, start=1):
            sums[words].append(worker.stage(stage_of(source, number, words=words)).digests)
    books = DigestBooks(manifest.tensors, ranks)
    assert books.by_words(manifest)
    assert sums[True] != sums[False]
    assert books.check(manifest, sums[True], words=True) == books.check(manifest, sums[False]) == manifest.digest
    wrong = [list(one) for one in sums[True]]
    wrong[1][0] ^= 1
    with raises(WeightSyncError, tensor="down", version="0.1"):
        books.check(manifest, wrong, words=True)


def test_layouts_that_cut_words_are_digested_by_elements(tmp_path):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            for _, tensor in weights:
                self.norm.data.copy_(tensor)

    named = {"norm": torch.randn(6).to(torch.bfloat16)}
    worker, _, found = prepared(Odd(), named)
    assert not found.words
    manifest = manifest_of(named)
    books = DigestBooks(manifest.tensors, [found])
    assert not books.by_words(manifest)
    assert books.check(manifest, [worker.stage(stage_of(write(named, tmp_path / "one"))).digests]) == manifest.digest


@pytest.mark.gpu
@pytest.mark.parametrize("budget_ms", [0.0, 0.5])
def test_staging_on_a_gpu(tmp_path, budget_ms):
    named = tensors()
    del named["unused"]
    for rank in (0, 1):
        worker, swap, _ = prepared(Fused(rank).cuda(), named)
        host, _, _ = prepared(Fused(rank), named)
        for number in (1, 2):
            request = stage_of(write(named, tmp_path / str(number)), number, pace=Pace(max_gap_ms=budget_ms))
            assert worker.stage(request).digests == host.stage(request).digests
        check_staged(swap, Fused(rank), named)
        assert swap.commit(Version(0, 2), forward=0, stream=torch.cuda.current_stream()).committed
        assert worker.served("one").digests == host.stage(request).digests


def test_recording_writes_to_no_parameter():
    model = Fused()
    recording = record(model, entries(tensors()))
    assert not recording.why
    assert all(float(parameter.detach().sum()) in (0.0, 9.0 * 42) for parameter in model.parameters())
    assert model.cached["qv"] is model.qv


def test_twin_has_its_own_parameters_and_shares_the_rest():
    fused = Fused()
    model = nn.Sequential(fused, nn.LayerNorm(3))
    model.register_buffer("table", torch.ones(2))
    other: Any = twin(model, lambda parameter: parameter.detach().clone() + 1)
    assert [name for name, _ in other.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert other[0].cached["norm"] is other[0].norm
    assert other.table is model.table
    other.load_state_dict({**model.state_dict(), "0.norm": torch.full((6,), 5.0)})
    assert float(fused.norm.detach().sum()) == 0


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (lambda named: named.pop("norm"), {"tensor": "norm", "elements": 0}),
        (lambda named: named.update(norm=torch.zeros(7)), {"model": "Fused"}),
        (lambda named: named.update(norm=named["norm"].half()), {"tensor": "norm", "got": "torch.float16"}),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, values):
    named = tensors()
    change(named)
    with raises(WeightSyncError, **values):
        record(Fused(), entries(named))


def test_memory_kept_outside_the_parameters_is_noticed():
    model = Fused()
    assert aliases(model) == []
    model.fast = model.qv.data.t()
    assert aliases(model) == [".fast"]


def test_fused_experts_are_given_by_their_names():
    gate_up, down = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(2, 3, 2)
    given = dict(expand("model.layers.0.mlp.experts.gate_up_proj", gate_up)) | dict(expand("model.layers.0.mlp.experts.down_proj", down))
    assert sorted(given) == [f"model.layers.0.mlp.experts.{e}.{n}_proj.weight" for e in (0, 1) for n in ("down", "gate", "up")]
    assert torch.equal(given["model.layers.0.mlp.experts.1.up_proj.weight"], gate_up[1, 2:])
    assert dict(expand("model.norm.weight", down)) == {"model.norm.weight": down}


class Steady:
    """A forward pass is launched whenever somebody waits for one."""

    def __init__(self) -> None:
        self.launched = 0

    def wait(self, seen: int, timeout_s: float) -> None:
        assert seen == self.launched
        self.launched += 1


def test_no_forward_pass_has_more_beside_it_than_the_pace_allows():
    passes, beside = Steady(), dict[int, float]()
    pacer = Pacer(2.0, passes)
    for piece in [0.0008, 0.0008, 0.0003, 0.0015, 0.0004, 0.0020, 0.0001] * 20:
        pacer.spend(piece)
        beside[passes.launched] = beside.get(passes.launched, 0.0) + piece
    assert max(beside.values()) <= 0.002 + 1e-9
    assert sum(beside.values()) > 0.7 * 0.002 * passes.launched, "passes are made use of"


def test_a_piece_larger_than_the_pace_goes_alone_and_is_paid_for():
    passes = Steady()
    pacer = Pacer(2.0, passes)
    for piece, begins in [(0.0001, 0), (0.0070, 1), (0.0009, 4), (0.0009, 5), (0.0009, 5)]:
        pacer.spend(piece)
        assert passes.launched == begins
    passes.launched += 100
    pacer.spend(0.0020)
    pacer.spend(0.0010)
    assert passes.launched == 106, "what nobody used of past passes is gone"
    unbounded = Pacer(0.0, passes)
    for _ in range(3):
        unbounded.spend(1.0)
    assert passes.launched == 106


def test_pace_waits_for_the_next_forward_pass():
    passes = Forwards(keep=False, device=torch.device("cpu"))
    pacer = Pacer(2.0, passes)
    pacer.spend(0.001)
    thread = threading.Timer(0.005, lambda: passes.launch_done(passes.launching(), None, 1, False, 0))
    thread.start()
    pacer.spend(0.0015)
    assert passes.launched == 1
    thread.join()
    # Nobody is decoding: the wait ends by itself.
    pacer.spend(0.01)
    pacer.spend(0.01)
    assert passes.launched == 1


def test_shared_regions_must_agree_and_cover_once():
    data = torch.arange(6, dtype=torch.float32)
    named = {"a": data}
    manifest = manifest_of(named)

    def rank(*regions: Region) -> Prepared:
        return Prepared(recorded=True, why="", regions=regions, ignored=(), took_s=0.0)

    def part(first: int, count: int) -> int:
        return tensor_digest(data[first : first + count].view(torch.uint8).numpy(), 4, first)

    left, right = Region(0, 0, 1, 4, 4), Region(0, 4, 1, 2, 2)
    books = DigestBooks(manifest.tensors, [rank(left), rank(left, right)])
    assert books.check(manifest, [[part(0, 4)], [part(0, 4), part(4, 2)]]) == manifest.digest
    with raises(WeightSyncError, tensor="a", rank=1):
        books.check(manifest, [[part(0, 4) ^ 1], [part(0, 4), part(4, 2)]])
    with raises(WeightSyncError, tensor="a", elements=7):
        DigestBooks(manifest.tensors, [rank(left), rank(Region(0, 3, 1, 3, 3))])
