"""What editors know of a configuration file: a JSON schema with the meaning of every key."""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from typing import Any, get_args

import msgspec

from streamrl.config.tree import Config

_DRAFT = "http://json-schema.org/draft-07/schema#"


def config_schema() -> dict[str, Any]:
    """The schema of a TOML file: types, bounds, defaults and meanings. Rules that take two keys are not in it."""
    schema = msgspec.json.schema(Config, ref_template="#/definitions/{name}")
    definitions = schema["$defs"]
    for kind in _sections(Config):
        definitions[kind.__name__]["additionalProperties"] = False  # of structs of the wire, too: a file has no unknown keys
        for key, meaning in field_meanings(kind).items():
            definitions[kind.__name__]["properties"][key]["description"] = meaning
    return {"$schema": _DRAFT, **definitions.pop("Config"), "definitions": definitions}


def _sections(kind: Any) -> set[Any]:
    """The structs that a type is made of, itself among them."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {kind}.union(*(_sections(field.type) for field in msgspec.structs.fields(kind)))
    return set[Any]().union(*(_sections(part) for part in get_args(kind)))


def field_meanings(kind: Any) -> dict[str, str]:
    """The string below each field of a struct, in one line; fields without one are left out.

    They are read from the source, for Python does not keep them.
    """
    path = inspect.getsourcefile(kind)
    assert path is not None
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    meanings: dict[str, str] = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = text.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                meanings[field.target.id] = " ".join(value.value.split())
    return meanings
