"""Verbs of the command line, called in this process."""

import pytest

from streamrl.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    """What a verb writes to stdout and stderr; it must end with this code."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code, capsys.readouterr().err
    return capsys.readouterr()
