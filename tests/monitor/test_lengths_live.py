"""Lengths of a real loop's answers against numpy on its samples, and a bound on staleness that eats long answers."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.core.lengths import PER_OCTAVE
from streamrl.data.model import ensure_model
from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.lengths import quantiles
from streamrl.monitor.view import RunView
from streamrl.schemas.codec import decode
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import LEDGER, METRICS, SAMPLES, kind_of
from tests.support.harness import make_run, run_to_end
from tests.support.world.world import table_config

pytestmark = [pytest.mark.process, pytest.mark.soak]

STEPS = 120
CODE = """
async def of_many_lengths(task, engine):
    chat = engine.chat(task)
    await chat.generate(max_new_tokens=2 ** (task.index % 7))
    return chat.episode(reward=float(task.index % 2))
"""
WITHIN = 2 ** (1 / PER_OCTAVE) - 1
"""What a bucket is wide."""


class Seen:
    """What a run's streams hold at its end."""

    def __init__(self) -> None:
        self.view = RunView("lengths")
        self.entries: list[LedgerEntry] = []
        self.stored: dict[tuple[int, int], int] = {}
        """Sampled tokens by sequence and rollout."""

    @property
    def trained(self) -> npt.NDArray[np.int64]:
        used = [pair for entry in self.entries for group in entry.used for pair in zip(group.sequences, group.rollouts, strict=True)]
        return np.array([self.stored[pair] for pair in used])

    @property
    def dropped(self) -> npt.NDArray[np.int64]:
        named = [(drop.sequence, rollout) for entry in self.entries for drop in entry.drops for rollout in drop.rollouts]
        return np.array([self.stored[pair] for pair in named], np.int64)


async def run(place: Path, *, max_staleness: int) -> Seen:
    config = table_config(
        place,
        run={"name": "lengths", "steps": STEPS},
        model={"max_len": 80},
        tasks={"max_staleness": max_staleness, "num_rollouts": 2, "drop_zero_variance": False},
        sampling={"max_new_tokens": 64},
        producer={"concurrency": 32, "function": f"{place / 'code.py'}:of_many_lengths"},
        engine={"slots": 64},
        debug={"token_delay_s": 0.005},
    )
    directory, config = make_run(place, config)
    ensure_model(config, directory.model_dir)
    bus = MemoryBus("lengths", config.bus)
    seen = Seen()
    try:
        await run_to_end(config, directory, bus)
        for stream in (SAMPLES, LEDGER, METRICS):
            state = await bus.state(stream)
            for sequence in range(state.first, state.last + 1):
                message = await bus.fetch(stream, sequence)
                if stream == METRICS:
                    seen.view.metric(decode(message.body, MetricReport))
                elif stream == LEDGER:
                    seen.entries.append(decode(message.body, LedgerEntry))
                    assert seen.view.ledger(decode(message.body, LedgerLine))
                elif kind_of(message.subject) == "samples":
                    batch = decode_samples(message.body)
                    for row, rollout in enumerate(batch.rollouts.tolist()):
                        start, end = batch.offsets[row : row + 2].tolist()
                        seen.stored[sequence, rollout] = int(batch.loss_mask[start:end].sum())
    finally:
        await bus.close()
    return seen


async def test_a_bound_that_eats_long_answers_shows_in_the_distance(tmp_path: Path) -> None:
    for name in ("loose", "tight"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(CODE)
    loose = await run(tmp_path / "loose", max_staleness=24)
    tight = await run(tmp_path / "tight", max_staleness=1)
    for seen in (loose, tight):
        lengths = {"trained": seen.trained, "dropped": seen.dropped, "finished": np.array(list(seen.stored.values()))}
        told = quantiles(seen.view.lengths.counts)
        for name, found in lengths.items():
            assert sum(seen.view.lengths.counts.get(f"lengths/{name}", ())) == len(found)
            for word, part in (("p50", 0.5), ("p95", 0.95)):
                if len(found):
                    expected = float(np.quantile(found, part, method="inverted_cdf"))
                    assert told[f"lengths/{name}_{word}"] == pytest.approx(expected, rel=WITHIN)
        cut = seen.view.lengths.counts.get("lengths/cut", ())
        decided = np.concatenate([seen.trained, seen.dropped, np.repeat(2.0 ** ((np.arange(len(cut)) - 0.5) / PER_OCTAVE), cut)])
        points = np.unique(decided)
        shares = [np.searchsorted(np.sort(one), points, side="right") / len(one) for one in (seen.trained, decided)]
        # Between two edges the lengths themselves may be further apart than at the edges, by less than one bucket holds.
        widest = max(np.diff([0, *np.cumsum(np.histogram(decided, 2.0 ** (np.arange(40) / PER_OCTAVE))[0])])) / len(decided)
        assert seen.view.lengths.distance == pytest.approx(float(np.abs(shares[0] - shares[1]).max()), abs=float(widest))
    assert loose.view.lengths.distance is not None and tight.view.lengths.distance is not None
    # Measured on a loaded machine: 0.012 to 0.016 without a bound that matters, 0.111 to 0.113 with one.
    assert tight.view.lengths.distance > 3 * loose.view.lengths.distance and tight.view.lengths.distance > 0.06
