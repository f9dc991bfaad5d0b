from collections.abc import Callable

import pytest

from streamrl.core.batches import TrainBatch
from tests.support.batches import train_batch

MakeBatch = Callable[..., TrainBatch]


@pytest.fixture
def make_batch() -> MakeBatch:
    return train_batch
