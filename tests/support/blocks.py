"""The fenced blocks of a page, each with the mark of the HTML comment above it: `<!-- test: why it is not run as it stands -->`."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCED = re.compile(r"(?:<!-- test: (?P<mark>[^>]*) -->\n\n?)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    mark: str
    """The text of the comment above it; empty without one."""
    text: str

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block, without the remark at the end of a line."""
        return [line.split("  #")[0].strip() for line in self.text.splitlines() if line.strip()]


def blocks(path: Path) -> list[Block]:
    """All blocks of a page in order; raises ValueError where a fence is not closed."""
    text = path.read_text(encoding="utf-8")
    found = [
        Block(path.name, text[: match.start("text")].count("\n"), match["language"], match["mark"] or "", match["text"])
        for match in _FENCED.finditer(text)
    ]
    if 2 * len(found) != len(re.findall(r"^```", text, re.MULTILINE)):
        raise ValueError(f"expected every fence of {path} to be closed")
    return found
