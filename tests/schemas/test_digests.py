"""The digest of a body against the values that the authors of XXH3 publish for it."""

from streamrl.schemas.digests import body_digest


def test_known_values() -> None:
    # xxhsum -H2 of no bytes, and of "a".
    assert body_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert body_digest(b"a") == "a96faf705af16834e6c632b61e964e1f"
    assert body_digest(memoryview(b"xayz")[1:2]) == body_digest(b"a")
