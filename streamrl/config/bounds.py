"""Base of all sections, and the bounds that their values have.

msgspec checks a bound when a table is read (`streamrl.config.load.convert`), not when a struct is made in Python. No number may be
infinite or NaN, which `convert` sees to for all of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
PositiveFraction = Annotated[float, Meta(gt=0, le=1)]
Replicas = Annotated[int, Meta(ge=1, le=5)]
"""JetStream has no more."""
Port = Annotated[int, Meta(ge=0, le=65535)]
