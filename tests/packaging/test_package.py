"""The package: its folders, its public names, what loads with it, and what its own tests need."""

import os
import runpy
from importlib import metadata
from pathlib import Path

import pytest

import streamrl
from streamrl.config.load import load
from streamrl.data.characters import write_tokenizer
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import load_tokenizer
from tests.support.pythons import python

ROOT = Path(__file__).parents[2]


def test_folders_of_code_are_packages_and_the_linked_ones_have_one_name():
    """`packages.find` leaves a folder without __init__.py out of the wheel."""
    for name in ("producers", "consumers", "schemas"):
        assert os.readlink(ROOT / "streamrl" / name) == f"../{name}"
        assert (ROOT / "streamrl" / name / "__init__.py").is_file()
    folders = {path.parent for top in ("streamrl", "producers", "consumers", "schemas") for path in (ROOT / top).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
    assert streamrl.RolloutTask.__module__ == "streamrl.schemas.tasks"


LIGHT = [
    *("streamrl", "streamrl.bus", "streamrl.bus.jetstream", "streamrl.cli", "streamrl.config.load", "streamrl.data.problems"),
    *("streamrl.engines.http", "streamrl.launch.supervisor", "streamrl.producers.evaluation.worker", "streamrl.producers.rollouts"),
    *("streamrl.producers.feeder", "streamrl.runtime.worker"),
]


IMPORTED = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    if found := sorted({"torch", "transformers", "matplotlib", "pandas"} & set(sys.modules)):
        sys.exit(f"{module} loads {found}")
"""


@pytest.mark.process
def test_light_modules_load_no_framework():
    python(ROOT, "-c", IMPORTED, *LIGHT)


@pytest.mark.process
@pytest.mark.parametrize(
    ("module", "heavy"), [("streamrl.launch.up", "pyarrow aiohttp.web rich.console"), ("streamrl.monitor.top", "rich.console")]
)
def test_who_is_there_as_long_as_the_run_loads_no_more_than_it_needs(module, heavy):
    code = f"import sys, {module}; print(sorted(set({heavy!r}.split()) & set(sys.modules)))"
    assert python(ROOT, "-c", code)[0].strip() == "[]"


PUBLIC = [
    *(
        "Chat",
        "Config",
        "Context",
        "Episode",
        "Failure",
        "Producer",
        "Reward",
        "RewardValue",
        "RolloutEngine",
        "RolloutTask",
        "Sampling",
        "StreamRLError",
        "Version",
    ),
    *("__version__", "load_config"),
]


def test_the_public_names_are_pinned():
    assert streamrl.__all__ == PUBLIC and None not in [getattr(streamrl, name) for name in PUBLIC]
    assert metadata.version("streamrl") == streamrl.__version__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        streamrl.nothing  # noqa: B018


SET = "import os, sys, tests.conftest; assert 'torch' not in sys.modules; print(os.environ['OMP_NUM_THREADS'])"
"""A program that prints what torch reads when it is loaded."""


@pytest.mark.process
def test_a_process_of_tests_has_one_thread() -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert python(ROOT, "-c", SET, env=surroundings)[0] == "1\n"


QUICKSTART = ROOT / "examples" / "quickstart"


@pytest.fixture
def sets(tmp_path):
    config = load(QUICKSTART / "quickstart.toml")
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    return config, [load_problems(path, config.data, tokenizer) for path in (config.data.train, config.data.heldout)]


def test_the_problems_are_split_once(sets):
    _, (train, heldout) = sets
    assert (len(train), len(heldout)) == (648, 72)
    assert train.num_too_long == heldout.num_too_long == 0
    assert len({problem.prompt for problem in (*train.problems, *heldout.problems)}) == 720


def test_the_labels_are_right_and_fit(sets, tmp_path):
    config, both = sets
    tokenizer = load_tokenizer(tmp_path)
    for problems in both:
        for problem in problems.problems:
            a, b = problem.prompt.rstrip("=").split("+")
            assert int(a) + int(b) == int(problem.label)
            assert len(tokenizer.encode(problem.label)) < config.sampling.max_new_tokens


def test_the_files_are_what_the_script_writes(tmp_path):
    runpy.run_path(str(QUICKSTART / "make_problems.py"))["main"](tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes()
