"""Ranks of a run's trainer that a launcher has started as workers: they meet by an address that rank 0 announces on the bus."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from streamrl.bus.reading import read_key
from streamrl.config.tree import TrainerConfig
from streamrl.consumers.training.budget import lower_budget
from streamrl.consumers.training.calls import Caller
from streamrl.data.model import ensure_model
from streamrl.errors import ConfigError, OutOfMemory, TrainingError
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import encode
from streamrl.schemas.subjects import PREFIX_RANKS
from streamrl.system import address_towards
from streamrl.tensors.mesh import mesh_of
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import uses_cuda
from streamrl.weights.factory import make_rank_publisher, weights_directory
from streamrl.weights.shm import host_id
from streamrl.weights.slices import OtherRanks

if TYPE_CHECKING:
    from streamrl.trainers.ranks.leading import LeadingTrainer
    from streamrl.trainers.ranks.process_group import ProcessGroup

logger = logging.getLogger(__name__)

_ANNOUNCE_S = 1.0
_ANNOUNCED_S = 5
"""An announcement lapses after this long, so that nobody looks for a rank 0 that has died."""
_POLL_S = 0.05
_LOOK_S = 0.2


def check_rank(worker: Worker) -> int:
    """The worker's rank, which is its index; one trainer alone may have any index. Raises ConfigError."""
    ranks = worker.config.trainer.ranks
    if ranks > 1 and worker.index >= ranks:
        raise ConfigError(
            f"expected an index below trainer.ranks = {ranks}, got {worker.index}",
            hint="a worker of kind trainer is one of its ranks; give --index",
        )
    return worker.index if ranks > 1 else 0


def form_process_group(worker: Worker, call: Caller) -> ProcessGroup | None:
    """Rank 0: announce a meeting until all ranks are there; None when the worker drains before.

    Raises:
        TrainingError: some did not come within `trainer.rank_timeout_s`.
        ConfigError: the GPU to train on is not there; or see `check_hosts`.
    """
    from streamrl.trainers.ranks.process_group import Rendezvous

    settings = worker.config.trainer
    key = _key(worker)
    meeting = Rendezvous(address_towards(worker.bus_url), ranks=settings.ranks, timeout_s=settings.rank_timeout_s)
    deadline, announced = time.monotonic() + settings.rank_timeout_s, 0.0
    while missing := meeting.missing():
        now = time.monotonic()
        if worker.draining.is_set():
            return None
        if now > deadline:
            raise TrainingError(
                f"expected {settings.ranks} ranks of the trainer within {settings.rank_timeout_s:g} s, got none of {missing}",
                hint="see their logs; each must reach this host at " + meeting.place.host,
            )
        if now >= announced + _ANNOUNCE_S:
            call(worker.bus.kv.put(key, encode(meeting.place), ttl_s=_ANNOUNCED_S))
            announced = now
        time.sleep(_POLL_S)
    call(worker.bus.kv.delete(key))
    logger.info("event=ranks_met ranks=%d generation=%s", settings.ranks, meeting.place.generation)
    group = meeting.begin(cuda=uses_cuda(worker.config, 0))
    meet_on_hosts(worker, group)
    return group


def meet_on_hosts(worker: Worker, group: ProcessGroup) -> None:
    """All ranks, before they load anything: tell each other which host they are on; raises as `check_hosts`."""
    weights, parts = worker.config.weights, mesh_of(worker.config.trainer).shard
    if parts == 1 or weights.transport == "bus":
        return
    here = host_id(weights_directory(weights, worker.run_dir.name, worker.run_dir.path))
    found = group.gather(int(hashlib.sha256(here.encode()).hexdigest()[:16], 16))
    check_hosts(weights.transport, found[:parts])


def check_hosts(transport: str, hosts: Sequence[int]) -> None:
    """Raise ConfigError where ranks that publish a part each, of which these are the hosts, share no memory to publish it in."""
    away = [rank for rank, host in enumerate(hosts) if host != hosts[0]]
    if away:
        raise ConfigError(
            f"weights.transport = {transport} reaches one host, but of the {len(hosts)} ranks that publish a part of the model each, "
            f"{', '.join(map(str, away))} share no memory with rank 0",
            hint=f"set weights.transport = 'bus', or start the first {len(hosts)} ranks on one host",
            key="weights.transport",
            ranks=away,
        )


def lead(trainer: Trainer, group: ProcessGroup) -> LeadingTrainer:
    """Rank 0's trainer as one that takes the other ranks along; raises TrainingError when they began with other parameters."""
    from streamrl.trainers.ranks.leading import LeadingTrainer

    return LeadingTrainer(trainer, group)


def others_of(leading: LeadingTrainer, settings: TrainerConfig) -> OtherRanks | None:
    """The ranks that have a part of what rank 0 publishes: the others of its copy of the parameters."""
    others = mesh_of(settings).shard - 1
    return OtherRanks(others, leading.offer, settings.rank_timeout_s) if others else None


async def follow_rank_0(worker: Worker) -> None:
    """Any other rank: do what rank 0 orders until it says that all is over. A drain is rank 0's to carry out.

    Raises:
        TrainingError: rank 0 did not announce itself in time, or has ended; the supervisor starts all ranks again.
        ConfigError: the GPU to train on is not there; or see `check_hosts`.
    """
    await asyncio.to_thread(_follow, worker, Caller(asyncio.get_running_loop()))


def _follow(worker: Worker, call: Caller) -> None:
    from streamrl.trainers.ranks.leading import follow

    group = _find(worker, call, worker.draining.is_set)
    if group is None:
        return
    meet_on_hosts(worker, group)
    model_dir = ensure_model(worker.config, worker.run_dir.model_dir)
    # Made in the thread that steps it, like rank 0's.
    trainer = make_trainer(worker.config, model_dir, profile_dir=worker.run_dir.profile)
    logger.info("event=following rank=%d", group.rank)
    worker.state = "follows rank 0"
    publisher = None
    if group.rank < mesh_of(worker.config.trainer).shard:
        publisher = make_rank_publisher(
            worker.config.weights,
            bus=worker.bus,
            subjects=worker.subjects,
            policy="policy",
            run_dir=worker.run_dir.path,
            loop=call.loop,
            rank=group.rank,
        )
    try:
        follow(trainer, group, publisher.offer if publisher is not None else None)
        if publisher is not None:
            publisher.close()
    except OutOfMemory as error:
        if error.micro_tokens:
            _, said = call(lower_budget(worker.bus, worker.config.trainer, error.micro_tokens, error.number))
            call(worker.notice(said))
        raise
    del trainer  # a model that is cut holds the group
    group.close()


def _find(worker: Worker, call: Caller, stop: Callable[[], bool]) -> ProcessGroup | None:
    from streamrl.trainers.ranks.process_group import RendezvousAddress, join

    settings = worker.config.trainer
    cuda = uses_cuda(worker.config, worker.index)
    deadline = time.monotonic() + settings.rank_timeout_s
    while not stop():
        place = call(read_key(worker.bus.kv, _key(worker), RendezvousAddress))
        if place is not None:
            group = join(place, rank=worker.index, ranks=settings.ranks, cuda=cuda, timeout_s=settings.rank_timeout_s, stop=stop)
            if group is not None:
                return group
        if time.monotonic() > deadline:
            raise TrainingError(
                f"rank {worker.index} of the trainer expected rank 0 within {settings.rank_timeout_s:g} s, got no address to meet at",
                hint="see logs/trainer-0.log",
            )
        time.sleep(_LOOK_S)
    return None


def _key(worker: Worker) -> str:
    return f"{PREFIX_RANKS}{worker.config.trainer.name}"
