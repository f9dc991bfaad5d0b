"""What an engine says about a completion beyond its tokens: `Chunk.extras` and the same as fields of `meta_info`.

Keys, all on a completion's last chunk and left out where there is nothing to say: `cached_tokens`, `num_retractions`, `spec_verify_ct`,
`spec_num_proposed_drafts`, `spec_num_correct_drafts` (numbers), `began_s` (Unix seconds), `routed_experts` (`RoutedExperts`),
`candidates` (`Candidates`, of each token of the completion), `inexact_versions` (True) and `matched` (the stop string that ended it).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.engines.experts import from_text
from streamrl.engines.protocol import Chunk
from streamrl.engines.wire import MetaInfo
from streamrl.schemas.candidates import Candidates
from streamrl.schemas.experts import RoutedExperts

NUMBERS = ("cached_tokens", "num_retractions", "spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
EXPERTS = "routed_experts"
CANDIDATES = "candidates"
INEXACT = "inexact_versions"
MATCHED = "matched"
BEGAN = "began_s"
"""When the engine began to compute it, by its own clock."""


def counters_of(extras: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among a chunk's extras, for `Sample.counters`."""
    return {name: float(extras[name]) for name in NUMBERS if name in extras}


def read_extras(meta: MetaInfo) -> dict[str, Any]:
    """The extras in a last result of ours, or of SGLang's own (without routed experts, whose shape it does not say).

    Raises:
        SchemaError: routed experts that do not fit their shape, or candidates that are none.
    """
    extras: dict[str, Any] = {name: value for name in (*NUMBERS, BEGAN) if (value := getattr(meta, name))}
    if meta.routed_experts is not None and meta.routed_experts_shape is not None:
        extras[EXPERTS] = from_text(meta.routed_experts_dtype, meta.routed_experts_shape, meta.routed_experts)
    if meta.candidates is not None:
        extras[CANDIDATES] = Candidates.from_texts(*meta.candidates)
    if meta.inexact_versions:
        extras[INEXACT] = True
    if isinstance(matched := (meta.finish_reason or {}).get("matched"), str):
        extras[MATCHED] = matched
    return extras


def write_extras(extras: Mapping[str, Any], meta: MetaInfo) -> None:
    """Put a chunk's extras into the result that is sent."""
    for name in (*NUMBERS, BEGAN):
        if name in extras:
            setattr(meta, name, extras[name])
    if (experts := extras.get(EXPERTS)) is not None:
        meta.routed_experts, meta.routed_experts_dtype, meta.routed_experts_shape = experts.text(), experts.dtype, experts.shape
    if (candidates := extras.get(CANDIDATES)) is not None:
        meta.candidates = candidates.texts()
    meta.inexact_versions = bool(extras.get(INEXACT))


def restore(chunk: Chunk) -> Chunk:
    """A chunk as it was before it went through MessagePack, which knows no types within `extras`."""
    for name, kind in ((EXPERTS, RoutedExperts), (CANDIDATES, Candidates)):
        if name in chunk.extras:
            chunk.extras[name] = msgspec.convert(chunk.extras[name], kind)
    return chunk
