"""Base of all sections, the bounds that their values have, and the refusal of those that break a rule.

msgspec checks a bound when a table is read (`streamrl.config.load.convert`), not when a struct is made in Python. No number may be
infinite or NaN, which `convert` sees to for all of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from streamrl.errors import ConfigError


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


def refuse(when: bool, message: str, *, hint: str, key: str) -> None:
    """Raise ConfigError if `when`."""
    if when:
        raise ConfigError(message, hint=hint, key=key)
