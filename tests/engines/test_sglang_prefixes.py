"""Keys of the prefix cache go with the version, and never back."""

from __future__ import annotations

import pytest

from streamrl.engines.sglang.prefixes import prefix_key, renewed_key
from streamrl.schemas.versions import Version


@pytest.mark.parametrize(
    ("key", "renewed"),
    [
        ("streamrl:0.3;", "streamrl:0.7;"),
        ("streamrl:0.3;adapter;x\ny", "streamrl:0.7;adapter;x\ny"),
        ("streamrl:0.7;", "streamrl:0.7;"),
        ("streamrl:0.12;", "streamrl:0.12;"),
        ("streamrl:1.0;adapter", "streamrl:1.0;adapter"),
        ("streamrl:latest;", "streamrl:latest;"),
        ("a user's", "a user's"),
        ("", ""),
        (None, None),
    ],
)
def test_a_key_is_renewed_for_newer_versions_alone(key: str | None, renewed: str | None) -> None:
    assert renewed_key(key, Version(0, 7)) == renewed


def test_every_version_has_a_key_of_its_own() -> None:
    assert len({prefix_key(Version(epoch, number)) for epoch in range(3) for number in range(20)}) == 60
