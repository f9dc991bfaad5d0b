"""The numbers of a run as people see them: in the live view, in `streamrl status`, in the summary."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from streamrl.config.evaluation_sets import HELDOUT
from streamrl.schemas.control import Untrained
from streamrl.schemas.versions import Version


class EngineLine(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    engine: str
    serving: str
    """Version served, or `-` before the first weights."""
    running: int
    waiting: int
    slots: int
    behind: int | None = None
    """Versions behind the newest one; None before the first weights, and of an engine that is pinned."""
    tokens_per_s: float = 0.0
    """Sampled, over the last ten seconds."""
    prefix_hits: float | None = None
    """Part of the prompt tokens that was in its prefix cache, over the window before; None: not known."""
    pinned: bool = False
    """It serves evaluations, at versions of theirs."""
    degraded: str = ""
    """What it does otherwise than it was asked to, and why."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a run waits for."""

    cause: str = ""
    """For programs: `bus`, `engine`, `user_code`, ...; empty in events of an earlier version."""
    what: str
    hint: str
    since_s: float = 0.0
    """Unix seconds since when nothing has moved."""
    normal: bool = False
    """It is known to take long: a model that loads, a step."""


class Level(StrEnum):
    """How an objective is met."""

    OK = "ok"
    WARN = "warn"
    BREACH = "breach"


class Cause(msgspec.Struct, frozen=True):
    """Why, and what to do."""

    name: str
    """For programs: `slow_engine`, `few_producers`, ..."""
    what: str
    hint: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """An objective that is not met, or not for long any more."""

    objective: str
    """Key of the section `slo`."""
    level: Level
    value: float
    bound: float
    reached: float | None = None
    """The newest value that was at the level, where `value` is below it by now; None: it still is at it."""
    causes: tuple[Cause, ...] = ()
    """The likeliest first."""
    since_s: float = 0.0
    """Unix seconds."""


class WorkerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process."""

    worker: str
    state: str
    pid: int = 0
    restarts: int = 0
    host: str = ""
    since_s: float = 0.0
    """Unix seconds since when it has been in this state; 0: not known."""
    silent_s: float = 0.0
    """Seconds since its event loop was heard; of workers that this process has started."""
    said: str = ""
    """Why it has ended, or had before it was started again lately, in its own last words; of workers that this process has started."""
    failed_rollouts: int = 0
    """Of a producer, those that have failed lately (`streamrl.monitor.failures.LATELY`)."""


def is_producer(worker: str) -> bool:
    """Whether a worker of this name is one, of the run or attached."""
    return worker.startswith("producer-")


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A set of problems asked at one version."""

    version: Version
    accuracy: float | None
    """Mean reward; None: no sample has one."""
    num: int
    set: str = HELDOUT
    versions: tuple[str, ...] = ()
    """The oldest and the newest that answered."""
    pinned: bool = False
    """Its engines held this version."""
    interval: tuple[float, float] | None = None
    """95 % bootstrap interval of `accuracy`."""
    passes: dict[int, float] = {}
    """pass@k by k."""
    majorities: dict[int, float] = {}
    """maj@k by k."""
    truncated_ratio: float | None = None
    """Of the answers; None: not known."""
    failed_ratio: float | None = None
    """Of all samples; None: not known."""
    response_len: float | None = None
    took_s: float | None = None
    problems: tuple[Problem, ...] = ()
    time_s: float = 0.0

    @property
    def answered_by(self) -> str:
        """The versions that answered, as `versions 0.4 to 0.9`, where they are not its own; empty: they are, or nobody tells."""
        told = tuple(dict.fromkeys(self.versions))
        if not told or told == (str(self.version),):
            return ""
        return f"version{'s' if len(told) > 1 else ''} {' to '.join(told)}"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out problem and what the policy made of it."""

    prompt: str
    expected: str
    got: str
    reward: float | None = None
    """None in runs that did not keep it: then the answer is right if it is the label."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One trained batch, or a stretch of neighbours with their means, sums and extremes."""

    number: int
    """Version number that it made; of a stretch the last."""
    warmup: bool
    """A batch of demonstrations: no reward, no staleness."""
    warm: bool
    """Whether the warm-up has ended with this batch or before it; demonstrations already made may still follow."""
    reward: float | None
    loss: float | None = None
    """Of a batch of demonstrations that is not of a warm-up: its negative log-likelihood a token, in nats."""
    age_min: int
    age_mean: float
    age_max: int
    """Ages of its groups in versions."""
    num_tokens: int
    time_s: float
    num_batches: int = 1


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts trained, and the time of workers and GPUs, over all sessions of a run (`streamrl.monitor.accounting`)."""

    rollouts_trained: int = 0
    rollouts_ended: int = 0
    """Trained, or decided against for any reason, failures included. Those in flight and those that wait for a batch are neither."""
    trained_share: float | None = None
    """Trained of those that have ended; None: none has."""
    tokens_trained: int = 0
    """In trained batches, prompts and warm-up included."""
    trainer_s: float = 0.0
    """Worker-seconds: the time that the trainer's processes were up, waiting included."""
    engine_s: float = 0.0
    """The same of engines for rollouts."""
    trainer_gpu_s: float = 0.0
    """GPU-seconds of the trainer: its time up, times its GPUs; 0 on the CPU."""
    engine_gpu_s: float = 0.0
    """The same of engines for rollouts."""
    gpu_s: float = 0.0
    """The sum of both, and where they share GPUs the larger one."""
    shared: bool = False
    """Trainer and engines compute on the same GPUs."""
    tokens_per_gpu_s: float | None = None
    """`tokens_trained` over `gpu_s`; None: on the CPU, or not known."""
    tokens_per_worker_s: float | None = None
    """On the CPU: `tokens_trained` over the worker-seconds of both."""
    complete: bool = True
    """False: there was a session of a build before this account, and its seconds are missing."""


class Learning(StrEnum):
    """Answers to the question if a run learns, as far as its numbers tell."""

    LOADING = "loading"
    EARLY = "early"
    UNDECIDED = "undecided"
    RISING = "learning"
    FALLING = "worse"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence on a run (`streamrl.monitor.verdict`)."""

    learning: Learning
    text: str
    """It says if the run learns, by what evidence, and what the bottleneck is."""


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run that people look at first."""

    verdict: Verdict | None
    account: Account
    version: str = ""
    """The newest one; empty: there was none yet, or of an earlier build."""
    reward: float | None = None
    """Mean of the last 20 batches."""
    reward_first: float | None = None
    """Mean of the first batches that the summary compares."""
    loss: float | None = None
    """In runs of kind `sft`: of the newest batch."""
    loss_first: float | None = None
    """Mean of the first batches."""
    heldout: float | None = None
    heldout_first: float | None = None
    """When reinforcement learning began."""
    heldout_set: str = HELDOUT
    heldout_interval: tuple[float, float] | None = None
    """95 % bootstrap interval."""
    steps_per_minute: float | None = None
    left_s: float | None = None


class RunNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment. Rates are per second over the last ten seconds, staleness in versions."""

    run: str
    phase: str
    """`starting`, `warm-up`, `training` or `finished`."""
    step: int
    """Batches trained by reinforcement learning."""
    steps: int
    """Where the run ends; 0: not known."""
    steps_per_minute: float | None = None
    """As fast as the newest batches, pauses left out; None: too few to say, or the run stands."""
    rollouts_per_s: float | None = None
    """Rollouts trained or dropped, as fast as the same batches; None likewise."""
    left_s: float | None
    """Seconds to `steps`, as fast as the newest batches; None: not known, as while it warms up, stands, or has just begun."""
    warmup_step: int
    warmup_steps: int
    version: str
    answer_probability: float | None
    reward: float | None
    """Mean of the last 20 batches."""
    reward_first: float | None = None
    """Mean of as many batches as the summary compares, the first ones; None: nobody has judged, or none has a reward."""
    loss: float | None = None
    """Of the newest batch, in runs of kind `sft`."""
    loss_first: float | None = None
    """Mean of the first batches, likewise."""
    rewards: tuple[float, ...]
    """Over the whole run, as the means of at most 40 equally long stretches."""
    heldout: float | None
    """Newest mean of the first set of problems."""
    heldout_first: float | None = None
    """Its mean when reinforcement learning began; None: nobody has judged, or not known."""
    heldout_interval: tuple[float, float] | None = None
    """Its 95 % bootstrap interval; None: not known."""
    heldout_set: str = HELDOUT
    """Name of that set."""
    heldout_by: str = ""
    """The versions that answered (`Evaluation.answered_by`)."""
    evaluations: tuple[Evaluation, ...] = ()
    """The newest of each of the other sets, without its problems."""
    tokens_made: int
    tokens_trained: int
    made_per_s: float
    trained_per_s: float
    staleness_p50: float
    staleness_p95: float
    staleness_max: int
    staleness_in_flight: float | None
    staleness_queued: float | None
    staleness_publish_lag: float | None
    engines_behind: float | None
    """Versions that the engines are behind the newest one now, their mean."""
    stream_lag: int
    """Messages on the sample stream that came after the newest batch closed."""
    stream_s: float
    """Age of the oldest of them in seconds."""
    stream_tokens: float | None = None
    """Sampled tokens on it that are neither trained nor dropped, about; None: not known."""
    stream_bytes: int
    tasks_ended: int
    """Trained or dropped."""
    tasks_granted: int
    """That may have been issued."""
    tasks_issued: int
    ungraded: int
    """Groups that rewarders have in hand or that wait for one."""
    tasks_in_flight: int
    """Tasks that producers hold, as of their newest reports."""
    hung_tasks: int
    """Of these, tasks whose user code has asked no engine for far longer than usual."""
    hung_s: float
    """For how long, the longest."""
    hung_graders: int = 0
    """Calls of custom rewards that take far longer than others."""
    hung_graders_s: float = 0.0
    """For how long, the longest."""
    graders_ended: int = 0
    """Such calls that were ended before their time so far, as too many hung."""
    barren_tasks: int
    """Tasks ended since the newest batch; many of them mean that what arrives makes no batch."""
    dropped: int
    """Rollouts decided against."""
    drops: dict[str, int]
    """The same by reason."""
    lengths: dict[str, tuple[int, ...]] = {}
    """Histograms of answer lengths (`streamrl.core.lengths`): finished, cut, trained, dropped; the newest weigh most."""
    length_distance: float | None = None
    """`lengths/distance`; None: too few answers to say."""
    length_cut: bool = False
    """Whether cut answers are in it; otherwise it is that of the ledger, before enough of what is cut was heard of."""
    failed_tasks: int
    """Tasks of which every rollout has failed since the newest batch."""
    given_up_tasks: int = 0
    """Tasks of which every rollout has ended since then with neither sample nor failure: a producer gave them up, or they were lost."""
    untrained: Untrained = Untrained()
    """The trainer's own words on the time since the newest batch."""
    failed_rollouts: int = 0
    """Rollouts that failed or timed out, of all that have ended, no filter's verdicts."""
    ended_rollouts: int = 0
    """Trained, dropped or failed, as far as it is known."""
    newest_error: str
    """Why a rollout failed last; empty: none was seen to."""
    unusable_rows: tuple[str, ...] = ()
    """The first rows of the data that were dropped as unusable: what is wrong, with their file and line."""
    swaps: int
    stalled: tuple[str, ...]
    """Producers that wait for room on the sample stream."""
    standing: Standing | None
    """What the supervisor has found the run to wait for; None while it moves."""
    slo: tuple[Finding, ...]
    """Objectives that are not met, as the supervisor finds them."""
    account: Account = Account()
    verdict: Verdict | None = None
    """None: nobody has judged."""
    trainer_tokens_per_s: float | None = None
    """Tokens under the loss mask that the trainer takes in a second of its steps, waiting left out; of the newest 20 batches."""
    trainer_waits: float | None = None
    """Part of the trainer's time in which it waited for samples, of the same batches."""
    engines: tuple[EngineLine, ...]
    workers: tuple[WorkerLine, ...]
    elapsed_s: float
