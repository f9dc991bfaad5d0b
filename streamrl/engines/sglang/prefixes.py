"""The key that SGLang's prefix cache files a prompt under: the version whose keys and values the prompt may share.

A worker sends the version that it knows of, and SGLang may prefill the prompt after a commit: then the version is renewed there.
"""

from __future__ import annotations

import re

from streamrl.schemas.versions import Version

_KEY = re.compile(r"streamrl:(\d+\.\d+);(.*)", re.DOTALL)


def prefix_key(version: Version) -> str:
    """`extra_key` of a request whose prompt shares keys and values with prompts of `version` alone."""
    return f"streamrl:{version};"


def renewed_key(key: str | None, version: Version) -> str | None:
    """The same for a newer version, with all that SGLang has put behind it (an adapter, say).

    Keys of other makes stay as they are, and so do those of a newer version: a worker that updates in a pause knows more than the plugin.
    """
    known = _KEY.fullmatch(key or "")
    return key if known is None else prefix_key(max(Version.parse(known[1]), version)) + known[2]
