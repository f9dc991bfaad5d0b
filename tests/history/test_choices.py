"""How a version was computed, out of its entry: what a replay says of a difference, and what a branch takes over from its parent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streamrl.config.tree import Config, TrainerConfig
from streamrl.consumers.training.steps import Cut, recorded_cut
from streamrl.history.branch_fold import parents_cut
from streamrl.history.replay_report import differing_choices
from streamrl.schemas.ledger import Choices, LedgerEntry
from streamrl.schemas.versions import Version

PACKED = Choices(attention="packed", compiled=True, kept_layers=4, row_length=8192)


def entry(choices: Choices | None, **more: Any) -> LedgerEntry:
    own = {} if choices is None else {"choices": choices}
    return LedgerEntry(run="r", trainer="main", version=Version(0, 1), source="", used=(), cursor=0, granted=9, retired=0, **own, **more)


@pytest.mark.parametrize(
    ("past", "ours", "said"),
    [
        (PACKED, msgspec.structs.replace(PACKED, compiled=False), "compiled: True in the ledger, False here"),
        (PACKED, msgspec.structs.replace(PACKED, row_length=4096), "row_length: 8192 in the ledger, 4096 here"),
        (None, PACKED, "attention: sdpa in the ledger, packed here"),
        (PACKED, msgspec.structs.replace(PACKED, kept_layers=None), ""),
        (None, None, ""),
        # Entries of earlier builds do not say which attention was configured.
        (None, Choices(attention="flash"), ""),
    ],
)
def test_a_version_that_was_computed_otherwise_is_told_so(past: Choices | None, ours: Choices | None, said: str) -> None:
    found = differing_choices(ours, entry(past))
    assert (said in found) if said else found == ""


def test_a_branch_takes_its_parents_choices_only_with_its_budget() -> None:
    beside = entry(PACKED, micro_tokens=8192)
    fold: Any = SimpleNamespace(beside=beside)
    parent, other = (Config(trainer=TrainerConfig(micro_tokens=n)) for n in (16_384, 4096))
    assert parents_cut(fold, parent, parent)(None) == Cut(8192, PACKED)
    assert parents_cut(fold, other, parent)(None) == Cut(0, None)
    own = entry(None, micro_tokens=4096)
    assert parents_cut(fold, other, parent)(own) == recorded_cut(own) == Cut(4096, Choices())
