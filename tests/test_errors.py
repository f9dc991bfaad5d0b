"""Errors go between processes: whatever a program decides by is there on the other side."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from streamrl import errors
from streamrl.errors import BatchDiffers, EngineDied, EngineError, EngineUnavailable, LogTruncated, OutOfMemory, StreamRLError

FACTS: dict[type[StreamRLError], dict[str, Any]] = {
    BatchDiffers: {"version": "0.7", "what": "task 3 was in the batch", "sequences": (4, 9)},
    OutOfMemory: {"micro_tokens": 8192, "number": 3},
    LogTruncated: {"needed": 4, "first": 9},
}
TREE = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StreamRLError)]


@pytest.mark.parametrize("kind", TREE)
def test_an_error_survives_pickling(kind: type[StreamRLError]) -> None:
    facts = FACTS.get(kind, {})
    error = pickle.loads(pickle.dumps(kind("expected 1, got 2", hint="count again", subject="a.b", **facts)))
    assert type(error) is kind and str(error) == "expected 1, got 2\nhint: count again"
    assert error.values == {"subject": "a.b", **facts}
    assert {name: getattr(error, name) for name in facts} == facts


def test_whoever_catches_engine_errors_catches_engines_that_are_away_and_dead() -> None:
    assert issubclass(EngineDied, EngineUnavailable) and issubclass(EngineUnavailable, EngineError)


def test_a_stream_that_is_another_one_needs_no_message() -> None:
    gone = LogTruncated("expected stream a, got b")
    assert (gone.needed, gone.first) == (None, None)


def test_every_class_is_in_the_drawing() -> None:
    drawing = (errors.__doc__ or "").partition("```text\n")[2].partition("```")[0]
    assert {word for word in drawing.split() if word[0].isupper() and word in vars(errors)} == {kind.__name__ for kind in TREE}
