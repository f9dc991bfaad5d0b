from collections.abc import Callable

import pytest

from streamrl.core.batches import TrainBatch
from tests.support.batches import train_batch


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    return train_batch
