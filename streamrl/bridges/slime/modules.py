"""The few names that hooks import from `slime`: the same words, for what is here.

So `from slime.utils.types import Sample` in a user's file works unchanged. These modules stand in the place of those of a slime that is
installed, whose `post` knows no engine of a run and whose `Sample.Status` equals none of ours; its other modules are its own. Without one
each is an ImportError that says which there are.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

from streamrl.bridges.slime.generate import GenerateState, generate
from streamrl.bridges.slime.outputs import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from streamrl.bridges.slime.sample import Sample
from streamrl.bridges.slime.session import post

NAMES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "slime.utils.types": {"Sample": Sample},
        "slime.utils.http_utils": {"post": post},
        "slime.utils.async_utils": {"run": asyncio.run},
        "slime.rollout.base_types": {"RolloutFnTrainOutput": RolloutFnTrainOutput, "RolloutFnEvalOutput": RolloutFnEvalOutput},
        "slime.rollout.sglang_rollout": {"GenerateState": GenerateState, "generate": generate},
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": DynamicFilterOutput},
    }
)
"""By module."""


class _Others:
    """Finds no module of slime's, and says so."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """As `importlib.abc.MetaPathFinder.find_spec`."""
        if name.startswith("slime."):
            raise ModuleNotFoundError(
                f"streamrl has no {name}; of slime it has {', '.join(NAMES)}: install slime, or copy what you need of it", name=name
            )


def provide() -> None:
    """Have these modules be there for the code of this process; where it has imported slime already, nothing is changed."""
    if "slime" in sys.modules:
        return
    found = importlib.util.find_spec("slime")
    if found is not None and found.submodule_search_locations is None:
        return  # a file of this name, which is another's
    roots = [] if found is None else [*(found.submodule_search_locations or ())]
    for name, values in NAMES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            _module(".".join(parts[:depth]), [str(Path(root, *parts[1:depth])) for root in roots])
        vars(sys.modules[name]).update(values)
    sys.meta_path.append(_Others)


def _module(name: str, places: list[str]) -> None:
    """One that is a package, whose further modules are in these folders."""
    if name in sys.modules:
        return
    module = ModuleType(name, f"What streamrl.bridges.slime has of {name}.")
    module.__path__ = places
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
