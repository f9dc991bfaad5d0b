"""Why rollouts end without being trained: causes by the reasons of drops. Plain functions over counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from streamrl.monitor.drawing import visible
from streamrl.monitor.numbers import Cause, RunNumbers
from streamrl.telemetry.names import DROP_REASONS, OTHER_REASON, counted_as

_SAID_CHARS = 60
"""A producer's own word is cut to these within a line."""
_LEFT_OUT_HINT = "the producer, or filters.function, says so itself: is its rule too strict for these problems?"

DEAD_LETTERS = Cause(
    "dead_letters",
    "most rollouts are in messages that cannot be used",
    "`streamrl dead list RUN` has them with the reason: is a producer of another version, or with another tokenizer, attached?",
)
ZERO_VARIANCE = Cause(
    "zero_variance",
    "most groups have rewards that are all equal, and are dropped",
    "other problems, a longer warm-up, a larger tasks.num_rollouts, or tasks.drop_zero_variance = false",
)
CAUSES: tuple[tuple[tuple[str, ...], Cause], ...] = (
    (("zero_variance",), ZERO_VARIANCE),
    (
        ("stale", "expired"),
        Cause("stale", "most rollouts are too old when their turn comes", "raise tasks.max_staleness, or lower producer.concurrency"),
    ),
    (
        ("timeout",),
        Cause("hung_tool", "user code runs into its time limits", "does a tool hang? raise producer.idle_timeout_s, or mend it"),
    ),
    (("failed", "deliveries"), Cause("failing_code", "most rollouts fail", "`streamrl status` has the newest failure; mend the code")),
    (("poison",), DEAD_LETTERS),
    (
        ("no_baseline",),
        Cause(
            "no_baseline",
            "most groups have no greedy answer to be compared with",
            "greedy rollouts end without a sample: `streamrl status` has the newest failure",
        ),
    ),
    (
        ("filtered",),
        Cause("given_up", "producers give most rollouts up", 'they return Failure(0, "filtered", why): is their rule too strict?'),
    ),
    (
        ("lost",),
        Cause(
            "lost_tasks",
            "most tasks are held by nobody any more, and end as lost",
            "does a producer acknowledge tasks and store no samples? see its log, and `streamrl trace RUN TASK`",
        ),
    ),
    (
        ("unrewarded", "late", "superseded_reward"),
        Cause("late_rewards", "most rewards come too late", "raise reward.late_versions, or make rewards faster"),
    ),
    (
        ("too_short", "too_long", "repetitive", "too_hard", "too_easy", "filter"),
        Cause(
            "filters",
            "most rollouts are refused by the section filters",
            "`streamrl status` has the reasons; widen its bounds, mend filters.function, or choose other problems",
        ),
    ),
    (("truncated",), Cause("truncated", "most answers are truncated by a length limit", "raise sampling.max_new_tokens and model.max_len")),
    (
        ("inexact",),
        Cause(
            "inexact",
            "most rollouts have tokens whose versions are guesses",
            "engines of another kind do not say them: tasks.inexact = 'allow' or 'mask', or an engine that does",
        ),
    ),
    (
        ("empty",),
        Cause("empty", "most groups have no token that is trained", "does the producer mask its answers, or tasks.overlong do so?"),
    ),
    (
        ("row_broken", "row_too_long"),
        Cause("rows", "most rows of the data cannot be used", "`streamrl status` names some: see the keys of [data], and its limits"),
    ),
    (
        ("blob_missing",),
        Cause(
            "lost_blobs",
            "most rollouts lack what they keep beside their samples",
            "raise bus.sample_blobs_bytes; is a producer of an earlier version attached?",
        ),
    ),
    (
        ("lost_version",),
        Cause("lost_version", "most rollouts are of versions that were lost with the end of the ledger", "it passes: newer ones come"),
    ),
    (
        ("duplicate",),
        Cause("duplicates", "most rollouts are there already", "does a producer publish a rollout twice, or take tasks it gave back?"),
    ),
)
"""A cause is that of more than half of what ends untrained. Each of `DROP_REASONS` has one; producers' own words have `left_out`."""


def cause_of(reasons: Mapping[str, float], drops: Mapping[str, int]) -> Cause | None:
    """The cause of more than half of the rollouts in `reasons`; None where there is no such one.

    Args:
        reasons: rollouts by reason.
        drops: of the whole run, for producers' own words.
    """
    counts: dict[str, float] = {}
    for reason, count in reasons.items():
        counts[counted_as(reason)] = counts.get(counted_as(reason), 0.0) + count
    total = sum(counts.values())
    if 2 * counts.get(OTHER_REASON, 0.0) > total:
        return left_out(drops)
    return next((cause for of, cause in CAUSES if 2 * sum(counts.get(reason, 0.0) for reason in of) > total), None)


def left_out(reasons: Mapping[str, int]) -> Cause:
    """Producers, and filters of the user's, end rollouts for reasons of their own: with those among `reasons`."""
    own = Counter({reason: count for reason, count in reasons.items() if reason not in DROP_REASONS})
    said = f": {_words(own)}" if own else ""
    return Cause("left_out", f"producers end most rollouts for reasons of their own{said}", _LEFT_OUT_HINT)


def since_newest_batch(numbers: RunNumbers, stones: Mapping[str, int]) -> Mapping[str, int]:
    """Rollouts by the reason for which they have ended since the newest batch: as the trainer says, which decides it.

    While it says nothing, as tombstones (`stones`) say it, where more than half of the tasks have ended by these; else none are known.
    """
    if numbers.untrained.ended:
        return numbers.untrained.ended
    return stones if 2 * (numbers.failed_tasks + numbers.given_up_tasks) > numbers.barren_tasks else {}


def barren_line(numbers: RunNumbers, stones: Mapping[str, int]) -> str:
    """Why tasks end and give no batch, and what to do; `stones`: rollouts that have ended without a sample, by reason."""
    said = f"{numbers.barren_tasks} tasks have ended without giving a batch"
    reasons = since_newest_batch(numbers, stones)
    if not reasons:
        return f"{said}, and the trainer has not said why. hint: see logs/trainer-0.log in the run directory"
    cause = cause_of(reasons, numbers.drops)
    counts = _words(Counter(reasons))
    if cause is None:
        return f"{said}, for several reasons ({counts}). hint: docs/operations.md has what each means"
    dead = f", the last for {visible(numbers.untrained.newest_dead)}" if cause is DEAD_LETTERS and numbers.untrained.newest_dead else ""
    mean = f", their mean reward is {numbers.untrained.reward:.3g}" if cause is ZERO_VARIANCE and numbers.untrained.rewarded else ""
    return f"{said}: {cause.what} ({counts}{dead}{mean}). hint: {cause.hint}"


def _words(reasons: Counter[str]) -> str:
    return ", ".join(f"{visible(reason)[:_SAID_CHARS]} {count}" for reason, count in reasons.most_common(3))
