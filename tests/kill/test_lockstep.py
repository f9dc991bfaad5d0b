"""One long lockstep run in which trainer, rewarder, producer and evaluator are ended: it comes out as an undisturbed one."""

import copy
import json
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from streamrl.config.evaluation import EvaluationSetConfig
from streamrl.config.tree import Config
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.tasks import Sampling
from tests.support.audit.evaluations import problems_of
from tests.support.harness import read_ledger, run_to_end
from tests.support.ups import begun
from tests.support.world.nursery import Nursery
from tests.support.world.table import ASKING, EVALUATOR, OTHERS, REWARDER, TRAINER_AGAIN
from tests.support.world.world import Row, World, table_config, vandals, world

pytestmark = pytest.mark.nats

STEPS = 44
ROWS = {"sums": 9, "few": 6}


def lockstep(tmp_path: Path, **sections: dict[str, object]) -> Config:
    return table_config(tmp_path, run={"steps": STEPS}, tasks={"max_staleness": 0}, engine={"deterministic": True}, **sections)


async def undisturbed(tmp_path: Path) -> list[LedgerEntry]:
    """Its ledger, without a server and without rewarders."""
    async with begun(tmp_path / "calm", lockstep(tmp_path)) as (run, config, bus):
        await run_to_end(config, run, bus)
        return await read_ledger(bus, config.run.name)


async def test_every_call(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    rows = [{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(9)]
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = (EvaluationSetConfig(name="sums", path=str(path), n=2), EvaluationSetConfig(name="few", path=f"{path}@[0:6]"))
    config = lockstep(
        tmp_path,
        bus={"ack_wait_s": 0.5},
        reward={"workers": 1},
        evaluation={"sets": sets, "sampling": Sampling(temperature=1.0, max_new_tokens=5)},
    )
    calm = await undisturbed(tmp_path)
    async with world(config, own_server, children) as w:
        async with vandals(w):
            await w.disturb(Row("trainer", TRAINER_AGAIN.spots, (*OTHERS, "rewarder")))

        await w.disturb(REWARDER, ASKING)

        async with w.around(*OTHERS, "rewarder"), w.around("rewarder", "trainer"):
            await w.finished()
        await w.disturb(EVALUATOR)
        async with w.around(*EVALUATOR.beside):
            assert await w.child("evaluator") == 0
        await w.check()
        killed = await w.ledger()
        assert len(calm) == STEPS and len({entry.digest for entry in calm}) == len(calm)
        assert [(entry.version, entry.digest) for entry in killed] == [(entry.version, entry.digest) for entry in calm]
        assert [[group.task for group in entry.used] for entry in killed] == [[group.task for group in entry.used] for entry in calm]
        await check_evaluations(w)


async def check_evaluations(w: World) -> None:
    """No answer is lost or counted twice; and the audit that says so can fail."""
    found = await w.told("evaluation")
    folder = w.run.path / "evaluations"
    assert [(one["set"], one["final"]) for one in found] == [("sums", False), ("few", True)]
    assert found[1]["resumed"] >= 2, "of the first set the last death but two has left all answers, of the second two"
    assert problems_of(found, folder, rows=ROWS) == []
    assert found[0]["failed"] == 2, "one task in nine is given no reward"
    store = folder / found[0]["version"] / "sums.jsonl"
    lines = store.read_text().splitlines(keepends=True)
    wrong = copy.deepcopy(found)
    wrong[0]["accuracy"] += 0.01
    for text, told, says in (
        ([*lines, lines[1]], found, "2 times"),
        (lines[:-1], found, "each of 9"),
        (lines, [*wrong, found[1]], "mean of"),
    ):
        store.write_text("".join(text))
        assert any(says in problem for problem in problems_of(told, folder, rows=ROWS))
