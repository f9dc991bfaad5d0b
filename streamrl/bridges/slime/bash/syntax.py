"""The syntax tree of a bash script, as `shfmt` parses it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from streamrl.bridges.slime.bash.values import Place
from streamrl.errors import ConfigError

_SECONDS = 60
_LARGEST = 1 << 27
"""Bytes of a tree as JSON: a hundred times those of most scripts, and more where they are nested."""
_MESSAGE = re.compile(r"(?P<line>\d+):\d+: (?P<what>.*)", re.DOTALL)
_LISTS = re.compile("Args|Assigns|Cond|Do|Elems|Exprs|Items|Parts|Patterns|Redirs|Stmts|Then")
_OTHERS = re.compile(
    "Append|Array|Background|Backquotes|Cmd|Dollar|Else|Excl|Exp|Hdoc|Index|Length|N|Naked|Name|Negated|Param|Post|Repl|Select|Slice|Stmt"
    "|Type|Until|Value|Word|X"
)


class Node(SimpleNamespace):
    """A node of the tree, or a position, with the attributes that https://pkg.go.dev/mvdan.cc/sh/v3/syntax gives it.

    The JSON leaves out what is empty: a list is `()` then, anything else None.
    """

    def __getattr__(self, name: str) -> Any:
        if _LISTS.fullmatch(name):
            return ()
        if _OTHERS.fullmatch(name):
            return None
        raise AttributeError(name)


class Source:
    """A file and its text, which nodes are places in."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self._data = text.encode()

    def place(self, node: Node) -> Place:
        """The line that a node begins on."""
        return Place(self.file, node.Pos.Line)

    def raw(self, node: Node, begin: int = 0, end: int = 0) -> str:
        """The text of a node, without `begin` bytes before and `end` bytes behind."""
        return self._data[node.Pos.Offset + begin : node.End.Offset - end].decode()

    def parse(self) -> list[Node]:
        """Parse the file into its statements.

        Raises:
            ConfigError: it is not bash, or has too many layers; names file and line. There is no `shfmt`.
        """
        installed = Path(sysconfig.get_path("scripts")) / "shfmt"
        binary = str(installed) if installed.is_file() else shutil.which("shfmt") or "shfmt"
        try:
            ran = subprocess.run(
                [binary, "--language-dialect=bash", "--to-json"], input=self._data, capture_output=True, timeout=_SECONDS, check=False
            )
            if ran.returncode:
                self._refuse(ran.stderr.decode(errors="replace").strip())
            if len(ran.stdout) > _LARGEST:
                self._refuse("too many layers")
            return list(json.loads(ran.stdout, object_hook=lambda fields: Node(**fields)).Stmts)
        except (subprocess.TimeoutExpired, RecursionError):
            self._refuse("too many layers")
        except OSError as error:
            hint = 'pip install "shfmt-py>=4.2,<5"'
            raise ConfigError(f"expected shfmt, which parses bash, got {error}", hint=hint, path=self.file) from error

    def _refuse(self, message: str) -> NoReturn:
        found = _MESSAGE.match(message)
        line = int(found["line"]) if found else 1
        raise ConfigError(
            f"expected a bash script, got {found['what'] if found else message} at {Place(self.file, line)}",
            hint="`bash -n` says whether bash reads it",
            path=self.file,
            line=line,
        )
