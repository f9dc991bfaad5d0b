"""The sentence on a run, case by case, and the account behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.ray import PlaceConfig, RayConfig
from streamrl.config.tree import Config, TrainerConfig
from streamrl.monitor.accounting import Devices, Spent, account, devices_of
from streamrl.monitor.glance import account_words, glance_of, verdict_over
from streamrl.monitor.numbers import EngineLine, Evaluation, Learning, RunNumbers, Standing, WorkerLine
from streamrl.monitor.slo import Signs
from streamrl.monitor.summary import summarize
from streamrl.monitor.untrained import ZERO_VARIANCE
from streamrl.monitor.verdict import Evidence, Pace, verdict
from streamrl.monitor.view import RunView
from streamrl.schemas.events import MetricReport
from streamrl.schemas.ledger import Drop
from streamrl.schemas.versions import Version
from tests.monitor.conftest import MakeEntry, as_line, view_of

NOTHING: RunNumbers = RunView("demo").numbers(elapsed_s=1.0)
LOADS = tuple(WorkerLine(worker=name, state="loading") for name in ("trainer-0", "engine-0", "evaluator-0", "producer-0"))


def engine(index: int) -> EngineLine:
    return EngineLine(engine=f"engine-{index}-ab", serving="0.1", running=4, waiting=0, slots=8, behind=0, tokens_per_s=100.0)


def heldout(*means: float, num: int = 200, every: int = 4, width: float | None = 0.04, of: str = "heldout") -> tuple[Evaluation, ...]:
    """Evaluations of every few versions, with intervals of this half width."""
    intervals = [None if width is None else (mean - width, mean + width) for mean in means]
    return tuple(
        Evaluation(version=Version(0, every * at), accuracy=mean, num=num, interval=interval, set=of)
        for at, (mean, interval) in enumerate(zip(means, intervals, strict=True))
    )


def rewards(*values: float, **more: Any) -> Evidence:
    """Batches with these rewards, or losses: their first and their second half are compared, at most 20 batches of each."""
    width = max(1, min(20, len(values) // 2))
    return Evidence(num_batches=len(values), first=values[:width], last=values[-width:], **more)


def wavy(low: float, high: float, count: int, wave: float = 0.03) -> list[float]:
    return [low + (high - low) * at / (count - 1) + wave * math.sin(2.4 * at) for at in range(count)]


FLAT = [0.5, 0.42, 0.57, 0.44] * 10
RISES = wavy(0.27, 0.85, 40)
LEARNT = [
    ("no batch", Evidence(), Learning.EARLY, "Too early to say whether it learns: no batch has been trained"),
    ("the warm-up", Evidence(warming=True), Learning.EARLY, "Too early to say whether it learns: the warm-up goes on"),
    ("a batch", rewards(0.5), Learning.EARLY, "Too early to say whether it learns: reward 0.50 after 1 batch"),
    ("few that rise", rewards(*wavy(0.0, 1.0, 9)), Learning.EARLY, "reward 0.81 after 9 batches"),
    (
        "few, and held out",
        rewards(0.2, 0.3, evaluations=heldout(0.3)),
        Learning.EARLY,
        "0.30 after 2 batches, held-out 0.30 (0.26 to 0.34)",
    ),
    ("rewards rise", rewards(*RISES), Learning.RISING, "Learning: reward 0.41 -> 0.71 in 40 batches"),
    ("twelve rise", rewards(*wavy(0.27, 0.85, 12)), Learning.RISING, "Learning: reward 0.40 -> 0.72 in 12 batches"),
    ("rewards fall", rewards(*RISES[::-1]), Learning.FALLING, "Getting worse: reward 0.71 -> 0.41 in 40 batches"),
    ("rewards that wander", rewards(*FLAT), Learning.UNDECIDED, "No clear change yet: reward 0.48 -> 0.48 in 40 batches"),
    ("a little among noise", rewards(*wavy(0.48, 0.52, 40, 0.2)), Learning.UNDECIDED, "No clear change yet: reward"),
    ("never a reward", rewards(*[0.0] * 40), Learning.UNDECIDED, "No clear change yet: reward is 0.00 in each of 40 batches"),
    ("two constants", rewards(*[0.25] * 6, *[0.75] * 6), Learning.RISING, "Learning: reward 0.25 -> 0.75 in 12 batches"),
    ("what is no number", rewards(*[math.nan, math.inf] * 3, *RISES[6:]), Learning.RISING, "in 40 batches"),
    ("nothing that is a number", rewards(*[math.nan] * 12), Learning.EARLY, "12 batches without a reward"),
    ("losses fall", rewards(*RISES[::-1], is_loss=True), Learning.RISING, "Learning: loss 0.71 -> 0.41 in 40 batches"),
    ("losses rise", rewards(*RISES, is_loss=True), Learning.FALLING, "Getting worse: loss 0.41 -> 0.71 in 40 batches"),
    (
        "held out rises",
        rewards(0.2, 0.3, evaluations=heldout(0.27, 0.4, 0.5, 0.85)),
        Learning.RISING,
        "Learning: held-out 0.27 -> 0.85 (0.81 to 0.89) in 12 batches",
    ),
    (
        "answered by later versions",
        rewards(
            0.2, evaluations=(replace(heldout(0.3)[0], versions=("0.4", "0.9")), replace(heldout(0.3, 0.9)[1], versions=("0.4", "0.4")))
        ),
        Learning.RISING,
        "Learning: held-out 0.30 (by versions 0.4 to 0.9) -> 0.90 (0.86 to 0.94) in 4 batches.",
    ),
    ("of its own name", rewards(0.2, evaluations=heldout(0.2, 0.9, of="gsm8k")), Learning.RISING, "Learning: gsm8k 0.20 -> 0.90"),
    ("held out falls", rewards(0.2, evaluations=heldout(0.9, 0.5)), Learning.FALLING, "Getting worse: held-out 0.90 -> 0.50"),
    (
        "held out falls while rewards rise",
        rewards(*RISES, evaluations=heldout(0.5, 0.3)),
        Learning.FALLING,
        "Getting worse: held-out 0.50 -> 0.30 (0.26 to 0.34) in 4 batches, reward 0.41 -> 0.71 in 40 batches",
    ),
    (
        "held out cannot tell, rewards can",
        rewards(*RISES, evaluations=heldout(0.31, 0.33)),
        Learning.RISING,
        "Learning: reward 0.41 -> 0.71 in 40 batches, held-out 0.31 -> 0.33 (0.29 to 0.37) in 4 batches undecided",
    ),
    ("neither can", rewards(*FLAT, evaluations=heldout(0.31, 0.33)), Learning.UNDECIDED, "in 40 batches, held-out 0.31 -> 0.33"),
    ("touching intervals", rewards(0.1, evaluations=heldout(0.5, 0.58)), Learning.EARLY, "Too early to say"),
    ("no intervals", rewards(0.1, evaluations=heldout(0.1, 0.9, width=None)), Learning.EARLY, "held-out 0.10 -> 0.90 in 4 batches"),
    ("three problems, all right now", rewards(0.1, evaluations=heldout(0.0, 1.0, num=3, width=0.0)), Learning.EARLY, "Too early"),
    ("twenty of them", rewards(0.1, evaluations=heldout(0.0, 1.0, num=20, width=0.0)), Learning.RISING, "Learning: held-out 0.00 -> 1.00"),
    (
        "rewards rise, asked once",
        rewards(*RISES, evaluations=heldout(0.31)),
        Learning.RISING,
        "in 40 batches, held-out 0.31 (0.27 to 0.35).",
    ),
    ("asked once", rewards(0.1, evaluations=heldout(0.9)), Learning.EARLY, "reward 0.10 after 1 batch, held-out 0.90 (0.86 to 0.94)"),
    ("asked of one version twice", rewards(0.1, evaluations=heldout(0.1, 0.9, every=0)), Learning.EARLY, "held-out 0.90 (0.86 to 0.94)"),
    ("no rewards at all", Evidence(num_batches=7), Learning.EARLY, "7 batches without a reward"),
]


@pytest.mark.parametrize(("given", "learning", "said"), [case[1:] for case in LEARNT], ids=[case[0] for case in LEARNT])
def test_whether_it_learns(given: Evidence, learning: Learning, said: str) -> None:
    found = verdict(given, Signs(numbers=NOTHING), Pace())
    assert found.learning == learning
    assert said in found.text and found.text.endswith(".") and ";" not in found.text


def signs(shares: Mapping[str, float], numbers: Mapping[str, Any] | None = None, **more: Any) -> Signs:
    window = {name.replace("/", "/share/", 1) if "saturated" not in name else name: value for name, value in shares.items()}
    engines = {"engines": (engine(0), engine(1))}
    return Signs(numbers=replace(NOTHING, **engines | dict(numbers or {})), window={"": window}, num_rollouts=4, batch_tasks=8, **more)


FULL = {"producer/generate": 0.95, "starvation/engines_saturated": 0.9, "engine/decode": 1.0}
SPARE = {"producer/generate": 0.95, "engine/decode": 0.6, "engine/idle": 0.4, "starvation/engines_saturated": 0.0}
FAST = Pace(trainer=1e5, waits=0.92, engines=8e3)
LIMITS = [
    ("engines", signs(FULL), FAST, "engines make 8.0k tokens/s, the trainer could take 100.0k: add engines"),
    ("engines, of no known speed", signs(FULL), Pace(waits=0.92), "the trainer waits 92% of its time for samples: add engines"),
    ("producers", signs(SPARE), FAST, "engines are idle 40% of the time, raise producer.concurrency or producer.workers"),
    ("versions", signs({"engine/held": 0.5, "engine/decode": 0.4}), FAST, "for want of tasks or versions, raise tasks.max_staleness"),
    ("credits", signs({"engine/idle": 0.7, "producer/wait_credit": 0.8}), FAST, "stand still 70% of the time for want of tasks"),
    (
        "rewards",
        signs({"producer/generate": 0.2, "producer/reward": 0.7}),
        FAST,
        "could take 100.0k: rewards take 70% of the time",
    ),
    ("rewarders", signs(SPARE, {"ungraded": 90}), FAST, "90 groups wait for rewarders, more than a batch (raise reward.workers"),
    ("tools", signs({"producer/generate": 0.2, "producer/tools": 0.7}), FAST, "tools take 70% of the time"),
    (
        "groups of equal rewards",
        signs(FULL, decided={"trained": 1, "rollouts/dropped_total/zero_variance": 80}),
        FAST,
        "most groups have rewards that are all equal, and are dropped",
    ),
    (
        "the trainer",
        signs(FULL),
        Pace(trainer=9800.0, waits=0.03, engines=8e3),
        "the trainer takes 9.8k sampled tokens/s and waits 3% of its time for samples: add ranks",
    ),
    ("nobody", signs(FULL), Pace(trainer=12e3, waits=0.35, engines=8e3), "the trainer could take 12.0k: they keep pace"),
    (
        "something that stands",
        signs(FULL, {"standing": Standing(what="credit", hint="")}),
        FAST,
        "nothing moves, the run waits for credit.",
    ),
]


@pytest.mark.parametrize(("given", "pace", "said"), [case[1:] for case in LIMITS], ids=[case[0] for case in LIMITS])
def test_what_the_bottleneck_is(given: Signs, pace: Pace, said: str) -> None:
    text = verdict(rewards(*RISES), given, pace).text
    assert text.startswith("Learning: reward 0.41 -> 0.71 in 40 batches; ")
    assert said in text


@pytest.mark.parametrize(
    ("evidence", "pace", "over", "said"),
    [
        (rewards(*RISES), FAST, True, "; engines made 8.0k tokens/s, the trainer could have taken 100.0k: add engines."),
        (
            rewards(*RISES),
            Pace(trainer=9.8e3, waits=0.0),
            True,
            "; the trainer took 9.8k sampled tokens/s and waited 0% of its time for samples: ",
        ),
        (
            rewards(*RISES[::-1], is_loss=True),
            Pace(trainer=1e5, waits=0.9),
            False,
            "; the trainer waits 90% of its time for samples: rows come too slowly.",
        ),
        (
            rewards(*RISES[::-1], is_loss=True),
            Pace(trainer=1e5, waits=0.0),
            False,
            "; the trainer takes 100.0k tokens/s and waits 0%",
        ),
        (rewards(*RISES), Pace(), False, "in 40 batches."),
        (Evidence(), FAST, False, "no batch has been trained."),
    ],
)
def test_a_run_that_is_over_one_without_producers_and_one_of_which_little_is_known(
    evidence: Evidence, pace: Pace, over: bool, said: str
) -> None:
    assert said in verdict(evidence, signs(FULL), pace, over=over).text


def test_a_model_that_loads_is_all_that_is_said_of_a_run_that_waits_for_it() -> None:
    loads = replace(NOTHING, workers=LOADS, standing=Standing(what="trainer-0, which is loading", hint="", normal=True))
    found = verdict(rewards(*RISES), Signs(numbers=loads), FAST)
    assert (found.learning, found.text.partition(": ")[2]) == (Learning.LOADING, "trainer-0, engine-0.")
    later = replace(loads, workers=LOADS[1:], engines=(engine(0),))
    assert verdict(rewards(*RISES), Signs(numbers=later), FAST).learning == Learning.RISING, "one engine more"


def report(worker: str, gpus: float | None = None, **seconds: float) -> MetricReport:
    kind = worker.partition("-")[0]
    last = {} if gpus is None else {f"{kind}/gpus": gpus}
    return MetricReport(worker=worker, sum={f"{kind}/{state}_s": amount for state, amount in seconds.items()}, last=last)


def counted(reports: Sequence[MetricReport], devices: Devices | None = None, **given: Any) -> Any:
    spent = Spent()
    for one in reports:
        spent.add(one)
    return account(spent.sums, devices or Devices(), **{"rollouts_trained": 30, "rollouts_dropped": 10, "tokens_trained": 6000, **given})


ON_GPUS = [
    report("trainer-0", setup=10.0),
    report("trainer-0", 2.0, compute=20.0, wait_samples=20.0),
    report("engine-0", 1.0, decode=40.0, idle=10.0),
    report("engine-1", setup=5.0),
    report("engine-1", 1.0, decode=45.0),
]
ON_CPU = [report("trainer-0", 0.0, compute=20.0, wait_samples=5.0), report("engine-0", 0.0, decode=25.0)]


def test_gpu_seconds_are_the_time_up_by_the_gpus_loading_included_and_a_shared_gpu_counts_once() -> None:
    found = counted(ON_GPUS, Devices(ranks=2))
    assert (found.trainer_s, found.engine_s, found.trainer_gpu_s, found.engine_gpu_s, found.gpu_s) == (100.0, 100.0, 100.0, 100.0, 200.0)
    assert (found.trained_share, found.tokens_per_gpu_s, found.tokens_per_worker_s) == (0.75, 30.0, None)
    shared = counted(ON_GPUS, Devices(ranks=2, shared=True))
    assert (shared.gpu_s, shared.shared, shared.tokens_per_gpu_s) == (100.0, True, 60.0)


NOBODY: dict[str, Any] = {"rollouts_trained": 0, "rollouts_dropped": 0, "tokens_trained": 0}
SHARE = "75% of 40 rollouts trained"
WORDS = [
    (counted(ON_GPUS, Devices(2)), [SHARE, "trainer 100 GPU-seconds, engines 100 GPU-seconds", "30 tokens trained a GPU-second"]),
    (
        counted(ON_GPUS, Devices(2, shared=True)),
        [SHARE, "trainer 100 GPU-seconds, engines 100 GPU-seconds of the same GPUs", "60 tokens trained a GPU-second"],
    ),
    (
        counted([ON_GPUS[1], ON_CPU[1]], Devices(2)),
        [SHARE, "trainer 80 GPU-seconds, engines 25 worker-seconds on the CPU", "75 tokens trained a GPU-second"],
    ),
    (counted(ON_CPU), [SHARE, "worker-seconds on the CPU: trainer 25, engines 25", "120 tokens trained a worker-second"]),
    (counted(ON_CPU[:1]), [SHARE, "worker-seconds on the CPU: trainer 25", "240 tokens trained a worker-second"]),
    (counted(()), [SHARE]),
    (counted((), **NOBODY), []),
]


def test_the_account_in_words() -> None:
    assert [account_words(found) for found, _ in WORDS] == [words for _, words in WORDS]


def test_on_the_cpu_there_are_no_gpu_seconds_and_what_is_not_known_makes_no_rate() -> None:
    found = counted(ON_CPU, Devices(shared=True))
    assert (found.gpu_s, found.shared, found.tokens_per_gpu_s, found.tokens_per_worker_s) == (0.0, False, None, 120.0)
    assert counted(ON_CPU, complete=False).tokens_per_worker_s is None
    hostile = counted([*ON_CPU, report("trainer-0", 0.0, compute=-1e9), report("trainer-0", 0.0, compute=math.inf, idle=math.nan)])
    assert (hostile.trainer_s, hostile.tokens_per_worker_s) == (25.0, 120.0)


def test_sessions_add_up_and_one_that_nobody_has_timed_makes_no_rate(entry: MakeEntry) -> None:
    first = view_of(*(entry(number) for number in (1, 2)))
    for one in ON_CPU:
        first.metric(one)
    second = view_of(*(entry(number) for number in (1, 2, 3)), before=first.totals(wall_s=50.0))
    for one in ON_CPU:
        second.metric(one)
    assert (second.account.trainer_s, second.account.engine_s, second.account.tokens_per_worker_s) == (50.0, 50.0, 3.0)
    former = msgspec.structs.replace(first.totals(wall_s=50.0), seconds={})
    for _ in range(2):
        view = view_of(*(entry(number) for number in (1, 2)), before=former)
        view.metric(ON_CPU[0])
        assert (view.account.complete, view.account.trainer_s > 0, view.account.tokens_per_worker_s) == (False, True, None)
        former = view.totals(wall_s=90.0)


def test_page_top_and_summary_have_one_account_which_is_the_ledgers(entry: MakeEntry) -> None:
    drop = Drop(sequence=9, task=9, rollouts=(0, 1, 2), reason="zero_variance")
    view = view_of(*(entry(number, drops=(drop,) if number % 2 else ()) for number in range(1, 41)))
    for one in ON_CPU:
        view.metric(one)
    numbers, summary = view.numbers(elapsed_s=1.0), summarize(view, wall_s=1.0)
    assert numbers.account == glance_of(numbers).account == summary.account == view.account
    assert (view.account.rollouts_trained, view.account.rollouts_ended) == (80, 80 + 60) == (80, summary.ended_rollouts)
    assert view.account.rollouts_ended - view.account.rollouts_trained == summary.dropped
    assert summary.verdict == verdict_over(view).text
    assert summary.verdict.partition(": ")[2].partition(";")[0] == "reward is 0.50 in each of 40 batches"
    view.ledger(as_line(entry(21, epoch=1)))
    assert view.account.rollouts_trained == 42, "what a fork makes void is not trained"


def test_more_engines_are_no_help_to_a_run_that_drops_most_rollouts(entry: MakeEntry) -> None:
    view = view_of(
        *(
            entry(number, drops=tuple(Drop(sequence=9, task=task, rollouts=(0, 1, 2), reason="zero_variance") for task in range(5)))
            for number in (1, 2)
        )
    )
    view.metric(report("trainer-0", compute=10.0, wait_samples=90.0))
    view.metric(report("engine-0", compute=100.0))
    assert ZERO_VARIANCE.what in verdict_over(view).text


def sglang(**more: Any) -> EngineConfig:
    return EngineConfig(kind="sglang", workers=more.pop("workers", 1), sglang=SglangConfig(**more))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (Config(), Devices(1, True)),
        (Config(trainer=TrainerConfig(gpu=1)), Devices(1, False)),
        (Config(engine=EngineConfig(kind="table")), Devices(1, False)),
        (Config(engine=sglang()), Devices(1, True)),
        (Config(engine=sglang(gpus=(1,))), Devices(1, False)),
        (Config(engine=sglang(workers=2, gpus=(1, 2)), trainer=TrainerConfig(ranks=2)), Devices(2, True)),
        (Config(engine=sglang(), ray=RayConfig(address="local")), Devices(1, False)),
        (Config(ray=RayConfig(address="local", trainer=PlaceConfig(gpus=0.5), engine=PlaceConfig(gpus=0.5))), Devices(1, True)),
    ],
)
def test_gpus_by_the_configuration(config: Config, wanted: Devices) -> None:
    assert devices_of(config) == wanted
