"""Runs that 7fe21ef left on disk: the code of the day resumes, verifies, branches, back-tests, compares and records them again.

What is expected was written down when they were recorded (`data/*.json`), not computed here. A test that fails says that a run of a user
would be lost or decided otherwise; it is the code that is mended then, not the data.
"""

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.former import LATER_DECISIONS
from streamrl.config.load import from_json
from streamrl.core.fold_config import fold_config
from streamrl.core.state import FoldConfig
from streamrl.data.vocabulary import vocab_size
from tests.support import recorded as runs

pytestmark = pytest.mark.nats

NAMES = sorted(path.stem for path in runs.DATA.glob("*.json"))
TOLERANCE = {name: "1e-3" if name == "torch" else "1e-9" for name in NAMES}
"""Deviation of metrics that passes with other digits, which other libraries may give and another kind of processor to torch."""
Ask = Callable[..., tuple[int, str, str]]
Answer = Callable[..., Any]


@dataclass(frozen=True)
class Kept:
    """A recorded run, unpacked."""

    name: str
    place: Path
    facts: dict[str, Any]

    @property
    def recording(self) -> Path:
        return self.place / runs.RECORDING

    @property
    def here(self) -> tuple[str, str, str]:
        return ("--dir", str(self.place / "runs"), "--json")

    @property
    def length(self) -> int:
        """Versions on its line."""
        return len(self.facts["digests"])


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kept]:
    """Every run once, for tests that leave it as it is."""

    @functools.cache
    def take(name: str) -> Kept:
        place = tmp_path_factory.mktemp(name)
        return Kept(name, place, runs.unpack(name, place))

    return take


@pytest.fixture(params=NAMES)
def kept(request: pytest.FixtureRequest, unpacked: Callable[[str], Kept]) -> Kept:
    return unpacked(request.param)


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Exit code, stdout and stderr of a command."""
    with runs.Answering() as answering:
        yield answering.ask


@pytest.fixture
def answer(ask: Ask) -> Answer:
    """What a command prints as JSON."""

    def run(*arguments: str) -> Any:
        code, out, err = ask(*arguments)
        assert code == 0, err
        return json.loads(out)

    return run


def line(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Digests of the newest epoch's entries, by version number."""
    newest = {row["number"]: row["digest"] for row in sorted(rows, key=lambda row: row["epoch"])}
    return [newest[number] for number in sorted(newest)]


@pytest.fixture(scope="module")
def verified(ask: Ask) -> Callable[[Kept], dict[str, Any]]:
    """The report on every version of a recording, made once."""

    @functools.cache
    def verify(name: str, recording: Path) -> dict[str, Any]:
        return json.loads(ask("replay", str(recording), "--verify", "--tolerance", TOLERANCE[name], "--json")[1])

    return lambda kept: verify(kept.name, kept.recording)


def exact(name: str, report: dict[str, Any]) -> bool:
    """Whether digits must be the recorded ones: with the same libraries, and for torch on the same kind of processor."""
    return all(name != "torch" and text.startswith("processor: ") for text in report["fingerprint_lines"])


def check_report(report: dict[str, Any], kept: Kept, *, versions: int) -> None:
    """All versions were trained again, digit for digit where that can be asked for."""
    assert report["ok"] and report["versions"] == versions, report
    if exact(kept.name, report):
        assert report["equal"] == versions, report


def test_all_kinds_are_there() -> None:
    assert NAMES == ["drop", "fork", "late", "lockstep", "torch", "wait", "warmup"]


def test_the_ledger_is_read_as_it_was_written(kept: Kept) -> None:
    rows = runs.ledger(kept.recording)
    assert runs.versions(rows) == kept.facts["versions"]
    assert line(rows) == kept.facts["digests"]
    assert runs.body_digest(rows) == kept.facts["ledger_sha256"]


@pytest.mark.parametrize("source", ["run", "recording"])
def test_every_version_comes_out_again(kept: Kept, answer: Answer, verified: Callable[[Kept], dict[str, Any]], source: str) -> None:
    named = kept.name if source == "run" else str(kept.recording)
    how = ("--verify", "--tolerance", TOLERANCE[kept.name], *kept.here)
    report = verified(kept) if source == "recording" else answer("replay", named, *how)
    check_report(report, kept, versions=kept.length)
    assert report["began"] == "0.0"
    first, began = kept.facts["verify_from"]
    report = answer("replay", named, "--from", str(first), *how)
    check_report(report, kept, versions=kept.length - int(began.split(".")[1]))
    assert report["began"] == began


def test_another_digest_is_refused(
    unpacked: Callable[[str], Kept], tmp_path: Path, ask: Ask, verified: Callable[[Kept], dict[str, Any]]
) -> None:
    """One letter of one entry: the verification that the other tests rest on sees it."""
    kept, altered = unpacked("drop"), tmp_path / "altered"
    shutil.copytree(kept.recording, altered)
    table = pq.read_table(altered / "ledger.parquet")
    first, *rest = table.to_pylist()
    digest = first["digest"].encode()
    assert first["body"].count(digest) == 1
    first["body"] = first["body"].replace(digest, digest[:-1] + (b"0" if digest[-1:] != b"0" else b"1"))
    pq.write_table(pa.Table.from_pylist([first, *rest], table.schema), altered / "ledger.parquet")
    code, out, _ = ask("replay", str(altered), "--verify", "--json")
    report = json.loads(out)
    assert (report["equal"], report["first_difference"]["version"]) == (verified(kept)["equal"] - 1, "0.1")
    # On another processor the report says so, and judges by the metrics.
    assert (code, report["ok"]) == ((1, False) if report["same_fingerprint"] else (0, True))


def test_a_damaged_checkpoint_is_refused(unpacked: Callable[[str], Kept], tmp_path: Path, ask: Ask) -> None:
    kept = Kept("drop", tmp_path, runs.unpack("drop", tmp_path))
    first, began = kept.facts["verify_from"]
    path = kept.recording / "checkpoints" / f"main-v{int(began.split('.')[1]):08d}-e0" / "state.npz"
    arrays = dict(np.load(path, allow_pickle=False))
    arrays["logits"].view(np.uint8).reshape(-1)[np.flatnonzero(arrays["logits"].view(np.uint8))[0]] ^= 1
    np.savez(path, **arrays)
    code, _, err = ask("replay", str(kept.recording), "--verify", "--from", str(first))
    assert code == 1 and "expected parameters with digest" in err


def test_a_branch_trains_what_it_trained(kept: Kept, tmp_path: Path, answer: Answer, verified: Callable[[Kept], dict[str, Any]]) -> None:
    expected = kept.facts["branch"]
    sets = [part for one in expected["set"] for part in ("--set", one)]
    answer("replay", str(kept.recording), *sets, "--name", "branched", "--dir", str(tmp_path), "--json")
    entries = [json.loads(text) for text in (tmp_path / "branched" / "ledger.jsonl").read_text().splitlines()]
    assert len(entries) == expected["versions"]
    compared = answer("compare", str(kept.recording), str(tmp_path / "branched"), "--json")
    assert compared["same_batches_to"] == expected["same_batches_to"]
    if exact(kept.name, verified(kept)):
        assert entries[-1]["digest"] == expected["digest"]
        assert compared["same_digests_to"] == expected["same_digests_to"]


def test_a_back_test_judges_as_it_did(kept: Kept, answer: Answer) -> None:
    grid = ("--set", "tasks.max_staleness=1,4", "--set", "tasks.stale=drop,wait")
    report = answer("replay", str(kept.recording), "--policy-only", *grid, *kept.here)
    found = [{key: one[key] for key in expected} for one, expected in zip(report["outcomes"], kept.facts["backtest"], strict=True)]
    assert found == [pytest.approx(expected) for expected in kept.facts["backtest"]]


def test_it_is_recorded_again_as_it_was(kept: Kept, tmp_path: Path, answer: Answer) -> None:
    answer("record", kept.name, "--out", str(tmp_path / "again"), *kept.here)
    check_rows(kept.recording, tmp_path / "again", whole=True)


def check_rows(before: Path, after: Path, *, whole: bool) -> None:
    """Messages, samples and ledger of one recording are in another, byte for byte, as all of it or as its beginning.

    Names of drop reasons and of metrics may be others some day; their numbers may not. Columns that came later say nothing of old rows.
    """
    for name in ("samples", "messages", "ledger"):
        old, new = (pq.read_table(path / f"{name}.parquet") for path in (before, after))
        assert new.num_rows == old.num_rows if whole else new.num_rows > old.num_rows, name
        for later in set(new.column_names) - set(old.column_names):
            assert new.column(later).slice(0, old.num_rows).null_count == old.num_rows, later
        old_rows, new_rows = (nameless(table.slice(0, old.num_rows).to_pylist()) for table in (old, new.select(old.column_names)))
        assert new_rows == old_rows, name


def nameless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        if "drops" in row:
            row["drops"] = [{**drop, "reason": ""} for drop in row["drops"]]
            row["metrics"] = sorted(value for _, value in row["metrics"])
    return rows


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("fork", "late", "lockstep") else pytest.mark.soak) for name in NAMES]
)
def test_it_is_resumed_and_ends(name: str, tmp_path: Path, answer: Answer) -> None:
    """`up` with the same file in another place: nothing of the past changes, and all that follows can be trained again."""
    kept = Kept(name, tmp_path, runs.unpack(name, tmp_path))
    with runs.started(tmp_path, *runs.command("up", "run.toml", "--plain")) as up, runs.judged(tmp_path, name):
        code = up.wait(runs.PATIENCE_S)
    words = (tmp_path / "words.txt").read_text()
    assert code == 0 and "] resuming" in words, words
    assert words.count("it goes on without") == len(LATER_DECISIONS), "decisions that it was begun without"
    answer("record", name, "--out", str(tmp_path / "after"), "--checkpoints", *kept.here)
    check_rows(kept.recording, tmp_path / "after", whole=False)
    rows, known = runs.ledger(tmp_path / "after"), len(kept.facts["versions"])
    assert runs.body_digest(rows[:known]) == kept.facts["ledger_sha256"]
    epoch, number = map(int, kept.facts["versions"][-1].split("."))
    assert runs.versions(rows[known:]) == [f"{epoch}.{n}" for n in range(number + 1, kept.facts["last"] + 1)]
    report = answer("replay", str(tmp_path / "after"), "--verify", "--tolerance", TOLERANCE[name], "--json")
    check_report(report, kept, versions=kept.facts["last"])
    if name == "lockstep" and exact(name, report):
        assert line(rows) == kept.facts["digests_to_the_end"]


RENAMED = {"drop_zero_spread": "drop_zero_variance"}
"""Fields of the fold's configuration since."""


@pytest.mark.parametrize("of", ["config.json", "record"])
def test_its_configuration_decides_what_it_decided(kept: Kept, of: str) -> None:
    """Field by field: a field that came later has the value that leaves it out, which is the default of `FoldConfig`."""
    text = (kept.recording / "config.json").read_text()
    if of == "record":
        text = json.loads((kept.recording / "recording.json").read_text())["record"]["config"]
    tokens = vocab_size(kept.recording / "model")
    fold: dict[str, Any] = {str(RENAMED.get(name, name)): value for name, value in kept.facts["fold"].items()}
    assert fold_config(from_json(text), tokens) == FoldConfig(**fold, vocab_size=tokens)


def test_a_key_that_is_lacking_is_off(kept: Kept) -> None:
    """What a configuration written before a key was there says about it; these keys are off in every recorded run but `wait`."""
    tree = json.loads((kept.recording / "config.json").read_text())
    del tree["tasks"]["hold_ahead"], tree["debug"]["delay_versions"]
    found = fold_config(from_json(json.dumps(tree)))
    assert (found.hold_ahead, found.delay_versions) == (False, 0)
