"""A run whose trainer is out of memory goes on with smaller micro-batches, says so, and is replayed by what its ledger says."""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.config.tree import DebugConfig
from streamrl.consumers.training.checkpoints import read_latest
from streamrl.core.batches import TrainBatch
from streamrl.errors import OutOfMemory
from streamrl.history.replay import Range, verify
from streamrl.history.replay_log import PastLedger
from streamrl.models import directories
from streamrl.models.directories import list_checkpoints
from streamrl.schemas.ledger import Choices
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import StepResult, out_of_memory
from streamrl.trainers.torch.trainer import TorchTrainer
from tests.loop.test_end import notices
from tests.support.harness import read_ledger, run_to_end
from tests.support.torch_runs import limited
from tests.support.ups import begun


@pytest.mark.process
async def test_a_halved_budget_is_kept_recorded_and_replayed(tmp_path: Path) -> None:
    async with begun(tmp_path, limited(tmp_path, 40)) as (run, config, bus):
        for steps in (2, 4):  # the second start begins with what the first has come to
            optimizer = replace(config.trainer.optimizer, decay_steps=6)
            config = replace(config, run=replace(config.run, steps=steps), trainer=replace(config.trainer, optimizer=optimizer))
            await run_to_end(config, run, bus)
        said = [text for text in await notices(bus, "halved") if "out of memory" in text]
        assert len(said) == 1 and "of 32 tokens" in said[0] and "trainer.micro_tokens is 64" in said[0]
        larger = replace(config, debug=DebugConfig(), run=replace(config.run, steps=5))
        await run_to_end(larger, run, bus)
        entries = await read_ledger(bus, "halved")
        assert {entry.choices for entry in entries} == {Choices(kept_layers=0)}, "what it chose stands beside the budget"
        assert [entry.micro_tokens for entry in entries] == [32] * 5, "more memory alone does not change it back"
        another = replace(larger, trainer=replace(larger.trainer, micro_tokens=48), run=replace(larger.run, steps=6))
        await run_to_end(another, run, bus)
        assert [entry.micro_tokens for entry in await read_ledger(bus, "halved")] == [32] * 5 + [48]
        assert len([text for text in await notices(bus, "halved") if "out of memory" in text]) == 1
        for span in (Range(last=5), Range(first=3, last=5)):
            report = await verify(larger, bus, run.model_dir, checkpoints=run.checkpoints, span=span)
            assert report.ok and report.same_fingerprint and report.equal == report.versions > 0, report.lines
        smaller = replace(larger, debug=DebugConfig(memory_tokens=14))
        report = await verify(smaller, bus, run.model_dir, span=Range(last=5))
        assert report.first_difference is not None
        assert all(tokens in report.first_difference.detail for tokens in ("32 tokens", "16 here"))


@pytest.mark.process
async def test_a_recorded_version_that_does_not_fit_any_more_is_trained_smaller(tmp_path: Path) -> None:
    """On a smaller device than it was made on: the ledger's budget would be out of memory again at each start."""
    config = limited(tmp_path, 0)
    config = replace(config, run=replace(config.run, name="smaller", steps=4, numerics="fast"))
    config = replace(config, trainer=replace(config.trainer, checkpoint_every=100, minibatches=2))
    async with begun(tmp_path, config) as (run, config, bus):
        await run_to_end(config, run, bus)
        before = await read_ledger(bus, "smaller")
        for one in list_checkpoints(run.checkpoints, "main-"):
            shutil.rmtree(one[1])  # all is trained again, from the initial weights
        await bus.kv.delete("latest/main")
        smaller = replace(config, debug=DebugConfig(memory_tokens=40))
        for _ in range(8):
            with contextlib.suppress(OutOfMemory):
                await run_to_end(smaller, run, bus)
                break
        after = await read_ledger(bus, "smaller")
        assert [entry.micro_tokens for entry in before] == [64] * 4
        forked = [entry for entry in after if entry.version.epoch > 0]
        assert forked and all(entry.micro_tokens == 32 for entry in forked)
        assert after[-1].version.number == 4 and PastLedger(after).entries[4].micro_tokens == 32


@pytest.mark.process
async def test_a_checkpoint_under_way_counts_when_memory_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = limited(tmp_path, 0)
    config = replace(config, run=replace(config.run, steps=4), trainer=replace(config.trainer, checkpoint_every=2))
    step, check = TorchTrainer.step, directories.check_files

    def out_at_three(self: TorchTrainer, batch: TrainBatch) -> StepResult:
        if batch.version.number == 2:  # as behind an optimizer that has written: nothing can be repeated
            raise out_of_memory(batch, 64, 32, 9, "planted")
        return step(self, batch)

    def slow(*given: Any, **named: Any) -> None:
        time.sleep(0.5)
        check(*given, **named)

    async with begun(tmp_path, config) as (run, config, bus):
        monkeypatch.setattr(TorchTrainer, "step", out_at_three)
        monkeypatch.setattr(directories, "check_files", slow)
        with pytest.raises(OutOfMemory):
            await run_to_end(config, run, bus)
        monkeypatch.undo()
        latest = await read_latest(bus, "main")
        assert latest is not None and latest.version == Version(0, 2)
        await run_to_end(config, run, bus)
        assert [entry.micro_tokens for entry in await read_ledger(bus, "halved")] == [64] * 2 + [32] * 2
