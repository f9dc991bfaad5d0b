"""A mutation run: which small faults do the tests of a module find?

    python -m scripts.mutants                         all modules: the table of docs/algorithms-mutants.md, and the mutants that live
    python -m scripts.mutants kl fold.close --jobs 8  these alone, a function or a class alone too, eight mutants at a time
    python -m scripts.mutants claims --sample 40      forty of them, the same ones each time

Each mutant differs from a module in one place (`scripts/mutations.py`). The module's tests meet it in a forked child, which has torch
and pytest imported already: half a second beside several for a new process. Every job has its own copy of the tree; mutants are written
into the copy. Mutants that mean the same are listed with their reasons in scripts/equivalent_mutants.txt. The exit status is 1 where
others live, where one that is listed dies, or where no mutant is like one that is listed.

Asked are the tests of `make test` that start no process. A child may use a multiple of the CPU time that the tests take on the module as
it is, so that a busy machine changes no result; one that waits for ever is ended by a multiple of their wall time. What a child has
started ends with it, and all of it with this process.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

from scripts.mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.txt"
PAGE = ROOT / "docs" / "algorithms-mutants.md"
PRODUCT = ("streamrl", "producers", "consumers", "schemas")
SELECTION = "not process and not slow and not soak"
CPU_S = 5.0
"""A child gets this and four times what the tests take on the module as it is."""
WALL_S, WALLS = 10.0, 10.0
"""The shortest time after which a child is ended, in seconds, and the multiple of the tests' wall time that it may take otherwise."""
FIRST_S = 600.0
"""The tests on the module as it is may take this long."""
MEMORY_BYTES = 6 << 30
PR_SET_PDEATHSIG = 1

DECISIONS = """
fold.fold                    test_fold test_fold_batches test_fold_quarantine test_fold_staleness test_fold_rewards test_admission \
                             test_impossible test_fold_agents test_fold_gradings test_filters test_overlong
impossible.impossible        test_impossible test_fold test_fold_quarantine test_admission test_fold_agents test_fold_gradings
state.FoldState              test_state test_fold test_fold_batches test_fold_staleness test_fold_quarantine test_fold_agents \
                             test_fold_gradings test_overlong test_assembly test_filters
expiry.expired               test_fold_staleness test_fold_rewards
pacing.released
admission.admit              test_admission test_fold_staleness test_fold_agents test_fold_batches test_filters
assembly.assemble            test_assembly test_admission test_fold_agents test_overlong test_filters
records.judge                test_records test_admission test_fold_agents test_fold_batches test_overlong test_filters \
                             test_fold_gradings test_fold_quarantine
claims.Claims
rollouts.serve               test_rollouts_logic
publishing.Publisher         test_publishing_logic
tree.Tree                    test_strands
sessions.Sessions
reaper.Reaper
resuming.Resuming
publisher.Publisher          test_publisher_logic test_publisher
streamed.StreamedProblems    test_streamed test_streamed_rows
slo.Judge                    test_slo test_slo_levels
"""
MATHEMATICS = """
policy_losses.ppo_clip
sampler_losses.dppo          test_policy_losses test_sampler_losses
policy.policy_loss           test_policy test_divergences
choices.decide
kl.kl_loss
kl_coefficient.coefficient   test_kl
importance.importance_weights
rejection.accept
corrections.correct
batch_metrics.ratio_metrics
groups.rollout_rewards       test_advantages
advantages.grpo              test_advantages test_baselines test_agents
returns.gae
reductions.token_weights     test_reductions test_agents
balance.karmarkar_karp
packing.plan_micro_batches   test_packing test_context test_arrangement
logprobs.token_logprobs
fused_head.FusedHead         test_logprobs test_vocab_parallel
nucleus.support
vocab_parallel.vocab_parallel_logprobs
sequences.Packed
schedule.learning_rate
"""
"""A module by its name and that of a function or class that only it defines; and its tests, the quickest first, where they are not
`test_<module>` alone. Where files lie is found out: of several tests of a name it is the one that mirrors the module's place."""


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
    """Both tables, by the module's name; raises LookupError for what is not there, or twice."""
    found: dict[str, Module] = {}
    for table, decides in ((DECISIONS, True), (MATHEMATICS, False)):
        for key, *tests in map(str.split, table.strip().splitlines()):
            name, _, defined = key.partition(".")
            place = defining(name, defined)
            files = [test_file(test, place) for test in tests or [f"test_{name}"]]
            found[name] = Module(str(place), tuple(map(str, files)), decides)
    return found


def defining(name: str, defined: str) -> Path:
    """The file `<name>.py` of the product with this function or class at its top."""
    files = [path for folder in PRODUCT for path in (ROOT / folder).rglob(f"{name}.py")]
    line = re.compile(rf"^(async def|def|class) {defined}\b", re.MULTILINE)
    return only({path.resolve() for path in files if line.search(path.read_text())}, f"{name}.{defined}")


def test_file(name: str, module: Path) -> Path:
    """The test file of this name."""
    found = {path.resolve() for path in (ROOT / "tests").rglob(f"{name}.py")}
    room = module.parent.parts[1:] if module.parts[0] == "streamrl" else module.parent.parts
    mirrored = (ROOT / "tests").joinpath(*room, f"{name}.py").resolve()
    return only({mirrored} if mirrored in found else found, f"{name}.py")


def only(found: set[Path], wanted: str) -> Path:
    """The only one there is, from the root."""
    if len(found) != 1:
        raise LookupError(f"expected one file of {wanted}, got {sorted(map(str, found))}")
    return found.pop().relative_to(ROOT)


def end_with_parent() -> None:
    """Have this process killed when the one that has forked it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait(pid: int, wall_s: float) -> tuple[int, float]:
    """Exit status of a child (negative: the signal that ended it) and its CPU time; it and what it started are gone then."""
    end = time.monotonic() + wall_s
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


def run(tests: Sequence[str], cpu_s: float, wall_s: float, *, imported: int | None = None) -> tuple[int, float]:
    """The tests in a forked process; what `wait` gives. `imported`: a pipe for what they import; their failures are then shown."""
    gc.freeze()
    pid = os.fork()
    if pid:
        return wait(pid, wall_s)
    status = 70
    try:
        os.setsid()
        end_with_parent()
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 6))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        shown = os.dup(2)
        said = os.open(os.devnull, os.O_WRONLY) if imported is None else os.memfd_create("said")
        os.dup2(said, 1)
        os.dup2(said, 2)
        import hypothesis
        import pytest

        # Found is enough: no smaller example is looked for. The same examples each time.
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", phases=phases, derandomize=True, database=None, deadline=None)
        hypothesis.settings.load_profile("mutants")
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "-m", SELECTION, *tests]))
        if imported is not None:
            if status:
                sys.stdout.flush()
                os.write(shown, os.pread(said, 1 << 20, 0))
            again = ("streamrl", "tests", "_pytest", "pytest", "__m")
            os.write(imported, "\n".join(name for name in sys.modules if not name.startswith(again)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def preload(tests: Sequence[str]) -> tuple[float, float]:
    """Run the tests on the module as it is, then import here what they imported, so that children need not; a child's CPU and wall time."""
    read, write = os.pipe()
    began = time.monotonic()
    status, used = run(tests, FIRST_S, FIRST_S, imported=write)
    wall_s = time.monotonic() - began
    os.close(write)
    with os.fdopen(read) as lines:
        names = lines.read().split()
    if status != 0:
        raise RuntimeError(f"these tests fail without any mutant: {' '.join(tests)}")
    for name in names:
        with contextlib.suppress(ImportError):  # made at run time, not imported
            importlib.import_module(name)
    return CPU_S + 4 * used, max(WALL_S, WALLS * wall_s)


class Job:
    """What a worker process keeps between mutants. Its working directory is its own copy of the tree."""

    path = ""
    cpu_s = wall_s = 0.0
    broken = ""
    """The module whose tests fail without any mutant."""


def begin(tree: Path) -> None:
    """A new worker: copy the tree and go there."""
    end_with_parent()
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
        if Job.broken == module.path:
            raise RuntimeError("its tests fail without any mutant")
        Job.broken = module.path
        Job.cpu_s, Job.wall_s = preload(module.tests)
        Job.path = module.path
        for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
            cached.unlink()
    original = path.read_text()
    try:
        path.write_text(source)
        status, _ = run(module.tests, Job.cpu_s, Job.wall_s)
    finally:
        path.write_text(original)
    return Tried(status == 0, status in (-signal.SIGXCPU, -signal.SIGKILL))


def chosen(name: str, module: Module, functions: Sequence[str], sample: int) -> list[Mutant]:
    """Return the chosen mutants: all, those of the named functions, or a fixed random sample."""
    found = list(mutants(name, (ROOT / module.path).read_text(), decides=module.decides))
    if functions:
        found = [mutant for mutant in found if any(mutant.key.startswith((f"{one}:", f"{one}.")) for one in functions)]
    if 0 < sample < len(found):
        found = [found[i] for i in sorted(random.Random(0).sample(range(len(found)), sample))]
    return found


def judged(name: str, found: Sequence[Mutant], tried: Iterator[Tried], known: set[str], *, whole: bool) -> tuple[Counter[str], list[str]]:
    """Counts, and what the list of equivalent mutants has wrong; `whole`: these are all mutants of the module."""
    counts, wrong = Counter[str](), list[str]()
    try:
        for mutant, (lives, timed_out) in zip(found, tried, strict=True):
            listed = mutant.key in known
            counts["mutants"] += 1
            counts["killed" if not lives else "equivalent" if listed else "lives"] += 1
            counts["timed out"] += timed_out
            if lives != listed:
                wrong.append(f"{'lives' if lives else 'dies, though listed as equivalent'}: {mutant.key}")
                print(wrong[-1], flush=True)
    except (RuntimeError, OSError) as error:
        if isinstance(error, BrokenProcessPool):
            raise
        wrong.append(f"{name} is not tried to its end: {error}")
        print(wrong[-1], flush=True)
    gone = {key for key in known if key.startswith(f"{name}.")} - {mutant.key for mutant in found} if whole else set()
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
        for name in ("streamrl", "producers", "consumers", "schemas", "scripts", "tests", "examples", "docs"):
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
    parser.add_argument("modules", nargs="*", metavar="MODULE[.FUNCTION]", help=f"all without any: {' '.join(table)}")
    parser.add_argument("--jobs", type=int, default=1, help="mutants tried at a time")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="try N mutants of each module, the same ones each time")
    given = parser.parse_args(arguments)
    names = list(dict.fromkeys(one.partition(".")[0] for one in given.modules)) or list(table)
    unknown = [name for name in names if name not in table]
    if unknown or given.jobs < 1 or given.sample < 0:
        parser.error(f"expected modules of the table, a job or more and a sample of 0 or more; got {unknown}, {given.jobs}, {given.sample}")
    listed = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    known = {line.rpartition("  # because ")[0] for line in listed}
    lines, sums, wrong = ["| module | mutants | killed | equivalent | score |", "|---|---|---|---|---|"], Counter[str](), list[str]()
    began = time.monotonic()
    with pool(given.jobs) as workers:
        # All at once: no job is idle at the end of a module.
        tried: list[tuple[str, list[Mutant], Iterator[Tried], bool]] = []
        for name in names:
            functions = [one for one in given.modules if one.startswith(f"{name}.") and name not in given.modules]
            found = chosen(name, table[name], functions, given.sample)
            results = workers.map(attempt, [table[name]] * len(found), [mutant.source for mutant in found])
            tried.append((name, found, results, not functions and not given.sample))
        for name, found, results, whole in tried:
            counts, faults = judged(name, found, results, known, whole=whole)
            sums, wrong = sums + counts, wrong + faults
            lines.append(row(name, counts))
            print(lines[-1], f"{time.monotonic() - began:.0f} s, ended by their time: {counts['timed out']}", flush=True)
    print("\n".join([*lines, row("all", sums)]))
    if given.write:
        PAGE.write_text(with_rows(PAGE.read_text(), lines[2:]))
    print(f"\n{time.monotonic() - began:.0f} s, {given.jobs} jobs; ended by their time: {sums['timed out']}; wrong: {len(wrong)}")
    return bool(wrong)


def with_rows(page: str, rows: Sequence[str]) -> str:
    """Put each row into a page in the place of the one of its module; a module that the page lacks is named, and left out."""
    for line in rows:
        head = line[: line.index("|", 1) + 1]
        page, found = re.subn(rf"^{re.escape(head)}.*$", lambda _, line=line: line, page, count=1, flags=re.MULTILINE)
        if not found:
            print(f"no row in {PAGE.name}: {line}")
    return page


def row(name: str, counts: Counter[str]) -> str:
    """A row of the table; the score leaves equivalent mutants out."""
    score = counts["killed"] / max(counts["mutants"] - counts["equivalent"], 1)
    return f"| {name} | {counts['mutants']} | {counts['killed']} | {counts['equivalent']} | {score:.1%} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
