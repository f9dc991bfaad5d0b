"""Errors of the tree, matched by type and values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from streamrl.errors import StreamRLError

E = TypeVar("E", bound=StreamRLError)


@contextmanager
def raises(kind: type[E], /, **values: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """`pytest.raises` for an error that has these among its `values`, each equal; `unittest.mock.ANY` where only the name counts."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    found = {name: error.values[name] for name in values if name in error.values}
    assert found == values, f"expected {values}, got {error.values} in {error!r}"
