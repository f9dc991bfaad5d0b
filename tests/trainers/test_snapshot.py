"""Copies of parameters: the ring of snapshot buffers, what is kept, reused and waited for; a checkpoint's copy beside the next pass."""

import gc
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from streamrl.config.loss import CriticConfig, KLConfig, LossConfig
from streamrl.errors import TrainingError
from streamrl.schemas.versions import Version
from streamrl.tensors.buckets import check_copying
from streamrl.tensors.digest_torch import NamedDigester, NamedDigests
from streamrl.tensors.mesh import Mesh
from streamrl.trainers.torch import snapshot
from streamrl.trainers.torch.saving import HostCopies
from streamrl.trainers.torch.sharding import Held
from streamrl.trainers.torch.snapshot import Buffer, HostReader, Published, SnapshotBytes, SnapshotRing
from streamrl.trainers.torch.trainer import COPY_WAIT
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard
from streamrl.weights.ranks import RankContent
from tests.support import trainers
from tests.support.errors import raises
from tests.support.trainers import Models, Rollouts

CPU = torch.device("cpu")


class Readers:
    """A guard whose readers finish when they are asked to."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def revoke(self, patience_s: float) -> bool:
        self.asked.append(patience_s)
        return True


def ring(slots: int, parameter: torch.Tensor, patience_s: float = 5.0) -> SnapshotRing:
    parameters = [("w", parameter), ("bias", parameter[0])]
    return SnapshotRing(parameters, CPU, slots=slots, reader_patience_s=1.5, holder_patience_s=patience_s)


def values(shards: list[Shard]) -> list[float]:
    return [shard.host().view("<f4")[0] for shard in shards]


def test_a_published_buffer_is_rewritten_only_after_its_readers_were_asked() -> None:
    snapshots = ring(2, torch.zeros(2, 3))
    first, second = Readers(), Readers()
    for guard in (first, second):
        snapshot = snapshots.take()[0].data.snapshot  # type: ignore[union-attr]
        snapshot.guard(guard)
        del snapshot
        assert (first.asked, second.asked) == ([], [])
    snapshots.take()
    assert (first.asked, second.asked) == ([1.5], [])  # the older version goes
    snapshots.take()
    assert (first.asked, second.asked) == ([1.5], [])  # a buffer without readers goes first


def test_a_snapshot_waits_for_the_publisher_of_the_one_before() -> None:
    parameter = torch.zeros(2, 3)
    snapshots = ring(1, parameter)
    held = [snapshots.take()]
    taken: list[list[Shard]] = []
    waiting = threading.Thread(target=lambda: taken.append(snapshots.take()))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    parameter.fill_(2)
    held.clear()
    gc.collect()
    waiting.join()
    assert values(taken[0]) == [2, 2]


def test_a_buffer_that_is_referenced_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    snapshots = ring(1, torch.zeros(2, 3), patience_s=0.01)
    held = snapshots.take()
    guard = Readers()
    held[0].data.snapshot.guard(guard)  # type: ignore[union-attr]
    with raises(TrainingError, slots=1):
        snapshots.take()
    assert guard.asked == []
    monkeypatch.setattr(snapshot, "WARN_AFTER_S", 0.02)
    snapshots = ring(1, torch.zeros(2, 3), patience_s=0.1)
    held = snapshots.take()
    with raises(TrainingError, slots=1):
        snapshots.take()
    assert "event=waiting_for_snapshot_buffer buffers=1" in caplog.text
    assert len(held) == 2


def test_snapshots_have_the_digests_of_their_bytes() -> None:
    given = {"a": torch.randn(3, 4).bfloat16(), "b": torch.randn(3), "c": torch.randn(2, 2).double(), "t": torch.randn(4, 6).t()}
    snapshots = SnapshotRing(list(given.items()), CPU, slots=1)
    host = Content([msgspec.structs.replace(shard, data=shard.host()) for shard in snapshots.take()])
    assert Content(snapshots.take()).tensors == host.tensors
    assert [bool(spec.words) for spec in host.tensors] == [True, False, True, True]


def test_rows_of_parameters_are_published_in_their_type_with_their_part_of_the_digests() -> None:
    """What two ranks hold in float32 is published in bfloat16: bytes and digests are those of the whole."""
    whole = {"w": torch.randn(5, 8), "odd": torch.randn(5, 3), "b": torch.randn(1)}

    def rank(low: int, high: int) -> RankContent:
        held = []
        for name, w in whole.items():
            first, end = min(low, len(w)), min(high, len(w))
            held.append(Published(name, w[first:end].clone(), torch.bfloat16, tuple(w.shape), (first, 0)[: w.ndim]))
        return RankContent(SnapshotRing(held, CPU, slots=1).take())

    contents = [rank(0, 3), rank(3, 6)]
    alone = Content(SnapshotRing([(name, w.bfloat16()) for name, w in whole.items()], CPU, slots=1).take())
    for spec in alone.tensors:
        parts = [one for content in contents for one in content.slices if one.name == spec.name]
        assert sum(int(one.digest, 16) for one in parts) % 2**64 == int(spec.digest, 16)
        if spec.name == "w":
            assert sum(int(one.words, 16) for one in parts) % 2**64 == int(spec.words, 16)
    assert [one.words for content in contents for one in content.slices if one.name == "odd"] == ["", ""]


def test_known_digests_go_with_the_snapshot_and_what_they_lack_is_computed() -> None:
    parameter = torch.randn(2, 4)
    parameters = {"w": parameter, "bias": parameter[0]}
    known = NamedDigester(parameters).digests()
    snapshots = SnapshotRing(list(parameters.items()), CPU, slots=2)
    before = Content(snapshots.take(known)).tensors
    assert before == Content(snapshots.take()).tensors
    parameter[1, 3] += 1
    assert Content(snapshots.take(known)).tensors == before
    (spec,) = [spec for spec in Content(snapshots.take()).tensors if spec.name == "w"]
    assert next(one for one in before if one.name == "w").words != spec.words
    parameters = {"t": torch.randn(4, 6).t()}
    known = NamedDigester(parameters).digests()
    assert known.words == {}
    (spec,) = Content(SnapshotRing(list(parameters.items()), CPU, slots=1).take(known)).tensors
    assert int(spec.digest, 16) == known.elements["t"]
    assert spec.words


def test_buckets_follow_each_other_as_the_parameters_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are cut, what is marked is complete, and a mark tells one version of a buffer from the next."""
    parameters = [(name, torch.randn(size)) for name, size in (("c", 100), ("a", 30), ("b.10", 0), ("b.9", 200), ("d", 3))]
    for limit, ends in ((1 << 30, (1420,)), (1, (128, 960, 1408, 1420)), (960, (960, 1420))):
        monkeypatch.setattr("streamrl.trainers.torch.snapshot.BUCKET_BYTES", limit)
        snapshots = SnapshotRing(parameters, CPU, slots=1)
        for number in (1, 2):
            snapshot = snapshots.take()[0].data.snapshot  # type: ignore[union-attr]
            (buffer,) = snapshots.buffers
            copying = snapshot.copying
            assert (copying.stamp, copying.ends, copying.at) == (number, ends, 1472)
            check_copying(copying, snapshot.nbytes, where="v")
            assert buffer.memory[copying.at :].view(torch.int64).tolist() == [number] * len(copying.ends)
            del snapshot


def test_a_bucket_is_marked_when_it_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.trainers.torch.snapshot.BUCKET_BYTES", 64)
    seen: list[tuple[int, list[int], list[float]]] = []
    copy = SnapshotRing.copy_bucket

    def watched(self: SnapshotRing, buffer: Buffer, number: int) -> None:
        copy(self, buffer, number)
        seen.append((number, buffer.marks.tolist(), [float(view[0]) for view in buffer.views]))

    monkeypatch.setattr(SnapshotRing, "copy_bucket", watched)
    SnapshotRing([("b", torch.full((16,), 2.0)), ("a", torch.full((16,), 1.0))], CPU, slots=1).take()
    assert seen == [(0, [1, 0], [0.0, 1.0]), (1, [1, 1], [2.0, 1.0])]


def test_a_snapshot_keeps_its_values_and_frees_its_buffer() -> None:
    parameter = torch.zeros(2, 3)
    snapshots = ring(2, parameter)
    held = snapshots.take()
    for step in range(1, 5):
        parameter.fill_(step)
        assert values(snapshots.take()) == [step, step]
        assert values(held) == [0, 0]
    assert len(snapshots.buffers) == 2
    parameter = torch.zeros(2, 3)
    shards = ring(1, parameter).shards()
    parameter.fill_(7)
    assert values(list(shards)) == [7, 7]
    shard = ring(1, torch.zeros(2, 3)).take()[0]
    with raises(TrainingError, shape=(2, 3), got=(1, 3)):
        shard.data.digest(4, (2, 3), (0, 0), (1, 3))  # type: ignore[union-attr]


SHAPES = {
    "model.embed_tokens.weight": (301, 12),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 8, 6),
    "model.layers.0.mlp.experts.down_proj": (4, 6, 4),
    "model.layers.0.self_attn.q_proj.weight": (7, 3),
    "model.layers.0.self_attn.sink": (1, 5),
    "model.norm.weight": (12,),
    "lm_head.weight": (64, 16),
}
"""Rows that are no whole words, experts that are named one by one, and a tensor of which other ranks hold nothing."""


class Part(NamedTuple):
    """One of the ranks, without the others: nothing here asks for them."""

    mesh: Mesh
    part: int
    sharded: bool = True


def held(part: int, shards: int) -> Held:
    """Rows in float32, published in bfloat16, the head as it is."""
    mesh = Mesh(shard=shards)
    rows = {name: torch.randn(len(mesh.rows(shape[0], part)), *shape[1:]) for name, shape in SHAPES.items()}
    parameters = [(name, torch.nn.Parameter(value)) for name, value in rows.items()]
    types = {name: torch.float32 if name.startswith("lm_head") else torch.bfloat16 for name in SHAPES}
    parallel: Any = Part(mesh, part)
    made = Held(parameters, types, parallel, "qwen3_moe")
    made._shapes.update(SHAPES)  # which FSDP2's tensors say
    return made


def of_snapshot(shards: list[Shard]) -> NamedDigests:
    data = shards[0].data
    assert isinstance(data, SnapshotBytes)
    return data.snapshot.digests()


def test_digests_of_rounded_rows_are_those_of_the_snapshot() -> None:
    """And all of them: else the ring would wait for its copy and make them again, before a rank's part is handed out."""
    for part, shards in [(part, count) for count in (2, 3, 8) for part in range(count)]:
        torch.manual_seed(part)
        model = held(part, shards)
        snapshots, known = SnapshotRing(model.published(), CPU, slots=3), model.digests()
        assert of_snapshot(snapshots.take(known)) is known
        assert of_snapshot(snapshots.take()) == known, (part, shards)
        assert any(known.words.values()) and len(known.words) < len(known.elements)


def make(directory: Path, *, only_steps: int = 0, every: int = 1) -> Any:
    """Parameters of bfloat16 with masters, a critic that may step alone at first, and a reference that may be renewed."""
    critic = CriticConfig(learning_rate=1e-3, only_steps=only_steps)
    loss = LossConfig(advantage="ppo", critic=critic, kl=KLConfig(loss_coef=0.1, reference_every=every))
    return trainers.make(directory, loss, dtype="bfloat16")


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No copy is made before somebody waits for it: until then the next step does what it can."""
    waited, read, settle = threading.Event(), HostReader.read, HostCopies.settle

    def late(self: HostReader, source: torch.Tensor, out: np.ndarray) -> None:
        assert waited.wait(60)
        read(self, source, out)

    def says(self: HostCopies) -> float:
        waited.set()
        return settle(self)

    monkeypatch.setattr(HostReader, "read", late)
    monkeypatch.setattr(HostCopies, "settle", says)
    return waited


@pytest.mark.parametrize(("only_steps", "every"), [(0, 0), (0, 1), (5, 0)], ids=["policy", "reference", "critic"])
def test_a_checkpoint_is_of_the_moment_it_was_asked_for(
    make_model: Models, rollouts: Rollouts, held_back: threading.Event, tmp_path: Path, only_steps: int, every: int
) -> None:
    directory = make_model("bfloat16")
    trainer, undisturbed, again = (make(directory, only_steps=only_steps, every=every) for _ in range(3))
    for step in range(2):
        assert trainer.step(rollouts(step)) == undisturbed.step(rollouts(step))
    saved = trainer.save(tmp_path / "at", b"at", version=Version(0, 2))
    assert not saved.done() and not held_back.is_set()
    result = trainer.step(rollouts(2))
    assert COPY_WAIT in result.times
    saved.result()
    assert COPY_WAIT not in trainer.step(rollouts(3)).times
    assert result == undisturbed.step(rollouts(2))
    # All of the state: the next steps from it are those that came next.
    assert again.load(tmp_path / "at") == b"at"
    assert again.step(rollouts(2)) == result


def test_a_load_waits_for_copies_and_a_checkpoint_that_cannot_be_begun_holds_nobody_up(
    make_model: Models, rollouts: Rollouts, held_back: threading.Event, tmp_path: Path
) -> None:
    directory = make_model("bfloat16")
    trainer, other = make(directory), make(directory)
    held_back.set()
    other.save(tmp_path / "first", b"first", version=Version()).result()
    trainer.step(rollouts())
    digest = trainer.digest()
    held_back.clear()
    saved = trainer.save(tmp_path / "at", b"at", version=Version(0, 1))
    assert trainer.load(tmp_path / "first") == b"first"
    saved.result()
    other.load(tmp_path / "at")
    assert other.digest() == digest != trainer.digest()
    trainer = make(directory)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(TrainingError):
        trainer.save(tmp_path / "file" / "at", b"", version=Version()).result()
    assert trainer.step(rollouts()).finite
