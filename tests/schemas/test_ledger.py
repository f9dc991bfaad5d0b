"""What the stream decides by stands in fields of its own; entries of earlier builds have it among their metrics."""

import pytest

from streamrl.monitor.decoded import LedgerLine
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.ledger import Decisive, LedgerEntry, decided_by
from streamrl.schemas.versions import Version

EARLIER = {"train/answer_probability": 0.75, "rollout/raw_reward": 0.25}
CASES = {
    "new": ({"score": 0.5, "reward": -1.0}, {}, Decisive(0.5, -1.0)),
    "earlier": ({}, EARLIER, Decisive(0.75, 0.25)),
    "zero is a number": ({"score": 0.0, "reward": 0.0}, EARLIER, Decisive(0.0, 0.0)),
    "one of them": ({"reward": 0.5}, EARLIER, Decisive(0.75, 0.5)),
    "neither": ({}, {"train/loss": 0.5}, Decisive(0.0, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_fields_come_before_metrics(name: str) -> None:
    fields, metrics, expected = CASES[name]
    entry = LedgerEntry(
        run="run", trainer="main", version=Version(0, 4), source="main", used=(), cursor=9, granted=4, retired=2, metrics=metrics, **fields
    )
    assert decided_by(decode(encode(entry), LedgerEntry)) == expected
    assert decided_by(decode(encode(entry), LedgerLine)) == expected, "what a view decodes of it"


def test_what_is_not_set_is_not_on_the_wire() -> None:
    entry = LedgerEntry(run="run", trainer="main", version=Version(0, 4), source="main", used=(), cursor=9, granted=4, retired=2)
    assert b"score" not in encode(entry) and b"reward" not in encode(entry)
