"""What a run with a model in two parts leaves as model directories: while it trains, when it is stopped, at its end, when it is asked."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.ranks.trained import SHORT, Trained
from tests.support.digests import digest_of
from tests.support.preloaded import PRELOADED
from tests.support.world.shapes import NAME

pytestmark = [pytest.mark.nats, pytest.mark.slow, pytest.mark.timeout(600)]
EVERY = 3


def digest(path: Path) -> str:
    """Of the model that transformers finds in a directory."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, told = loaded
    assert not any(told.values()), told
    return digest_of(model.named_parameters(), model.config.model_type)


async def test_a_run_that_is_stopped_and_one_that_ends_leave_their_newest_version(tmp_path: Path) -> None:
    trained = Trained(tmp_path, *SHORT, "trainer.shards=2", f"trainer.export_every={EVERY}", "weights.transport=bus")
    run = trained.run

    async def called(*words: str) -> tuple[int, str]:
        code, out, err = await PRELOADED.run("-m", "streamrl", *words, folder=tmp_path)
        return code, out + err

    async def left() -> tuple[dict[int, str], dict[int, str]]:
        """Digests of the directories, and of the ledger, by version."""
        entries = await trained.entries()
        there = {int(path.name.removeprefix("v")): digest(path) for path in sorted(run.hf.iterdir())}
        assert len({entry.digest for entry in entries}) == len(entries), "each has taught something"
        return there, {entry.version.number: entry.digest for entry in entries}

    trained.begin("run.steps=10000")
    await trained.until(lambda: (run.hf / f"v{2 * EVERY:08d}").exists())
    assert await called("down", NAME) == (0, f"run {NAME} has stopped\n")
    await trained.end()
    there, ledger = await left()
    newest = max(ledger)
    # The second is the warm-up's last.
    assert there.keys() == {2, *range(EVERY, newest + 1, EVERY), newest}
    assert there == {number: ledger[number] for number in there}

    await trained.up(f"run.steps={newest}")  # which does not count the warm-up
    there, ledger = await left()
    assert max(there) == max(ledger) > newest
    assert there == {number: ledger[number] for number in there}

    code, said = await called("export", NAME, "--version", "9999")
    assert code == 1 and "got 9999" in said
    versions = re.findall(r"\b0\.(\d+)\b", said.partition("there are ")[2].partition("\n")[0])
    sources: set[str] = set()
    for number in map(int, versions):
        code, said = await called("export", NAME, "--version", f"0.{number}", "--out", f"out-{number}", "--json")
        assert code == 0, said
        sources.add(json.loads(said)["from"].partition(" ")[0])
        assert number == 0 or digest(tmp_path / f"out-{number}") == ledger[number]
    assert sources == {"checkpoint", "the"}, "from its parts, and from the bus"
