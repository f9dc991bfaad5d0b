"""The learning rate at the corners of its schedules, and against torch's and transformers' schedulers."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import get_scheduler

from streamrl.config.check import check
from streamrl.config.load import convert
from streamrl.config.tree import Config, OptimizerConfig, RunConfig, TrainerConfig, schedule_steps
from streamrl.errors import ConfigError
from streamrl.trainers.factory import learning_rates
from streamrl.trainers.schedule import ScheduleKind, learning_rate
from tests.support.batches import train_batch
from tests.support.errors import raises

PEAK, WARMUP, TOTAL, FLOOR = 2.0, 5, 40, 0.25
Make = Callable[[torch.optim.Optimizer], LRScheduler]


def rates_of(make: Make, steps: int) -> list[float]:
    """The rates that a scheduler gives."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR gives `epoch` to its own schedulers, which torch has deprecated
        scheduler, found = make(optimizer), []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return found


FALL = TOTAL - 1 - WARMUP
COOLDOWN = 10


def ours(kind: ScheduleKind, step: int) -> float:
    steps: dict[str, int] = {"warmup_steps": WARMUP, "total_steps": TOTAL}
    return learning_rate(step, peak=PEAK, **steps, final_fraction=FLOOR, kind=kind, cooldown_fraction=COOLDOWN / TOTAL)


TORCH: dict[ScheduleKind, Callable[[torch.optim.Optimizer], list[LRScheduler]]] = {
    "constant": lambda o: [ConstantLR(o, factor=1.0)],
    "linear": lambda o: [LinearLR(o, start_factor=1.0, end_factor=FLOOR, total_iters=FALL)],
    "cosine": lambda o: [CosineAnnealingLR(o, T_max=FALL, eta_min=FLOOR * PEAK)],
    "wsd": lambda o: [ConstantLR(o, factor=1.0), LinearLR(o, start_factor=1.0, end_factor=FLOOR, total_iters=COOLDOWN)],
}


def torchs(kind: ScheduleKind) -> Make:
    """A rise of `WARMUP` steps, the first of them PEAK / WARMUP, then the schedule."""

    def make(optimizer: torch.optim.Optimizer) -> LRScheduler:
        rise = LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
        return SequentialLR(optimizer, [rise, *(then := TORCH[kind](optimizer))], milestones=[WARMUP, TOTAL - 1 - COOLDOWN][: len(then)])

    return make


@pytest.mark.parametrize("kind", sorted(TORCH))
def test_every_schedule_with_an_end_is_that_of_torch(kind: ScheduleKind) -> None:
    assert [ours(kind, step) for step in range(TOTAL)] == pytest.approx(rates_of(torchs(kind), TOTAL))
    later = [ours(kind, step) for step in (TOTAL, 10 * TOTAL)]
    assert later == pytest.approx([PEAK if kind == "constant" else FLOOR * PEAK] * 2), "it stays where the schedule ends"


DECAY = {"num_stable_steps": FALL - COOLDOWN, "num_decay_steps": COOLDOWN, "min_lr_ratio": FLOOR, "decay_type": "linear"}


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("constant", "constant_with_warmup", {}),
        ("inverse_sqrt", "inverse_sqrt", {}),
        ("cosine", "cosine_with_min_lr", {"num_training_steps": TOTAL - 1, "scheduler_specific_kwargs": {"min_lr_rate": FLOOR}}),
        ("wsd", "warmup_stable_decay", {"scheduler_specific_kwargs": DECAY}),
    ],
)
def test_after_the_rise_it_is_that_of_transformers(kind: ScheduleKind, name: str, options: dict[str, object]) -> None:
    """Whose own rise begins at 0."""
    theirs = rates_of(lambda o: get_scheduler(name, o, num_warmup_steps=WARMUP, **options), TOTAL)  # type: ignore[arg-type]
    for step in range(WARMUP, TOTAL):
        assert ours(kind, step) == pytest.approx(theirs[step]), step


def test_it_rises_falls_and_stays_above_its_floor() -> None:
    rates = [learning_rate(s, peak=2.0, warmup_steps=2, total_steps=7, final_fraction=0.5) for s in range(9)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0])
    assert learning_rate(2, peak=2.0, warmup_steps=1, total_steps=3, final_fraction=0.5) == pytest.approx(1.0)
    assert learning_rate(0, peak=3.0, warmup_steps=0, total_steps=1, final_fraction=0.1) == 3.0
    assert learning_rate(5, peak=3.0, warmup_steps=0, total_steps=1, final_fraction=1.0) == 3.0
    rate = learning_rate(10_000, peak=PEAK, warmup_steps=4, total_steps=9, final_fraction=0.3, kind="inverse_sqrt")
    assert rate == pytest.approx(0.3 * PEAK)


def test_schedules_that_cannot_be_are_refused() -> None:
    for values, key in (({"warmup_steps": 9, "decay_steps": 9}, "decay_steps"), ({"schedule": "inverse_sqrt"}, "warmup_steps")):
        with raises(ConfigError, key=f"trainer.optimizer.{key}"):
            check(convert({"data": {"train": "x"}, "trainer": {"optimizer": values}}, where="test"))
    for key, value in (("schedule", "cosines"), ("decay_steps", -1), ("cooldown_fraction", 1.5)):
        with raises(ConfigError, key=f"trainer.optimizer.{key}"):
            convert({"trainer": {"optimizer": {key: value}}}, where="test")


def test_the_length_is_that_of_the_run_unless_it_is_said() -> None:
    optimizers = (OptimizerConfig(), OptimizerConfig(decay_steps=30), OptimizerConfig(warmup_steps=90))
    configs = [Config(run=RunConfig(steps=70), trainer=TrainerConfig(optimizer=one)) for one in optimizers]
    assert [schedule_steps(config) for config in configs] == [70, 30, 91]


@pytest.mark.parametrize("warmup", [0, 2, 9, 10, 11, 30])
def test_an_old_configuration_means_what_it_meant(warmup: int) -> None:
    """The formula of the builds that had no other schedule."""

    def former(step: int) -> float:
        if step < warmup:
            return 6e-4 * (step + 1) / warmup
        done = min((step - warmup) / max(10 - 1 - warmup, 1), 1.0)
        return 6e-4 * (1.0 - (1.0 - 0.3) * done)

    rate = learning_rates(Config(run=RunConfig(steps=10), trainer=TrainerConfig(optimizer=OptimizerConfig(warmup_steps=warmup))))
    batches = [train_batch([{"prompt": [1], "answer": [2]}], stage_step=step) for step in range(40)]
    assert [rate(batch) for batch in batches] == [former(step) for step in range(40)]
