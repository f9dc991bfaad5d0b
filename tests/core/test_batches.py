"""Batches from lists, and the bytes of their arrays."""

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from streamrl.core.batch_bytes import pack, unpack
from streamrl.core.batches import TrainBatch
from streamrl.errors import SchemaError, TrainingError
from streamrl.schemas.versions import Version
from tests.support.errors import raises


def test_everything_is_laid_out_sample_by_sample() -> None:
    batch = TrainBatch.from_lists(
        [[5, 6], [5], []],
        [[7, 8], [], [9]],
        rewards=[1.0, 0.0, 2.0],
        sampler_logprobs=[[-0.5, -0.25], [], [-1.0]],
        loss_mask=[[True, False], [], [False]],
        staleness=[[2, 1], [], [3]],
        tasks=[4, 4, 2],
        temperature=0.5,
        top_p=[0.9, 1.0, 0.8],
        kind="sft",
        version=Version(1, 3),
        stage_step=2,
    )
    assert batch.tokens.tolist() == [5, 6, 7, 8, 5, 9]
    assert batch.offsets.tolist() == [0, 4, 5, 6]
    assert batch.loss_mask.tolist() == [False, False, True, False, False, False]
    assert batch.sampler_logprobs.tolist() == [0, 0, -0.5, -0.25, 0, -1.0]
    assert batch.staleness.tolist() == [0, 0, 2, 1, 0, 3]
    assert batch.temperature.tolist() == [0.5] * 6
    assert batch.top_p.tolist() == [np.float32(0.9)] * 4 + [1.0, np.float32(0.8)]
    assert (batch.top_k.tolist(), batch.rewards.tolist()) == ([-1] * 6, [1.0, 0.0, 2.0])
    assert (batch.tasks.tolist(), batch.rollouts.tolist()) == ([4, 4, 2], [0, 1, 0])
    assert (batch.kind, batch.version, batch.stage_step) == ("sft", Version(1, 3), 2)
    dtypes = {name: getattr(batch, name).dtype for name in ("tokens", "offsets", "loss_mask", "sampler_logprobs", "staleness", "rewards")}
    assert dtypes == {
        "tokens": np.int32,
        "offsets": np.int64,
        "loss_mask": np.bool_,
        "sampler_logprobs": np.float32,
        "staleness": np.int32,
        "rewards": np.float64,
    }


def test_what_is_left_out_has_its_default_and_a_group_stands_in_one_piece() -> None:
    batch = TrainBatch.from_lists([[5]] * 2, [[7, 8], [9]])
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert not batch.sampler_logprobs.any() and not batch.staleness.any()
    assert np.isnan(batch.rewards).all()
    assert (batch.tasks.tolist(), batch.rollouts.tolist(), batch.kind, batch.version) == ([0, 1], [0, 0], "rl", Version())
    batch = TrainBatch.from_lists([], [])
    assert (batch.num_samples, batch.num_tokens, batch.offsets.tolist()) == (0, 0, [0])
    with raises(TrainingError, field="tasks"):
        TrainBatch.from_lists([[5]] * 3, [[7]] * 3, tasks=[0, 1, 0])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"prompts": [[5]]}, "prompts"),
        ({"rewards": [1.0]}, "rewards"),
        ({"sampler_logprobs": [[-1.0], [-1.0]]}, "sampler_logprobs"),
        ({"loss_mask": [[True, True]]}, "loss_mask"),
        ({"tasks": [0, 1, 2]}, "tasks"),
        ({"rollouts": [0]}, "rollouts"),
        ({"temperature": [1.0]}, "temperature"),
    ],
)
def test_lists_of_other_lengths_are_refused(changes: dict[str, Any], name: str) -> None:
    given: dict[str, Any] = {"prompts": [[5]] * 2, "answers": [[7, 8], [9]], **changes}
    with raises(TrainingError, field=name):
        TrainBatch.from_lists(**given)


class Pair(msgspec.Struct, frozen=True, tag=True):
    name: str
    first: npt.NDArray[np.float32]
    second: npt.NDArray[Any] | None = None


class Other(msgspec.Struct, frozen=True, tag=True):
    number: int


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, np.nan, -0.0], np.float32),
        np.zeros((0, 3), np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([True, False]),
    ],
)
def test_arrays_come_back_bit_by_bit_and_may_be_written(array: npt.NDArray[Any]) -> None:
    back = unpack(pack(Pair("x", np.ones(2, np.float32), array)), Pair | Other)
    assert (back.name, back.second.dtype, back.second.shape) == ("x", array.dtype, array.shape)
    assert back.second.tobytes() == array.tobytes()
    back.second[...] = 0


def test_nothing_that_could_run_code_passes() -> None:
    with raises(SchemaError, dtype="object"):
        pack(Pair("x", np.array([print], object)))
    forged = msgspec.msgpack.encode({"type": "Pair", "name": "x", "first": ["|O", [1], b"12345678"]})
    with pytest.raises(SchemaError, match="numbers or booleans"):
        unpack(forged, Pair | Other)
    short = msgspec.msgpack.encode({"type": "Pair", "name": "x", "first": ["<f4", [3], b"1234"]})
    with pytest.raises(SchemaError, match=r"\(3,\) of float32, got 4"):
        unpack(short, Pair | Other)
