from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.telemetry.logs import LineFormatter, configure_logging, mask_secrets


@pytest.fixture
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers, root.level = handlers, level
    logging.captureWarnings(False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("url=nats://me:s3cret@host:4222 up", "url=nats://***@host:4222 up"),
        ("token=abc.def next", "token=*** next"),
        ("{'password': 'abc', 'user': 'me'}", "{'password': '***', 'user': 'me'}"),
        ('"password": "abc"', '"password": "***"'),
        ("num_tokens=5 tokens=7 token_ids=3", "num_tokens=5 tokens=7 token_ids=3"),
    ],
)
def test_secrets_are_masked_and_nothing_else(text: str, shown: str) -> None:
    assert mask_secrets(text) == shown


def test_a_message_is_one_line_and_a_traceback_is_masked() -> None:
    formatter = LineFormatter("engine-0")
    record = logging.LogRecord("streamrl.x", logging.WARNING, __file__, 1, "event=lost error=%s", ("a\nb",), None)
    line = formatter.format(record)
    assert line.endswith("WARNING engine-0 streamrl.x: event=lost error=a | b")
    try:
        raise ValueError("password=abc")
    except ValueError:
        record = logging.LogRecord("streamrl.x", logging.ERROR, __file__, 1, "event=crashed", (), sys.exc_info())
    text = formatter.format(record)
    assert "Traceback" in text
    assert "password=***" in text
    assert "abc" not in text


def test_a_process_logs_to_its_file_and_only_once(restored: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        configure_logging("feeder-0", file=tmp_path / "feeder-0.log", stderr=False)
    logging.getLogger("streamrl.test").info("event=issued tasks=%d", 3)
    logging.getLogger("streamrl.test").debug("event=unseen")
    assert [line.partition(" INFO ")[2].split() for line in (tmp_path / "feeder-0.log").read_text().splitlines()] == [
        ["feeder-0", "streamrl.test:", "event=issued", "tasks=3"]
    ]
    assert capsys.readouterr().err == ""
