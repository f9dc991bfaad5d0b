"""The trainer's worker: puts the parts together and runs the loop in a thread of its own, beside the bus's event loop."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from msgspec import to_builtins

from streamrl.config.data import has_images
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.loop import LiveTrainer
from streamrl.consumers.training.ranks import check_rank, follow_rank_0, form_process_group, lead, others_of
from streamrl.consumers.training.sample_blobs import replayed
from streamrl.consumers.training.trimming import keep_trimmed
from streamrl.core.state import FoldState
from streamrl.data.model import ensure_model
from streamrl.data.vocabulary import vocab_size
from streamrl.runtime.collection import keep_all
from streamrl.runtime.run_end import write_end
from streamrl.runtime.worker import Worker, loading_model
from streamrl.schemas.control import RunEnd
from streamrl.schemas.events import NUMERICS_EVENT
from streamrl.schemas.versions import Version
from streamrl.telemetry.clock import StateClock
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.fingerprint import fingerprint_digest, numerics_fingerprint
from streamrl.weights.factory import make_publisher

logger = logging.getLogger(__name__)


async def main(worker: Worker) -> None:
    """Train until the run's end, then leave that under its key (`streamrl.runtime.run_end`); on a drain, checkpoint and return.

    The training loop is synchronous and owns its thread: a step of any length leaves heartbeats, publishing and reading alone.
    With `trainer.ranks` above 1 this is rank 0; the workers of the other indices do what it orders (`streamrl.consumers.training.ranks`).
    """
    if check_rank(worker):
        return await follow_rank_0(worker)
    clock = StateClock("setup")
    worker.timed("trainer", clock)
    trimming = asyncio.create_task(keep_trimmed(worker.bus, images=has_images(worker.config.data)))
    try:
        result = await asyncio.to_thread(train, worker, Caller(asyncio.get_running_loop(), clock))
    finally:
        trimming.cancel()
        await asyncio.gather(trimming, return_exceptions=True)
    if result is None:
        return None
    state, end = result
    logger.info("event=trainer_done version=%s finished=%s", state.version, end is not None)
    if end is not None:
        await write_end(worker.bus, worker.config.trainer.name, end)
        detail = {"version": str(end.version), "steps": end.steps, "warmup_steps": end.version.number - end.steps}
        await worker.event("finished", detail)


def train(worker: Worker, call: Caller) -> tuple[FoldState, RunEnd | None] | None:
    """Everything that happens in the training thread; None when the worker drains before all ranks have met.

    The backend is made in the thread that steps it: torch's thread count belongs to the thread that set it, and digits depend on it.
    """
    config, run_dir = worker.config, worker.run_dir
    worker.state = loading_model(config)
    model_dir = ensure_model(config, run_dir.model_dir)
    group = form_process_group(worker, call) if config.trainer.ranks > 1 else None
    if group is None and config.trainer.ranks > 1:
        return None
    make = partial(make_trainer, config, model_dir, profile_dir=run_dir.profile)
    leading = lead(make(), group) if group is not None else None
    others = others_of(leading, config.trainer) if leading is not None else None
    trainer = leading or make()
    numerics = numerics_fingerprint(config)
    worker.gpus = float(config.trainer.ranks) if numerics.get("cuda") else 0.0
    fingerprint = fingerprint_digest(numerics)
    call(worker.event(NUMERICS_EVENT, {"fingerprint": fingerprint, "values": numerics}))
    publisher = make_publisher(
        config.weights,
        bus=worker.bus,
        subjects=worker.subjects,
        policy="policy",
        run_dir=run_dir.path,
        loop=call.loop,
        report=worker.metrics,
        others=others,
    )

    def export(version: Version) -> None:
        path = run_dir.export_path(version)
        if not path.exists():
            trainer.export(path)

    live = LiveTrainer(
        config=config,
        subjects=worker.subjects,
        bus=worker.bus,
        call=call,
        trainer=trainer,
        publisher=publisher,
        run_dir=run_dir,
        fingerprint=fingerprint,
        export=export,
        say=lambda text: call(worker.notice(text)),
        vocab_size=vocab_size(model_dir),
        replayed=replayed(config, model_dir),
        doing=partial(setattr, worker, "state"),
    )
    worker.detail = lambda: to_builtins(live.untrained())
    keep_all()
    result = live.run(worker.draining.is_set)
    publisher.close()
    if leading is not None:
        leading.close()
    return result
