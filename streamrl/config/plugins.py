"""User code named in the configuration: `file.py:name`, `pkg.mod:name` or `pkg.mod.name` to the Python object."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from streamrl.config.bridges import bridge_of, function_of
from streamrl.config.code_copies import is_module, loader_of, use_copies
from streamrl.errors import ConfigError, StreamRLError, TrainingError

_OURS = str(Path(__file__).resolve().parents[1])
_FORMS = "write it as file.py:name, pkg.mod:name or pkg.mod.name"


def resolve(reference: str, *, what: str, key: str, base: Path | None = None) -> Any:
    """Import what `reference` names.

    A file's own directory, and for modules the working directory, are added to the end of `sys.path`, so that user code can import
    what lies beside it and can never shadow an installed package.

    Args:
        reference: `file.py:name`, `pkg.mod:name` or `pkg.mod.name`; a class's attribute is `mod:Class.name`. Behind a bridge's
            prefix it is of the other system's form, and what is given back is of ours and calls it.
        what: what it should be, for messages: `producer`, `reward`.
        key: the configuration key it came from, for messages.
        base: directory that a relative file path starts from; None: the working directory.

    Raises:
        ConfigError: bad form, no such file, module or name, or the user's code fails while it is imported.
    """
    if (bridge := bridge_of(reference)) and bridge.adapted:
        return function_of(bridge.adapted)(reference, key=key, base=base)
    place, colon, name = reference.partition(":")
    if not colon:
        place, _, name = reference.rpartition(".")
    if not place or not name or reference.count(":") > 1 or reference.endswith(".py"):
        raise ConfigError(f"{key} must name a {what}, got {reference!r}", hint=_FORMS, key=key)
    module = _load_file(_path(place, base), reference, what, key) if place.endswith(".py") else _load_module(place, reference, what, key)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise _no_name(found, part, reference, what, key)
        found = getattr(found, part)
    return found


@contextmanager
def named_failures(reference: str, key: str, *, passed: tuple[type[BaseException], ...] = ()) -> Generator[None]:
    """Run a call of what `reference` names, and give its failure the function's name and place.

    Args:
        reference: the function.
        key: the configuration key that names it.
        passed: errors that are not the function's own, and are left as they are.

    Raises:
        ConfigError: the function raised: the same batch would have it raise again.
        TrainingError: it raised what may pass, an `OSError` or `MemoryError`.
    """
    try:
        yield
    except (StreamRLError, *passed):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if not one.filename.startswith((_OURS, sys.prefix, sys.base_prefix, "<"))]
        place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        kind = TrainingError if isinstance(error, (OSError, MemoryError)) else ConfigError
        raise kind(
            f"{key} = {reference}: the function failed: {type(error).__name__}: {error}{place}",
            hint="mend the function; the log of the trainer has the traceback",
            key=key,
            function=reference,
        ) from error


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may name: a function, or a class or an object with a method in its place."""

    key: str
    what: str
    """What that is, for messages."""
    takes: tuple[str, ...]
    """Arguments of the function."""
    hint: str
    method: str = ""
    """Of the class or object, `async def`; empty: functions only."""
    called: bool = False
    """Whether the class's objects may be called as the function is."""


def check_form(form: Form, reference: str, found: Any, options: Sequence[str] = ()) -> None:
    """Raise ConfigError unless `found`, which `reference` names, has this form. Nothing of it is called or built.

    `options` are given by name: to the function, or to the class when it is built.
    """
    given = dict.fromkeys(options)
    called = f"a function of ({', '.join((*form.takes, *given))})"
    if not inspect.isclass(found) and not hasattr(found, form.method or " "):
        if not callable(found):
            raise _misformed(form, reference, called, f"a {type(found).__name__}")
        _bind(form, reference, found, form.takes, given, called)
        return
    if not form.method:
        raise _misformed(form, reference, called, f"the class {found.__name__}")
    method = getattr(found, form.method, None)
    # Objects of a class may be called, too, where that is allowed.
    if method is None and not (form.called and any("__call__" in vars(base) for base in found.__mro__)):
        raise _misformed(form, reference, f"`async def {form.method}` in the class", "none")
    if method is not None and not inspect.iscoroutinefunction(method):
        raise _misformed(form, reference, f"`async def {form.method}`", "a plain method")
    if inspect.isclass(found):
        _bind(form, reference, found, (), given, f"a class that is built with {', '.join(given) or 'no arguments'}")


def _bind(form: Form, reference: str, found: Any, takes: Sequence[str], given: Mapping[str, Any], expected: str) -> None:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # written in C: it does not say
        return
    try:
        signature.bind(*takes, **given)
    except TypeError as error:
        raise _misformed(form, reference, expected, f"{getattr(found, '__name__', 'one')}{signature}: {error}") from error


def _misformed(form: Form, reference: str, expected: str, got: str) -> ConfigError:
    return ConfigError(f"{form.key} = {reference!r}: expected {expected}, got {got}", hint=form.hint, key=form.key)


def _path(text: str, base: Path | None) -> Path:
    path = Path(text).expanduser()
    return path if path.is_absolute() else ((base or Path.cwd()) / path)


def _load_file(path: Path, reference: str, what: str, key: str) -> ModuleType:
    path = path.resolve()
    if not is_module(path):
        raise ConfigError(
            f"{key} = {reference!r}: expected a Python file with the {what} at {path}, there is none", hint=f"correct {key}", key=key
        )
    # The digest keeps two files of one name apart; a second resolve of the same file gives the same module.
    name = f"streamrl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _search(path.parent)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader_of(name, path))
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key} = {reference!r}: {path} cannot be loaded as Python", hint=_FORMS, key=key)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _failed(error, str(path), reference, what, key) from error
    return module


def _load_module(place: str, reference: str, what: str, key: str) -> ModuleType:
    _search(Path.cwd())
    use_copies()
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if place == missing or place.startswith(f"{missing}."):
            raise ConfigError(
                f"{key} = {reference!r}: expected a module {place} with the {what}, there is none",
                hint=f"install it, run from its directory, or name a file: {place.replace('.', '/')}.py:name",
                key=key,
            ) from error
        raise _failed(error, place, reference, what, key) from error
    except Exception as error:
        raise _failed(error, place, reference, what, key) from error


def _search(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _failed(error: Exception, place: str, reference: str, what: str, key: str) -> ConfigError:
    return ConfigError(
        f"{key} = {reference!r}: the {what}'s code fails while it is imported from {place}: {type(error).__name__}: {error}",
        hint="run the file with python to see the whole traceback",
        key=key,
    )


def _no_name(found: Any, part: str, reference: str, what: str, key: str) -> ConfigError:
    near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
    owner = getattr(found, "__file__", None) or getattr(found, "__name__", repr(found))
    return ConfigError(
        f"{key} = {reference!r}: expected a {what} called {part!r} in {owner}, there is none",
        hint=f"did you mean {near[0]!r}?" if near else f"correct {key}",
        key=key,
        name=part,
    )
