"""`streamrl check-hook` as a user runs it: whatever the function does, its end is a sentence."""

import asyncio
import os
from pathlib import Path

import pytest

from streamrl.bridges.slime.check_hook import try_hook
from streamrl.bridges.slime.contracts import Asked
from streamrl.errors import ConfigError
from tests.support.printed import printed
from tests.support.refusals import refused

pytestmark = pytest.mark.process


def test_what_fits_is_called(hooks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "response '2', label '2': 1.0" in printed(capsys, "check-hook", "--", "custom-rm-path", "hooks.py:rm").out


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("hooks.py:exits", "it raises SystemExit: 3 at "),
        ("hooks.py:dies", "while it was called its process ended with exit code 7"),
        ("broken.py:rm", "SyntaxError"),
        ("more.py:rm", "streamrl has no slime.utils.mask_utils; of slime it has slime.utils.types, "),
    ],
)
def test_what_does_not_is_said(hooks: Path, capsys: pytest.CaptureFixture[str], function: str, words: str) -> None:
    hooks.with_name("broken.py").write_text("async def rm(:\n")
    hooks.with_name("more.py").write_text("from slime.utils.mask_utils import MultiTurnLossMaskGenerator\n")
    said = printed(capsys, "check-hook", "custom_rm_path", function, code=1).err
    assert words in said and "hint: " in said


def test_one_that_hangs_is_ended_and_named_by_its_line(hooks: Path) -> None:
    line = next(n for n, text in enumerate(hooks.read_text().splitlines(), 1) if "time.sleep(600)" in text)
    with refused(ConfigError, f"still busy at {hooks} line {line} after 5 s", key="custom_rm_path"):
        asyncio.run(try_hook(Asked("custom_rm_path", "hooks.py:hangs"), limit_s=5.0, surroundings=os.environ))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["buffer_filter_path", "hooks.py:rm"], "there is no buffer"),
        (["custom_rm_pth", "hooks.py:rm"], "expected one of slime's hooks"),
        (["custom_generate_function_path", "hooks.py:two_turns", "--group-rm"], "--group-rm is for custom_rm_path"),
        (["custom_rm_path", "hooks.py:rm", "--options", "{"], "expected JSON behind --options"),
        (["custom_rm_path", "hooks.py:rm", "--args", "[]"], "expected a table behind --args"),
        (["custom_tis_function_path", "hooks.py:truncated", "--args", '{"low": 1}'], "what the section loss says"),
    ],
)
def test_what_is_asked_wrongly_is_said(hooks: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in printed(capsys, "check-hook", *words, code=1).err


def test_where_slime_is_installed_its_other_modules_are_its_own(hooks: Path) -> None:
    for place, text in {
        "utils/types.py": "class Sample: pass\n",
        "utils/grades.py": "from slime.utils.types import Sample\n\ndef grade(sample):\n    return float(isinstance(sample, Sample))\n",
    }.items():
        file = hooks.parent / "installed" / "slime" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    hooks.with_name("graded.py").write_text(
        "from slime.utils.grades import grade\nfrom slime.utils.types import Sample\n\n"
        "async def rm(args, sample):\n    return grade(sample) + (sample.status == Sample.Status.COMPLETED)\n"
    )
    path = os.pathsep.join((str(hooks.parent / "installed"), os.environ.get("PYTHONPATH", "")))
    asked = Asked("custom_rm_path", "graded.py:rm")
    gave = asyncio.run(try_hook(asked, limit_s=60.0, surroundings={**os.environ, "PYTHONPATH": path}))
    assert all(line.endswith(": 2.0") for line in gave) and len(gave) == 4
