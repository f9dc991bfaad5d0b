"""Verbs of the command line, called in this process."""

from typing import NamedTuple

import pytest

from streamrl.cli import main


class Printed(NamedTuple):
    out: str
    err: str


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Printed:
    """Return what a verb writes to stdout and stderr; it must end with this code."""
    capsys.readouterr()
    ended = main([str(word) for word in words])
    out, err = capsys.readouterr()
    found = Printed(str(out), str(err))
    assert ended == code, found
    return found
