"""Bytes that were cut, changed or never were a message are refused, or are a valid message."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.schemas.decoding import decode_samples, decode_together
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import TurnSpan
from tests.support.rows import sample


def opened(data: bytes) -> SampleBatch | None:
    """A valid batch, all of whose rows can be read, or None."""
    try:
        batch = decode_samples(data, where="here")
        batch.rows()
    except SchemaError as error:
        assert "here" in error.message or "JSON" in error.message
        return None
    assert len(batch.tokens) == len(batch.token_versions()) == len(batch.loss_mask) == len(batch.logprobs)
    return batch


def test_truncated_bytes() -> None:
    body = encode_samples([sample(0), sample(1)])
    for end in range(0, len(body) - 8, 37):
        assert opened(body[:end]) is None


@given(data=st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    assert opened(data) is None


@given(seed=st.integers(0, 2**32), count=st.integers(1, 6))
@settings(max_examples=500, deadline=None)
def test_mutated_bytes_are_refused_or_valid(seed: int, count: int) -> None:
    said = {"turns": (TurnSpan(start=2, length=2, inexact=True, asked_s=1.0),), "counters": {"a": 1.0}} if seed % 2 else {}
    body = bytearray(encode_samples([sample(0), sample(1, label={"a": 1}, **said)]))
    random = np.random.default_rng(seed)
    for place in random.integers(0, len(body), count):
        body[place] = random.choice([0, 1, 127, 128, 255, body[place] ^ (1 << int(random.integers(8)))])
    opened(bytes(body))
    together = decode_together([encode_samples([sample(0)]), bytes(body)])
    if together is not None:
        alone, among_others = decode_samples(bytes(body)).batch, together[1].batch
        # Their text: a mutated time may be NaN, which equals nothing.
        assert repr(alone.to_pydict()) == repr(among_others.to_pydict()), "what passes among others passes by itself"
