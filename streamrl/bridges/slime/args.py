"""`args` as slime's hooks are given it: slime's names, for what the run's configuration says; to be read only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.bridges.slime.section import OPTION, unknown_flag


class Args:
    """Attributes by slime's flag names (`streamrl.bridges.slime.flags`).

    A name that is not there raises AttributeError and says where to look, so that `getattr(args, name, default)` works; setting one does
    too: every process has its own, so that nobody else would see it.

    Example:
        >>> Args({"rollout_batch_size": 64}).rollout_batch_size
        64
    """

    def __init__(self, flags: Mapping[str, Any]) -> None:
        self.__dict__.update(flags)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(unknown_flag(name, self.__dict__))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"args.{name} cannot be set: hooks run in processes of their own, and no other would see it")

    __delattr__ = __setattr__  # pyright: ignore[reportAssignmentType]

    def but(self, **changes: Any) -> Args:
        """The same with other values of some names."""
        return Args({**self.__dict__, **changes})


def args_of(options: Mapping[str, Any]) -> Args:
    """Those that user code was given with its options; a worker of another build gives none."""
    return Args(options.get(OPTION, {}))


def taken(function: Callable[..., Any], names: Sequence[str]) -> list[str]:
    """Those of these arguments by name that a function takes."""
    parameters = inspect.signature(function).parameters
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return [name for name in names if anything or name in parameters]
