"""Errors that are refusals: of what kind, in which words, and with what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.errors import E, raises


@contextmanager
def refused(kind: type[E], /, *said: str, hint: str | bool = "", **values: object) -> Iterator[None]:
    """`raises` for an error whose message has all of these words, and whose hint those, or is there at all with `True`."""
    with raises(kind, **values) as caught:
        yield
    error = caught.value
    assert [words for words in said if words not in error.message] == [], error.message
    assert error.hint if hint is True else str(hint or "") in str(error.hint or ""), error.hint
