"""Here-documents: the lines behind a command that it reads as its input (bash(1), Here Documents)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Document:
    """One of `<<delimiter`; its body is filled in where its lines follow."""

    delimiter: str
    literal: bool
    """The delimiter is quoted: nothing of the body is expanded."""
    tabs_off: bool
    """`<<-`: without the tabs that lines begin with."""
    at: int
    """Where its operator stands in the text."""
    body: str = ""
    """With the end of its last line; of a line that a backslash continues bash drops both before it looks at anything else."""
    line: int = 0
    """Of the first line of the body."""
    breaks: list[int] = field(default_factory=list[int])
    """Last character of the body on each of its lines in the file."""

    def read(self, text: str, at: int, *, closes: bool) -> int | None:
        """Take the body that begins at `at`; returns where the text goes on behind the delimiter's line, None where there is none.

        With `closes`, in `$(...)`, bash also ends the body at a delimiter with a bracket behind it; that counts as none.
        """
        lines, length = list[str](), 0
        while at < len(text):
            pieces, ends, continued = list[str](), list[int](), True
            while continued:
                end = text.find("\n", at)
                piece = text[at:] if end < 0 else text[at:end]
                at = len(text) if end < 0 else end + 1
                continued = not self.literal and end >= 0 and (len(piece) - len(piece.rstrip("\\"))) % 2 == 1
                pieces.append(piece[:-1] if continued else piece + "\n")
                ends.append((ends[-1] if ends else 0) + len(pieces[-1]))
            whole = "".join(pieces)
            line = whole.lstrip("\t") if self.tabs_off else whole
            if line == self.delimiter + "\n":
                self.body = "".join(lines)
                return at
            if closes and line.startswith(self.delimiter) and ")" in line[len(self.delimiter) :]:
                return None
            self.breaks += [length + max(end - len(whole) + len(line), 0) - 1 for end in ends]
            lines.append(line)
            length += len(line)
        return None
