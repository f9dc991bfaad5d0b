import pytest

from tests.bridges.retrain.reference import Guess


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No environment of another test is among those that were made."""
    Guess.made = []
