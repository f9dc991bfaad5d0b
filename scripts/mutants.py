"""A mutation run: which small faults do the tests of a module find?

    python -m scripts.mutants                    all modules: the table of docs/algorithms-mutants.md, and the mutants that live
    python -m scripts.mutants kl fold --jobs 8   these alone, eight mutants at a time

Each mutant differs from a module in one place (`scripts/mutations.py`). The module's tests meet it in a forked child, which has torch
and pytest imported already: half a second beside several for a new process. Every job has its own copy of the tree; mutants are written
into the copy. Mutants that mean the same are listed with their reasons in scripts/equivalent_mutants.txt. The exit status is 1 where
others live, where one that is listed dies, or where no mutant is like one that is listed. A child is given CPU time, not wall time, so a
busy machine changes no result; one that waits for ever is ended after WALL_S.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import gc
import importlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from scripts.mutations import mutants

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.txt"
CPU_S = 5.0
"""A child gets this and four times what the tests take on the module as it is."""
WALL_S = 600.0
MEMORY_BYTES = 6 << 30

DECISIONS = """
streamrl/core/fold.py      test_fold test_fold_batches test_fold_quarantine test_fold_staleness test_fold_rewards test_admission \
                           test_fold_expiry test_gaps dead/test_impossible
streamrl/core/impossible.py dead/test_impossible test_fold test_fold_quarantine test_gaps test_admission
streamrl/core/state.py     test_state test_fold test_fold_batches test_fold_staleness test_fold_expiry test_fold_quarantine test_gaps
streamrl/core/expiry.py    test_fold_expiry test_fold_staleness test_fold_rewards
streamrl/core/pacing.py
streamrl/core/admission.py
streamrl/core/assembly.py  test_assembly test_admission
streamrl/core/records.py   test_records test_admission dead/test_judged
"""
MATHEMATICS = """
streamrl/algorithms/policy_losses.py   test_policy_losses test_opsm test_value_loss
streamrl/algorithms/sampler_losses.py  test_policy_losses test_sampler_losses
streamrl/algorithms/policy.py
streamrl/algorithms/choices.py
streamrl/algorithms/kl.py
streamrl/algorithms/kl_coefficient.py
streamrl/algorithms/importance.py
streamrl/algorithms/rejection.py
streamrl/algorithms/corrections.py
streamrl/algorithms/batch_metrics.py
streamrl/algorithms/groups.py          test_groups test_advantages
streamrl/algorithms/advantages.py
streamrl/algorithms/returns.py
streamrl/algorithms/reductions.py
streamrl/core/balance.py
streamrl/core/packing.py
streamrl/algorithms/logprobs.py
streamrl/algorithms/fused_head.py      test_logprobs test_vocab_parallel
streamrl/algorithms/nucleus.py
streamrl/algorithms/vocab_parallel.py
streamrl/algorithms/sequences.py
streamrl/trainers/schedule.py
"""
"""A module by its path, and its tests, the quickest first, where they are not `test_<module>` alone. They lie in the folder of tests/
that mirrors the module's, unless another is named."""


class Module(NamedTuple):
    """A row of the tables above."""

    path: str
    tests: tuple[str, ...]
    decides: bool
    """Whether it also has the mutants that only decisions have."""


class Tried(NamedTuple):
    """How a mutant ended."""

    lives: bool
    timed_out: bool


def modules() -> dict[str, Module]:
    """Both tables, by the name of the file."""
    found: dict[str, Module] = {}
    for table, decides in ((DECISIONS, True), (MATHEMATICS, False)):
        for path, *tests in map(str.split, table.strip().splitlines()):
            place = Path(path)
            room = Path("tests", *place.parent.parts[1:])
            files = [Path("tests", test) if "/" in test else room / test for test in tests or [f"test_{place.stem}"]]
            found[place.stem] = Module(path, tuple(f"{file}.py" for file in files), decides)
    return found


def wait(pid: int) -> tuple[int, float]:
    """Exit status of a child (negative: the signal that ended it) and its CPU time; it and what it started are gone then."""
    end = time.monotonic() + WALL_S
    try:
        while True:
            found, status, used = os.wait4(pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def run(tests: Sequence[str], cpu_s: float, *, imported: int | None = None) -> tuple[int, float]:
    """The tests in a forked process; what `wait` gives. What they imported is written to a pipe, and what they print is shown then."""
    gc.freeze()
    pid = os.fork()
    if pid:
        return wait(pid)
    status = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 6))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        if imported is None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        import hypothesis
        import pytest

        # Found is enough: no smaller example is looked for. The same examples each time.
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True, database=None, deadline=None)
        hypothesis.settings.load_profile("mutants")
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", *tests]))
        if imported is not None:
            again = ("streamrl", "tests", "_pytest", "pytest", "__m")
            os.write(imported, "\n".join(name for name in sys.modules if not name.startswith(again)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def preload(tests: Sequence[str]) -> float:
    """Run the tests on the module as it is, then import here what they imported, so that children need not; a child's CPU time."""
    read, write = os.pipe()
    status, used = run(tests, 10 * WALL_S, imported=write)
    os.close(write)
    if status != 0:
        raise RuntimeError(f"these tests fail without any mutant: {' '.join(tests)}")
    with os.fdopen(read) as lines:
        for name in lines.read().split():
            with contextlib.suppress(ImportError):  # made at run time, not imported
                importlib.import_module(name)
    return CPU_S + 4 * used


class Job:
    """What a worker process keeps between mutants. Its working directory is its own copy of the tree."""

    path = ""
    cpu_s = 0.0


def begin(tree: Path) -> None:
    """A new worker: copy the tree and go there."""
    copied = tree.parent / str(os.getpid())
    shutil.copytree(tree, copied, symlinks=True)
    os.chdir(copied)
    sys.path[0] = os.environ["PYTHONPATH"] = str(copied)
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}  # a fork takes no threads along
    sys.dont_write_bytecode = True


def attempt(module: Module, source: str) -> Tried:
    """Try a mutant; in a worker."""
    path = Path(module.path)
    if Job.path != module.path:
        Job.path, Job.cpu_s = module.path, preload(module.tests)
        for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
            cached.unlink()
    original = path.read_text()
    try:
        path.write_text(source)
        status, _ = run(module.tests, Job.cpu_s)
    finally:
        path.write_text(original)
    return Tried(status == 0, status in (-signal.SIGXCPU, -signal.SIGKILL))


def try_module(name: str, module: Module, known: set[str], workers: Executor) -> tuple[Counter[str], list[str]]:
    """Counts, and what the list of equivalent mutants has wrong."""
    counts, wrong = Counter[str](), list[str]()
    found = list(mutants(name, (ROOT / module.path).read_text(), decides=module.decides))
    tried = workers.map(attempt, [module] * len(found), [mutant.source for mutant in found])
    for mutant, (lives, timed_out) in zip(found, tried, strict=True):
        listed = mutant.key in known
        counts["mutants"] += 1
        counts["killed" if not lives else "equivalent" if listed else "lives"] += 1
        counts["timed out"] += timed_out
        if lives != listed:
            wrong.append(f"{'lives' if lives else 'dies, though listed as equivalent'}: {mutant.key}")
            print(wrong[-1], flush=True)
    gone = {key for key in known if key.startswith(f"{name}.")} - {mutant.key for mutant in found}
    for key in sorted(gone):
        wrong.append(f"listed as equivalent, but no mutant: {key}")
        print(wrong[-1], flush=True)
    return counts, wrong


@contextlib.contextmanager
def pool(jobs: int) -> Generator[Executor, None, None]:
    """Workers, each with a copy of the tree, which has its byte code ready: children write none."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        # With scripts/: processes that tests spawn import this module.
        for name in ("streamrl", "producers", "consumers", "schemas", "scripts", "tests", "examples"):
            shutil.copytree(ROOT / name, tree / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", tree)
        compileall.compile_dir(tree, quiet=2)
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, mp_context=fork, initializer=begin, initargs=(tree,)) as workers:
            try:
                yield workers
            finally:
                workers.shutdown(cancel_futures=True)


def main(arguments: Sequence[str]) -> int:
    """Try all mutants of the modules in copies of the tree; exit status 1 where the list of equivalent ones has something wrong."""
    table = modules()
    parser = argparse.ArgumentParser(description="Which small faults do the tests of a module find?")
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"all without any: {' '.join(table)}")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.modules if name not in table]
    gone = [module.path for module in table.values() if not (ROOT / module.path).is_file()]
    if unknown or gone or given.jobs < 1:
        parser.error(f"expected modules of the table, files that are there and a job or more; got {unknown}, {gone} and {given.jobs}")
    listed = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    known = {line.rpartition("  # because ")[0] for line in listed}
    lines, sums, wrong = ["| module | mutants | killed | equivalent | score |", "|---|---|---|---|---|"], Counter[str](), list[str]()
    began = time.monotonic()
    with pool(given.jobs) as workers:
        for name in given.modules or table:
            counts, found = try_module(name, table[name], known, workers)
            sums, wrong = sums + counts, wrong + found
            lines.append(row(name, counts))
            print(lines[-1], flush=True)
    print("\n".join([*lines, row("all", sums)]))
    print(f"\n{time.monotonic() - began:.0f} s, {given.jobs} jobs; ended by their time: {sums['timed out']}; wrong: {len(wrong)}")
    return bool(wrong)


def row(name: str, counts: Counter[str]) -> str:
    """A row of the table; the score leaves equivalent mutants out."""
    score = counts["killed"] / max(counts["mutants"] - counts["equivalent"], 1)
    return f"| {name} | {counts['mutants']} | {counts['killed']} | {counts['equivalent']} | {score:.1%} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
