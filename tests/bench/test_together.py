import os
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/gpu/together.sh"


def together(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    where = {"OUT": str(folder / "out"), "WORK": str(folder / "work"), "KIT": str(folder / "kit"), "HOME": str(folder)}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], cwd=folder, env={**os.environ, **where, **env}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "usage: together.sh"),
        (("9b:0",), "got 9b:0"),
        (("8b",), "got 8b"),
        (("8b:0,1", "graphs:1,2"), "expected each GPU in one question, got 1 in two"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path, arguments, said):
    ended = together(tmp_path, *arguments)
    assert ended.returncode == 2 and said in ended.stderr
    assert not (tmp_path / "work").exists()


@pytest.mark.process
def test_each_question_keeps_what_it_wrote_and_says_how_it_ended(tmp_path):
    # No time is left for a server, which is an answer too.
    ended = together(tmp_path, "tiny:", "tiny:", LIMIT="60")
    assert ended.returncode == 1
    assert ended.stdout.count("== tiny:: exit code 1") == 2 and ended.stdout.count("no time left") == 2
    for name in ("0-tiny.tar", "1-tiny.tar"):
        with tarfile.open(tmp_path / "out" / name) as tar:
            assert "./screen.txt" in tar.getnames()
