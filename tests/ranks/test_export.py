"""What a run with a model in two parts leaves as model directories: while it trains, when it is stopped, at its end, when it is asked."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from streamrl.history.source import read_entries
from streamrl.runtime.rundir import RunDir
from tests.ranks.test_up import SHORT, write_problem
from tests.support.digests import digest_of
from tests.support.processes import until
from tests.support.programs import STREAMRL, Start
from tests.support.world.shapes import NAME

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(600)]
EVERY = 3
SETTINGS = (
    *SHORT,
    "trainer.shards=2",
    f"trainer.export_every={EVERY}",
    "weights.transport=bus",
)


def digest(path: Path) -> str:
    """Of the model that transformers finds in a directory."""
    model, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(told.values()), told
    return digest_of(model.named_parameters(), model.config.model_type)


async def test_a_run_that_is_stopped_and_one_that_ends_leave_their_newest_version(start: Start, tmp_path: Path) -> None:
    write_problem(tmp_path)
    run = RunDir(tmp_path / "runs" / NAME)

    async def up(steps: int) -> asyncio.subprocess.Process:
        settings = (*SETTINGS, f"run.steps={steps}")
        return await start(*STREAMRL, "up", "run.toml", "--json", *(word for text in settings for word in ("--set", text)))

    async def called(*words: str) -> tuple[int | None, str]:
        process = await start(*STREAMRL, *words)
        out, err = await asyncio.wait_for(process.communicate(), 200)
        return process.returncode, (out + err).decode()

    async def left() -> tuple[dict[int, str], dict[int, str]]:
        """Digests of the directories, and of the ledger, by version."""
        _, entries = await read_entries(NAME, base=tmp_path / "runs")
        there = {int(path.name.removeprefix("v")): digest(path) for path in sorted(run.hf.iterdir())}
        assert len({entry.digest for entry in entries}) == len(entries), "each has taught something"
        return there, {entry.version.number: entry.digest for entry in entries}

    process = await up(10_000)
    await until(lambda: (run.hf / f"v{2 * EVERY:08d}").exists(), within_s=300)
    assert await called("down", NAME) == (0, f"run {NAME} has stopped\n")
    await asyncio.wait_for(process.communicate(), 60)
    there, ledger = await left()
    newest = max(ledger)
    # The second is the warm-up's last.
    assert there.keys() == {2, *range(EVERY, newest + 1, EVERY), newest}
    assert there == {number: ledger[number] for number in there}

    process = await up(newest)  # which does not count the warm-up
    _, err = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, err.decode()
    there, ledger = await left()
    assert max(there) == max(ledger) > newest
    assert there == {number: ledger[number] for number in there}

    code, said = await called("export", NAME, "--version", "9999")
    assert code == 1 and "expected a version that has a checkpoint or its bytes on the bus, got 9999: there are" in said
    versions = re.findall(r"\b0\.(\d+)\b", said.partition("there are ")[2].partition("\n")[0])
    sources: set[str] = set()
    for number in map(int, versions):
        code, said = await called("export", NAME, "--version", f"0.{number}", "--out", f"out-{number}", "--json")
        assert code == 0, said
        sources.add(json.loads(said)["from"].partition(" ")[0])
        assert number == 0 or digest(tmp_path / f"out-{number}") == ledger[number]
    assert sources == {"checkpoint", "the"}, "from its parts, and from the bus"
