"""The key that SGLang's prefix cache files a prompt under: the version whose keys and values the prompt may share.

A worker sends the version that it knows of, and SGLang may prefill the prompt after a commit: then the version is renewed there.
"""

from __future__ import annotations

from streamrl.schemas.versions import Version

_BEGIN = "streamrl:"
_END = ";"


def prefix_key(version: Version) -> str:
    """`extra_key` of a request whose prompt shares keys and values with prompts of `version` alone."""
    return f"{_BEGIN}{version}{_END}"


def renewed_key(key: str | None, version: Version) -> str | None:
    """The same for another version, with all that SGLang has put behind it (an adapter, say); keys of other makes stay as they are."""
    if key is None or not key.startswith(_BEGIN):
        return key
    return prefix_key(version) + key.partition(_END)[2]
