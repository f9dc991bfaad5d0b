import pytest

from tests.support.preloaded import Preloaded


@pytest.fixture(autouse=True)
def what_is_forked_ends_with_the_session(preloaded: Preloaded) -> None:
    """The session waits for it, so its processor time is counted."""
