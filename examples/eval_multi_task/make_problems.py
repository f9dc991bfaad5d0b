"""Writes the rows: digits that are to be repeated, letters that are to be followed by the next one, and the same letters for any vowel."""

from __future__ import annotations

import json
from pathlib import Path

DIGITS, LETTERS = "0123", "abcd"


def main() -> None:
    """Write the four files beside this one."""
    digits = [{"prompt": digit, "label": digit} for digit in DIGITS]
    letters = [{"prompt": letter, "label": chr(ord(letter) + 1)} for letter in LETTERS]
    vowels = [{"question": letter} for letter in LETTERS]
    files = {"train": digits + letters, "digits": digits, "letters": letters, "vowels": vowels}
    for name, rows in files.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (Path(__file__).parent / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
