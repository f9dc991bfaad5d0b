"""When steps without a finite gradient are no accident any more."""

from __future__ import annotations

from streamrl.errors import WeightsDiverged
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import MEND

MOST = 8
"""Batches in a row that may change nothing because nothing about them is finite: one may be a bad sample's fault, all of these are not."""


class Divergence:
    """Counts batches in a row that were not finite."""

    def __init__(self) -> None:
        self._count = 0

    def check(self, version: Version, *, finite: bool) -> None:
        """Take note of the batch that made `version` (`StepResult.finite`); raises WeightsDiverged for the last of too many in a row."""
        self._count = 0 if finite else self._count + 1
        if self._count >= MOST:
            raise WeightsDiverged(
                f"the weights diverged: {self._count} batches in a row, up to version {version}, had no finite gradient",
                hint=MEND,
                version=str(version),
            )
