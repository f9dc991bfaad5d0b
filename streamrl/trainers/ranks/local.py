"""A trainer with all of its ranks on this machine, for whoever trains without a supervisor: replay, branches and taps.

Rank 0 is this process; the others are children, each `python -m streamrl.trainers.ranks.local` with what it needs on its standard input.
They end when rank 0 dismisses them or dies.
"""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from streamrl.config.load import dump, from_json
from streamrl.config.tree import Config
from streamrl.errors import StreamRLError, TrainingError
from streamrl.system import dies_with_parent
from streamrl.telemetry.logs import configure_logging
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import Trainer

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_POLL_S = 0.05
_END_S = 10.0


class _Start(msgspec.Struct, frozen=True):
    """What a child is told."""

    config: str
    model_dir: str
    rank: int
    port: int
    generation: str


@contextmanager
def open_trainer(config: Config, model_dir: Path) -> Generator[Trainer]:
    """`make_trainer`, and with `trainer.ranks` above 1 the processes of the other ranks; call from the thread that trains.

    Raises:
        TrainingError: a rank does not start.
    """
    ranks, timeout_s = config.trainer.ranks, config.trainer.rank_timeout_s
    if ranks == 1:
        try:
            yield make_trainer(config, model_dir)
            gc.collect()  # cycles hold the model, and a replay makes the next one on the same GPU
        finally:
            if config.trainer.backend == "megatron":
                from streamrl.trainers.megatron.core import end

                end()
        return
    from streamrl.trainers.ranks.leading import LeadingTrainer
    from streamrl.trainers.ranks.process_group import Rendezvous

    meeting = Rendezvous(_HOST, ranks=ranks, timeout_s=timeout_s)
    text = dump(config)
    starts = [_Start(text, str(model_dir), rank, meeting.place.port, meeting.place.generation) for rank in range(1, ranks)]
    children: list[subprocess.Popen[bytes]] = []
    patience_s = 0.0
    try:
        for start in starts:
            children.append(_spawn(start))
        deadline = time.monotonic() + timeout_s
        while missing := meeting.missing():
            ended = [rank for rank in missing if children[rank - 1].poll() is not None]
            if ended or time.monotonic() > deadline:
                why = "ended at once" if ended else f"did not come within {timeout_s:g} s"
                raise TrainingError(
                    f"rank {(ended or missing)[0]} of the trainer {why}",
                    hint="what it said is above",
                    rank=(ended or missing)[0],
                    ended=bool(ended),
                )
            time.sleep(_POLL_S)
        group = meeting.begin(cuda=uses_cuda(config, 0))
        try:
            trainer = LeadingTrainer(make_trainer(config, model_dir), group)
            yield trainer
            trainer.close()
            del trainer  # a model that is cut holds the group
            patience_s = _END_S
        except BaseException:
            # First of all: a group on NCCL is left by all ranks together, and would wait for ever for one that hangs.
            _end(children, 0.0)
            raise
        finally:
            group.close()
    finally:
        _end(children, patience_s)


def uses_cuda(config: Config, rank: int) -> bool:
    """Whether a rank trains on a GPU, so that gradients go over NCCL; raises ConfigError when its GPU is not there."""
    from streamrl.trainers.device import training_device

    return training_device(config.trainer, rank).type == "cuda"


def main() -> int:
    """Be one rank until it is dismissed; errors go to stderr without a traceback."""
    from streamrl.trainers.ranks.leading import follow
    from streamrl.trainers.ranks.process_group import RendezvousAddress, join

    start = msgspec.json.decode(sys.stdin.buffer.read(), type=_Start)
    configure_logging(f"trainer-{start.rank}")
    try:
        config = from_json(start.config, where="what rank 0 sent")
        settings, rank = config.trainer, start.rank
        place = RendezvousAddress(_HOST, start.port, start.generation)
        cuda = uses_cuda(config, rank)
        group = join(place, rank=rank, ranks=settings.ranks, cuda=cuda, timeout_s=settings.rank_timeout_s)
        if group is None:
            raise TrainingError(f"rank {rank} found no rank 0 at {place.host}:{place.port}", hint="has it ended?")
        follow(make_trainer(config, Path(start.model_dir)), group)
        if cuda:
            import torch

            logger.info("event=rank_ended rank=%d peak_gib=%.1f", rank, torch.cuda.max_memory_allocated() / (1 << 30))
        group.close()
    except StreamRLError as error:
        print(f"rank {start.rank}: error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _spawn(start: _Start) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-m", "streamrl.trainers.ranks.local"],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno(),
        # One that waits in a collective would hear of a killed rank 0 only after the timeout, and hold its GPU until then.
        preexec_fn=dies_with_parent(signal.SIGKILL),
    )
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(msgspec.json.encode(start))
    return child


def _end(children: Sequence[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Ranks that were dismissed end by themselves; those that were not, or hang, are killed."""
    deadline = time.monotonic() + patience_s
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


if __name__ == "__main__":
    sys.exit(main())
