"""The examples of the package, and copies of them. `streamrl/examples` is a link to the repository's folder; a wheel has a copy."""

from __future__ import annotations

import difflib
import shlex
import shutil
from pathlib import Path

import streamrl
from streamrl.errors import ConfigError

EXAMPLES = Path(streamrl.__file__).parent / "examples"


def example_names(folder: Path = EXAMPLES) -> list[str]:
    """Folders that hold the configuration of a run."""
    return sorted({path.parent.name for path in folder.glob("*/*.toml")})


def copy_example(name: str, to: Path) -> list[Path]:
    """Copy an example's files into `to`, which is made if need be; returns the copies. Nothing that is there is changed.

    Raises:
        ConfigError: there is no such example, `to` has a file of one of these names, or it cannot be written.
    """
    names = example_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"expected the name of an example, got {name!r}", hint=f"{advice}there are {', '.join(names)}", example=name)
    # Not what a run or an interpreter left beside them in a clone.
    sources = [path for path in sorted((EXAMPLES / name).iterdir()) if path.is_file() and not path.name.startswith(".")]
    there = [path.name for path in sources if (to / path.name).exists() or (to / path.name).is_symlink()]
    if there:
        raise ConfigError(
            f"expected {to} to have none of the example's files, got {', '.join(there)}",
            hint="nothing was copied; name another folder, as in `streamrl init mine`",
            example=name,
        )
    try:
        to.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copyfile(source, to / source.name)) for source in sources]
    except OSError as error:
        raise ConfigError(
            f"expected a folder to write the example to, got {error.strerror}: {to}", hint="name another one, as in `streamrl init mine`"
        ) from error


def next_commands(copied: list[Path]) -> list[str]:
    """What starts the runs that were copied; presets also need a model and rows."""
    needs = " --set model.path=DIR --set data.train=ROWS.jsonl"
    files = [path for path in copied if path.suffix == ".toml"]
    return [f"streamrl up {shlex.quote(str(path))}{'' if 'train = ' in path.read_text(encoding='utf-8') else needs}" for path in files]
