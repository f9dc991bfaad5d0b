"""Columns that a message has only when there is something in them: nothing broken gets through, and what is not said costs nothing."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamrl.errors import SchemaError
from streamrl.schemas.columns import OPTIONAL, arrow_schema, schema_bytes
from streamrl.schemas.decoding import decode_samples, decode_together
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import BlobRef, Branch, TurnSpan
from tests.support.rows import message, plain, sample, table

BLOB = {"name": "a", "sha256": "ab" * 32, "start_row": 0, "num_rows": 4}


def columns(**changes: Any) -> dict[str, list[Any]]:
    """Two samples, of which one has everything that may be said, with some of it changed."""
    turns = (TurnSpan(start=2, length=1, inexact=True, asked_s=1.0, sampling={"min_p": 0.5}), TurnSpan(start=3, length=1))
    said = sample(0, turns=turns, routed_experts=BlobRef(**BLOB), claimed_s=1.0, scored_s=2.0, counters={"cached_tokens": 3.0})
    return table(encode_samples([said, sample(1)])) | changes


def body(values: dict[str, list[Any]]) -> bytes:
    return message(values, arrow_schema(*(name for name in OPTIONAL if name in values)))


def test_what_is_not_said_is_not_on_the_wire() -> None:
    silent, said = encode_samples([sample(0)]), encode_samples([sample(0, claimed_s=1.0)])
    assert silent.startswith(schema_bytes()) and said.startswith(schema_bytes("claimed_s"))
    assert len(silent) < len(said) and decode_samples(silent).batch.num_columns == len(arrow_schema())
    values = table() | {"images": [None, None], "added": ["x", None]}
    schema = pa.schema([*arrow_schema("images"), pa.field("added", pa.utf8())], metadata=arrow_schema().metadata)
    assert decode_samples(message(values, schema)).batch.equals(decode_samples(message(table())).batch, check_metadata=True)
    rows = [sample(0, claimed_s=1.0), sample(0, turns=(TurnSpan(start=2, length=2, inexact=True),)), sample(0)]
    found = decode_together([encode_samples([row]) for row in rows])
    assert found is not None and [plain(part.rows()[0]) for part in found] == [plain(row) for row in rows]
    assert [None if part.inexact is None else part.inexact.tolist() for part in found] == [None, [False, False, True, True], None]
    alone = [decode_samples(encode_samples([row])) for row in rows]
    assert [[part.optional(name) for name in OPTIONAL] for part in found] == [[one.optional(name) for name in OPTIONAL] for one in alone]


SHA = "ab" * 32


def an_image(sha256: str, media_type: str | None, num_bytes: int) -> dict[str, Any]:
    values = {"image_sha256": [sha256], "image_media_type": [media_type], "image_num_bytes": [num_bytes]}
    return {"images": [BLOB | {"num_rows": 1}, None], **{name: [value, None] for name, value in values.items()}}


def blob(column: Any = "routed_experts", **changes: Any) -> dict[str, Any]:
    return {column: [BLOB | changes, None]}


@pytest.mark.parametrize(
    "changes",
    [
        *({"turn_start": [one, None]} for one in ([0, 3], [3, 3], [2, 1], [2, None], [2, 2**31 - 1], None)),
        *({"turn_length": [one, None]} for one in ([1, 0], [1, 2], [1], [2**31 - 1, 1], [1, -1])),
        {"turn_start": [[2], None], "turn_length": [[1], None]},
        {"turn_inexact": [[True], None]},
        {"turn_inexact": [[True, True], [True]]},
        {"turn_asked_s": [[float("nan"), 1.0], None]},
        *({"turn_sampling": [[one, None], None]} for one in ("{", "[1]", '{"a":' + "[" * 100_000)),
        *(blob(**{key: value}) for key, value in (("sha256", "ab"), ("sha256", None), ("name", ""), ("start_row", -1), ("num_rows", None))),
        blob("images", name=None),
        {"image_sha256": [[SHA], None], "image_media_type": [["image/png"], None], "image_num_bytes": [[7], None]},
        {**blob("images", num_rows=1), "image_sha256": [[SHA], None]},
        *map(an_image, ("ab", SHA, SHA, SHA), ("image/png", "text/html", "image/png", None), (7, 7, 0, 7)),
        {"claimed_s": [float("inf"), None]},
        *({"counters": [[("cached_tokens", one)], None]} for one in (float("nan"), None)),
        *({"sampling": [one, None]} for one in ("{", "[1]", '{"min_p":2}', '{"min_q":0.5}', '{"top_k":3}', '{"stop":' + "[" * 100_000)),
        {"sampling": ['{"regex":"a","json_schema":"{}"}', None]},
        {"branch_parent": [0, None]},
        {"branch_shared": [1, None]},
    ],
)
def test_wrong_values_are_refused_alone_and_among_others(changes: dict[str, Any]) -> None:
    assert decode_samples(body(columns())).num_rows == 2
    wrong = body(columns(**changes))
    with pytest.raises(SchemaError) as caught:
        decode_samples(wrong, where="run.samples.main sequence 7")
    assert caught.value.message.endswith("at run.samples.main sequence 7")
    assert decode_together([encode_samples([sample(0)]), wrong]) is None


def test_a_branch_begins_with_what_it_shares_which_its_parent_trains() -> None:
    root = sample(0, num_samples=3)
    branch = {"num_samples": 3, "loss_mask": np.array([0, 0, 0, 1], np.uint8)}
    twig = sample(0, sample=2, branch=Branch(1, 3), **branch)
    rows = [root, sample(0, sample=1, branch=Branch(0, 3), **branch), twig]
    assert [row.branch for row in decode_samples(encode_samples(rows)).rows()] == [None, Branch(0, 3), Branch(1, 3)]
    other = np.array([5, 9, 7, 8], np.int32)
    wrongs = (Branch(0, 4), Branch(0, 0), Branch(0, 9), Branch(1, 3), Branch(2, 3), Branch(-1, 3))
    for wrong in (
        *([root, sample(0, sample=1, branch=one, **branch), twig] for one in wrongs),
        [root, sample(0, sample=1, branch=Branch(0, 3), tokens=other, **branch), sample(0, sample=2, num_samples=3)],
        [sample(1), sample(0, branch=Branch(0, 3))],
    ):
        with pytest.raises(SchemaError) as caught:
            decode_samples(encode_samples(wrong))
        assert "branch" in caught.value.message
