"""The copy of a checkpoint is made beside the next pass: it is of the state that was saved, whatever the next step writes."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.config.loss import CriticConfig, KLConfig, LossConfig
from streamrl.errors import TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers.torch.host_copies import HostCopies
from streamrl.trainers.torch.snapshot import HostReader
from streamrl.trainers.torch.trainer import COPY_WAIT
from tests.support import trainers
from tests.support.trainers import Models, Rollouts


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
    trainer = make(make_model("bfloat16"))
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(TrainingError):
        trainer.save(tmp_path / "file" / "at", b"", version=Version()).result()
    assert trainer.step(rollouts()).finite
