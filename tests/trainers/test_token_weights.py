"""What is kept of each trained token: the policy's own log-prob, importance weight and advantage, of the newest batches, for people."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamrl.algorithms.estimators import token_advantages
from streamrl.config.loss import CorrectionConfig, LossConfig
from streamrl.config.registry import Role
from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import TokenValues
from streamrl.trainers.token_weights import FOLDER, TokenWeights, logprob_distance, read_token_weights, shown
from tests.support.harness import read_ledger, run_to_end
from tests.support.scoring import score
from tests.support.trainers import Rollouts, make
from tests.support.ups import begun
from tests.support.world.world import table_config

HIGH = 0.5


def test_they_are_the_step_s_own(make_either: Callable[..., Any], rollouts: Rollouts, tmp_path: Path) -> None:
    """Against the score of each token by the model before the step, min(pi / mu, high), and what the estimator gives."""
    batch, trainer = rollouts(), make_either(loss=(loss := LossConfig(correction=CorrectionConfig(high=HIGH))))
    before = score(trainer, batch, Role.POLICY)
    advantages = token_advantages(batch, loss).advantages
    assert len(set(advantages[batch.loss_mask])) > 1
    values = trainer.step(batch).tokens
    assert values is not None
    file = TokenWeights(tmp_path / FOLDER, 1 << 20)
    file.put(Version(0, 1), batch, values)
    file.close()
    kept = read_token_weights(tmp_path / FOLDER, Version(0, 1))
    assert sum(map(len, kept.values())) == batch.num_samples
    for n in range(batch.num_samples):
        (one,) = kept[int(batch.tasks[n]), int(batch.rollouts[n])]
        part = slice(batch.offsets[n], batch.offsets[n + 1])
        mask, mu = batch.loss_mask[part], batch.sampler_logprobs[part]
        assert np.isnan(one.weights[~mask]).all() and np.isnan(one.logprobs[~mask]).all()
        assert one.logprobs[mask] == pytest.approx(before[part][mask], abs=2e-5)
        assert one.weights[mask] == pytest.approx(np.minimum(np.exp(before[part] - mu), HIGH)[mask], rel=1e-4)
        assert one.advantages is not None and one.advantages[mask] == pytest.approx(advantages[part][mask], rel=1e-5)
        assert [value is None for value in shown(one.weights)] == (~mask).tolist()
    assert HIGH in {float(value) for found in kept.values() for one in found for value in one.weights[~np.isnan(one.weights)]}


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def write(folder: Path, batch: TrainBatch, *numbers: int, keep_bytes: int) -> None:
    values = TokenValues(*np.repeat([[-1.0], [0.5], [2.0]], batch.num_tokens, axis=1))
    for number in numbers:
        one = TokenWeights(folder, keep_bytes)
        one.put(Version(1, number), batch, values)
        one.close()


def test_only_the_newest_are_kept_and_of_rollouts(rollouts: Rollouts, tmp_path: Path, table_dir: Path, demonstrations: Rollouts) -> None:
    folder = tmp_path / FOLDER
    write(folder, rollouts(), 1, keep_bytes=1 << 20)
    size = (folder / "00000001-e1.arrow").stat().st_size
    write(folder, rollouts(), 2, 3, 4, keep_bytes=2 * size)
    assert files(folder) == ["00000003-e1.arrow", "00000004-e1.arrow"]
    write(folder, rollouts(), 2, keep_bytes=1)
    assert files(folder) == ["00000002-e1.arrow"], "a resumed trainer has gone back"
    write(folder, rollouts(), 5, keep_bytes=0)
    assert files(folder) == ["00000002-e1.arrow"]
    assert make(table_dir, backend="table").step(demonstrations()).tokens is None


def test_a_folder_that_cannot_be_written_is_said_once(rollouts: Rollouts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    batch = rollouts()
    values = TokenValues(*np.zeros((3, batch.num_tokens)))
    one = TokenWeights(tmp_path / FOLDER, 1 << 20)
    with caplog.at_level(logging.WARNING):
        for number in range(1, 20):
            one.put(Version(0, number), batch, values)
        one.close()
    assert [record.getMessage() for record in caplog.records] != []
    assert sum("token_weights_not_written" in record.getMessage() for record in caplog.records) == 1


def test_the_distance_of_log_probs_is_over_tokens_that_both_have(rollouts: Rollouts, tmp_path: Path) -> None:
    batch, folder = rollouts(), tmp_path / FOLDER
    write(folder, batch, 1, keep_bytes=1 << 20)
    kept = read_token_weights(folder, Version(1, 1))
    ours = np.full(batch.num_tokens, -1.0)
    values = TokenValues(ours, ours, ours)
    assert logprob_distance(kept, batch, values) == 0.0
    trained = np.flatnonzero(batch.loss_mask)
    ours[trained[0]], ours[~batch.loss_mask] = -3.0, 9.0
    assert logprob_distance(kept, batch, values) == pytest.approx(2.0 / len(trained))
    ours[trained[1]] = np.nan
    assert logprob_distance(kept, batch, values) == pytest.approx(2.0 / (len(trained) - 1))
    assert logprob_distance({}, batch, values) is None
    assert logprob_distance({key: found[:0] for key, found in kept.items()}, batch, values) is None


def test_a_file_of_an_earlier_build_has_no_advantages(rollouts: Rollouts, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    write(folder, rollouts(), 1, keep_bytes=1 << 20)
    path = folder / "00000001-e1.arrow"
    with pa.ipc.open_file(path) as reader:
        former = reader.read_all().drop_columns("advantages")
    with pa.ipc.new_file(path, former.schema) as writer:
        writer.write_table(former)
    kept = read_token_weights(folder, Version(1, 1))
    assert kept and all(one.advantages is None and 0.5 in one.weights for found in kept.values() for one in found)


@pytest.mark.parametrize("body", [b"", b"ARROW1", b"\0" * 1000])
def test_a_file_that_is_torn_gives_nothing(rollouts: Rollouts, tmp_path: Path, body: bytes) -> None:
    folder = tmp_path / FOLDER
    write(folder, rollouts(), 1, keep_bytes=1 << 20)
    whole = (folder / "00000001-e1.arrow").read_bytes()
    for torn in (body, whole[: len(whole) // 2], whole[:-1]):
        (folder / "00000001-e1.arrow").write_bytes(torn)
        assert read_token_weights(folder, Version(1, 1)) == {}
    assert read_token_weights(folder, Version(1, 2)) == {}


@pytest.mark.process
async def test_a_run_leaves_those_of_its_batches(tmp_path: Path) -> None:
    """Each file is of an entry's groups, with the mean that the ledger has. None is written while the one before still is."""
    async with begun(tmp_path, table_config(tmp_path, run={"steps": 6}, trainer={"checkpoint_every": 4})) as (run, config, bus):
        await run_to_end(config, run, bus)
        entries = await read_ledger(bus, config.run.name)
    assert len(entries) == 6
    assert read_token_weights(run.path / FOLDER, entries[0].version) != {}
    for entry in entries:
        if not (kept := read_token_weights(run.path / FOLDER, entry.version)):
            continue
        assert {task for task, _ in kept} == {group.task for group in entry.used}
        trained = np.concatenate([one.weights[~np.isnan(one.weights)] for found in kept.values() for one in found])
        assert len(trained) == entry.metrics["rollout/tokens_trained"] and (trained >= 0).all()
