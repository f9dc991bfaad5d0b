"""Every declared metric has a real run in which it is finite and moves, or a word on why it stays or when it exists."""

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

import pytest

from streamrl.monitor.metrics_file import decoded, files
from streamrl.runtime.rundir import RunDir
from streamrl.telemetry.conditions import CONDITIONS, CONSTANTS
from streamrl.telemetry.names import METRICS
from tests.support.digits import TABLE, TRANSFORMER, write_digits
from tests.support.processes import worker_pid
from tests.support.programs import STREAMRL, Start


def test_conditions_are_those_of_declared_metrics() -> None:
    assert CONDITIONS.keys() - METRICS.keys() == set()
    assert all(METRICS[name].when == condition for name, condition in CONDITIONS.items())
    assert {name: one.stays for name, one in METRICS.items() if one.stays} == CONSTANTS and not CONSTANTS.keys() & CONDITIONS.keys()


CODE = """
import asyncio
import random
import time


async def of_many_kinds(task, engine):
    chat = engine.chat(task)
    await chat.generate(max_new_tokens=2 ** (task.index // 16 % 7))
    if task.index % 11 == 5:
        raise ValueError("what it was given is thrown away")
    if task.index % 13 == 3:
        await asyncio.sleep(2)
    return chat.episode()


def rarely_equal(task, episode):
    return float(random.random() < 0.5)


def that_may_hang(task, episode):
    if random.random() < 0.01:
        time.sleep(3600)
    return rarely_equal(task, episode)
"""
USELESS = '{"prompt": "123456789", "label": "1"}\n{"prompt": 3}\n' * 2
"""Rows that are too long and broken."""
ENDLESS = ("run.steps=1000000", "metrics.window_s=1", "data.max_prompt_tokens=4", "tasks.max_staleness=4", "trainer.minibatches=2")
TROUBLED = (
    *("model.max_len=80", "sampling.max_new_tokens=64", "engine.slots=8", "debug.token_delay_s=0.004", "warmup.max_steps=4"),
    *("tasks.batch_tasks=2", "tasks.overlong=mask", "tasks.drop_zero_variance=false", "evaluation.every=20"),
    *("producer.function=mine.py:of_many_kinds", "producer.idle_timeout_s=3"),
    *("reward.kind=mine.py:that_may_hang", "reward.timeout_s=5", "reward.max_hung=1"),
    *("loss.clip_low=0.001", "loss.clip_high=0.001", "loss.correction.kind=mask", "loss.correction.low=0.99", "loss.correction.high=1.01"),
    *("bus.ack_wait_s=2", "supervise.backoff_s=0.1", "supervise.max_failed_batches=0", "supervise.max_failed_share=1"),
    "trainer.optimizer.decay_steps=200",
)
"""Nothing goes as it should, and nothing ends the run."""
SCORED = (
    *("trainer.optimizer.learning_rate=0.003", "loss.critic.learning_rate=0.003", "loss.advantage=ppo", "loss.dual_clip=1.01"),
    *("loss.kl.loss_coef=0.01", "loss.kl.estimator=k3", "loss.opsm_delta=0.0001", "loss.correction.normalize=true"),
    *("loss.clip_low=0.01", "loss.clip_high=0.005", "loss.critic.clip=0.001"),
    *("loss.correction.kind=clip", "loss.correction.low=0.99", "loss.correction.high=1.01", "loss.correction.veto=0.9"),
    *("loss.correction.mask_staleness=2", "loss.correction.staleness_decay=0.9", "tasks.drop_zero_variance=false"),
    *("engine.kind=local", "trainer.backend=torch", "warmup.max_steps=0", "reward.kind=mine.py:rarely_equal"),
    "trainer.optimizer.ess_scaling=sqrt",
)
"""A transformer, a critic, a reference, and a correction that looks at all there is."""
OF_SCORED = {
    *("rollout/returns", "rollout/values", "rollout/log_probs", "rollout/rollout_log_probs", "rollout/ref_log_probs"),
    *(
        *("train/pg_dual_clipfrac", "train/opsm_clipfrac", "train/kl_loss", "train/value_loss", "train/value_clipfrac"),
        "train/value_grad_norm",
    ),
    *("train/value_norm", "train/stale_masked_fraction", "train/staleness_weight", "train/mis_batch_norm_factor", "train/ess_rollout"),
    *("train/mis_tis_clip_fraction_low", "train/mis_tis_clip_fraction_high", "train/mis_rs_mask_fraction_low"),
    *("train/mis_rs_mask_fraction_high", "train/mis_rs_catastrophic_token_fraction", "train/mis_rs_catastrophic_seq_fraction"),
    *("perf/log_probs_time", "perf/ref_log_probs_time", "perf/actor_train_time", "perf/actor_train_tok_per_s"),
}
OF_TROUBLED = {name for name, one in METRICS.items() if not one.when and not one.stays} - OF_SCORED | {
    *("eval/heldout", "lengths/cut_p50", "lengths/cut_p95", "lengths/distance"),
    *("train/mis_tis_mask_fraction_low", "train/mis_tis_mask_fraction_high", "rollouts/dropped_total/failed"),
}


@contextlib.asynccontextmanager
async def moving(start: Start, place: Path, keys: Iterable[str]) -> AsyncGenerator[tuple[RunDir, Callable[[], set[str]]]]:
    """A run that is up, and what has had two finite values in rows of one kind and owner; it is ended without grace."""
    (place / "mine.py").write_text(CODE)
    process = await start(*STREAMRL, "up", "run.toml", "--plain", *(word for key in keys for word in ("--set", key)))
    run = RunDir(place / "runs" / "digits")
    first: dict[tuple[str, str, str], float] = {}
    moved: set[str] = set()

    def look() -> set[str]:
        assert process.returncode is None, "the run has ended"
        for path in files(run.metrics):
            for row in filter(None, map(decoded, path.read_bytes().splitlines())):
                finite = [(name, value) for name, value in row.values.items() if math.isfinite(value)]
                moved.update(name for name, value in finite if first.setdefault((row.of, row.kind, name), value) != value)
        return moved

    try:
        yield run, look
    finally:
        for _ in range(2):
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 15)


async def to_move(names: set[str], look: Callable[[], set[str]], *, within_s: float = 200.0) -> None:
    """Wait until all of them have; fails with those that have not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while names - look():
                await asyncio.sleep(1.0)
    assert sorted(names - look()) == []


@pytest.mark.nats
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_name_without_a_condition_moves_in_a_run_that_has_all_troubles(start: Start, tmp_path: Path) -> None:
    write_digits(tmp_path, TABLE)
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write(USELESS)
    async with moving(start, tmp_path, (*ENDLESS, *TROUBLED)) as (run, look):
        await to_move({"train/loss", "tokens/cut_total", "engine/share/decode"}, look)
        for kind in ("trainer", "engine", "producer"):
            pid = worker_pid(run, kind, 0)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await to_move({f"{kind}/share/down"}, look)
        await to_move(OF_TROUBLED, look, within_s=400)


@pytest.mark.nats
@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_names_of_scores_and_corrections_move_in_a_run_that_has_them_all(start: Start, tmp_path: Path) -> None:
    table = TABLE.replace("[engine]\nkind", "[engine]\nslots = 64\nkind").replace("[sampling]\nmax_new_tokens = 3\n", "")
    small = TRANSFORMER.replace("[engine]\nslots = 64\n", "") + "[[loss.correction.reject]]\nlow = 0.98\nhigh = 1.02\n"
    write_digits(tmp_path, table + small)
    async with moving(start, tmp_path, (*ENDLESS, *SCORED)) as (_, look):
        await to_move(OF_SCORED, look, within_s=400)
