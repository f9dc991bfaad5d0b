"""What a mutation run changes, counted by hand on small modules, and that its table names files which are there."""

from pathlib import Path

import pytest

from scripts.mutants import EQUIVALENT, ROOT, modules, with_rows
from scripts.mutations import mutants


def lines(source: str, *, decides: bool) -> list[str]:
    """The changed line of each mutant."""
    return [mutant.key.partition(": ")[2] for mutant in mutants("m", source, decides=decides)]


def test_mathematics_is_changed_number_by_number() -> None:
    source = 'def f(a, b):\n    """2 - 1"""\n    return a - b / 2\n'
    assert lines(source, decides=False) == [
        "return b / 2 - a",
        "return a + b / 2",
        "return a - b * 2",
        "return a - b / 3",
        "return a - b / 1",
    ]


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("return a and b", ["return b", "return a", "return a or b"]),
        ("state = g(state, a)", ["pass  # was state = g(state, a)", "state = g(a, state)", "state = g(state)"]),
        ("other = g(state)", []),
        ("return g(state, x=a)", ["return g(state)"]),
        ("return 'late'", ["return '?late'"]),
        ("return (*a, b)", ["return (b,)", "return (*a,)"]),
        ("return a[:b]", ["return a"]),
        ("return sorted(a)", ["return a"]),
        ("return [x for x in a if b]", ["return [x for x in a]"]),
        ("raise ValueError(a and 'late')", []),
        ("return f'{a and b}'", []),
    ],
)
def test_decisions_lose_what_they_go_by(line: str, changed: list[str]) -> None:
    assert lines(f"def f(state, a, b):\n    {line}\n", decides=True) == changed


def test_a_case_is_left_out() -> None:
    source = "def f(a):\n    match a:\n        case int():\n            g(a)\n        case _:\n            pass\n"
    assert lines(source, decides=True) == ["case int():", "pass  # was g(a)"]


def test_every_mutant_is_another_program_of_its_own_name() -> None:
    found = list(mutants("pacing", (ROOT / modules()["pacing"].path).read_text(), decides=True))
    assert len({mutant.key for mutant in found}) == len({mutant.source for mutant in found}) == len(found) > 20
    for mutant in found:
        compile(mutant.source, "pacing.py", "exec")


def test_the_table_names_files_that_are_there() -> None:
    table = modules()
    assert not [path for module in table.values() for path in (module.path, *module.tests) if not Path(ROOT, path).is_file()]
    listed = {line.partition(".")[0] for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")}
    assert listed <= set(table)


def test_a_row_takes_the_place_of_its_modules_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = "| kl | 3 | 1 | 0 | 33.3% |\n| kl_coefficient | 2 | 2 | 0 | 100.0% |\n"
    found = with_rows(page, ["| kl | 4 | 4 | 0 | 100.0% |", "| fold | 1 | 1 | 0 | 100.0% |"])
    assert found == "| kl | 4 | 4 | 0 | 100.0% |\n| kl_coefficient | 2 | 2 | 0 | 100.0% |\n"
    assert "| fold |" in capsys.readouterr().out
