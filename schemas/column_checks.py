"""What is wrong with the columns of a decoded message, if anything: the rules that a sample must keep to be trained on.

They run for each message of a stream, most of which are small: what can be told from few distinct values is asked of those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError
from streamrl.schemas.columns import BLOBS, IMAGES, SCALARS, TURNS
from streamrl.schemas.images import MEDIA_TYPES
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import LEAST_LOGPROB, MOST_LOGPROB, LogprobMode, Status, is_agent
from streamrl.schemas.tasks import FORMER_FIELDS, Sampling, turn_sampling

_SHA256 = re.compile("[0-9a-f]{64}")


def all_well(b: SampleBatch, starts: npt.NDArray[np.int64]) -> bool:
    """Whether the messages whose rows begin at `starts` ([M]) keep every rule below, each of them; if not, they are to be asked singly."""
    tasks, sizes, samples = b.ints("task"), b.ints("group_size"), b.ints("num_samples")
    counts = np.diff(starts, append=b.num_rows)
    rising = b.rollouts[1:] > b.rollouts[:-1]
    rising[starts[1:] - 1] = True
    return (
        not _rows_problem(b)
        and np.array_equal(tasks, np.repeat(tasks[starts], counts))
        and np.array_equal(sizes, np.repeat(sizes[starts], counts))
        and bool(tasks.min() >= 0 and sizes.min() >= 1 and b.rollouts.min() >= 0 and (b.rollouts < sizes).all())
        # One sample a rollout, in order: what nearly every message holds.
        and bool(samples.min() == 1 == samples.max() and not b.ints("sample").any() and rising.all())
        and not (value_problem(b) or optional_problem(b))
    )


def shape_problem(b: SampleBatch) -> str:
    """The first thing in which columns do not fit together, or an empty string."""
    return _rows_problem(b) or _task_problem(b)


def _rows_problem(b: SampleBatch) -> str:
    if not b.same_offsets("tokens", "loss_mask", "logprobs"):
        return "expected tokens, loss_mask and logprobs of equal lengths"
    lengths = b.lengths
    if lengths.min() < 1:
        return "expected at least one token in every sample"
    if not b.same_offsets("span_length", "span_epoch", "span_number"):
        return "expected span_length, span_epoch and span_number of equal lengths"
    starts = b.span_offsets[:-1]
    if (b.span_offsets[1:] <= starts).any() or b.span_length.min() < 1:
        return "expected version spans of at least one token each"
    if (np.add.reduceat(b.span_length, starts, dtype=np.int64) != lengths).any():
        return "expected version spans that cover every token once"
    if b.span_number.min() < -1 or b.span_epoch.min() < -1 or ((b.span_number < 0) != (b.span_epoch < 0)).any():
        return "expected versions with epoch and number of at least 0, or both -1 where no model sampled"
    return ""


def _task_problem(b: SampleBatch) -> str:
    sizes = set(b.ints("group_size").tolist())
    if set(b.ints("task").tolist()) != {b.task} or sizes != {b.group_size} or b.task < 0 or b.group_size < 1:
        return "expected all rows to be of one task and one group size"
    if b.rollouts.min() < 0 or b.rollouts.max() >= b.group_size:
        return f"expected rollouts below the group size {b.group_size}"
    return _rollouts_problem(b)


def _rollouts_problem(b: SampleBatch) -> str:
    sizes, samples = b.ints("num_samples"), b.ints("sample")
    if sizes.min() == 1 == sizes.max() and not samples.any() and (b.rollouts[1:] > b.rollouts[:-1]).all():
        return ""  # one sample a rollout, in order: what nearly every message holds
    for rollout in np.unique(b.rollouts):
        rows = b.rollouts == rollout
        count = int(rows.sum())
        if (sizes[rows] != count).any() or not np.array_equal(np.sort(samples[rows]), np.arange(count)):
            return f"expected all samples of rollout {rollout} in one message"
    return ""


def value_problem(b: SampleBatch) -> str:
    """The first value that cannot be trained on, or an empty string. Shapes have been checked.

    Each column of tokens is gone through once or twice and never copied: a NaN shows in the least and in the greatest value.
    """
    if not (b.logprobs.min() >= LEAST_LOGPROB and b.logprobs.max() <= MOST_LOGPROB):
        return f"expected finite log-probs of at most 0, and at least {LEAST_LOGPROB:g}"
    if b.loss_mask.max() > 1 or b.loss_mask[b.offsets[:-1]].any():
        return "expected a loss mask of 0 and 1 that is 0 at each first token"
    if b.tokens.min() < 0:
        return "expected token ids of at least 0"
    if np.isinf(b.rewards).any():
        return "expected finite rewards"
    settings = set(zip(*(b.ints(name).tolist() for name in ("temperature", "top_p", "top_k", "max_new_tokens")), strict=True))
    if not all(math.isfinite(t) and t >= 0 and 0 < p <= 1 and k >= -1 and k != 0 for t, p, k, _ in settings):
        return "expected temperature of at least 0, top_p in (0, 1], top_k of -1 or at least 1"
    if min(new_tokens for *_, new_tokens in settings) < 1:
        return "expected max_new_tokens of at least 1"
    modes, statuses = set(b.texts("logprob_mode")), set(b.texts("status"))
    unknown = modes.difference(LogprobMode) | statuses.difference(Status)
    if unknown:
        return f"expected known values of logprob_mode and status, got {sorted(unknown)}"
    return _trained_problem(b, greedy=any(temperature == 0 for temperature, *_ in settings), modes=modes)


def _trained_problem(b: SampleBatch, *, greedy: bool, modes: set[str]) -> str:
    """What is wrong with the tokens that are trained on, given whether some row has temperature 0, and the log-prob modes there are."""
    trained = b.trained_in_spans > 0
    sampled = b.span_number >= 0
    unseen = trained & ~sampled
    if not greedy and not unseen.any():
        return ""
    rows = np.repeat(np.arange(b.num_rows), np.diff(b.span_offsets))
    if (trained & sampled & (b.ints("temperature")[rows] == 0)).any():
        return "expected a temperature above 0 where sampled tokens are trained on"
    if modes != {LogprobMode.NONE} and (np.array(b.texts("logprob_mode")) != LogprobMode.NONE)[rows[unseen]].any():
        return "expected every trained token to carry the version that sampled it"
    return ""


def optional_problem(b: SampleBatch) -> str:
    """What is wrong with the optional columns, if anything; all others have been checked."""
    names = b.optional_names
    if not names:
        return ""
    if any(name.startswith("turn_") for name in names) and (problem := _turns_problem(b)):
        return problem
    if names & {"branch_parent", "branch_shared"} and (problem := _branches_problem(b)):
        return problem
    if names & {"agent", "agent_reward"} and (problem := _agents_problem(b)):
        return problem
    if "sampling" in names and (problem := _sampling_problem(b)):
        return problem
    for name in BLOBS:
        for ref in b.optional(name) or ():
            if ref is not None and not (
                ref["name"] and _SHA256.fullmatch(ref["sha256"] or "") and _least(0, ref["start_row"]) and _least(0, ref["num_rows"])
            ):
                return f"expected a name, a SHA-256 in hex, and rows of at least 0 in {name}, got {ref}"
    if any(name.startswith("image_") for name in names) and (problem := _images_problem(b)):
        return problem
    if not all([np.isfinite(b.scalars(name)).all() for name in SCALARS if name in names]):
        return "expected finite times"
    if not all(value is not None and math.isfinite(value) for row in b.optional("counters") or () for _, value in row or ()):
        return "expected finite counters"
    return ""


def _least(bound: int, value: int | None) -> bool:
    return value is not None and value >= bound


def _images_problem(b: SampleBatch) -> str:
    refs = b.optional("images") or [None] * b.num_rows
    columns = [b.optional(f"image_{name}") or [None] * b.num_rows for name in IMAGES]
    for ref, *lists in zip(refs, *columns, strict=True):
        rows = 0 if ref is None else ref["num_rows"]
        if any(values is not None for values in lists) and not (
            rows and all(values is not None and len(values) == rows for values in lists) and all(map(_is_image, *lists))
        ):
            return f"expected a SHA-256 in hex, a media type and a number of bytes for each of {rows} images, got {lists}"[:400]
    return ""


def _is_image(sha256: str | None, media_type: str | None, num_bytes: int | None) -> bool:
    return bool(_SHA256.fullmatch(sha256 or "")) and media_type in MEDIA_TYPES and _least(1, num_bytes)


def _turns_problem(b: SampleBatch) -> str:
    columns = {name: values for name in TURNS if (values := b.optional(f"turn_{name}")) is not None}
    if not {"start", "length"} <= columns.keys():
        return "expected turns with start and length"
    for row in range(b.num_rows):
        turns = {name: values[row] for name, values in columns.items() if values[row] is not None}
        if not turns:
            continue
        if not {"start", "length"} <= turns.keys() or len({len(values) for values in turns.values()}) > 1:
            return "expected columns of turns that are equally long in every row"
        first = int(b.offsets[row])
        mask = b.loss_mask[first : int(b.offsets[row + 1])]
        if problem := _spans_problem(turns["start"], turns["length"], mask) or _values_problem(turns):
            return problem
    return ""


def _spans_problem(starts: Sequence[int | None], lengths: Sequence[int | None], mask: npt.NDArray[np.uint8]) -> str:
    """Of one row's turns and its loss mask."""
    end, trained = 1, 0
    for start, length in zip(starts, lengths, strict=True):
        if start is None or length is None or start < end or length < 1 or start + length > len(mask):
            return "expected turns in order, of at least one token each, after the first token and within their sample"
        end = start + length
        trained += int(mask[start:end].sum())
    return "" if trained == int(mask.sum()) else "expected every trained token in a turn, where turns are given"


def _values_problem(turns: dict[str, list[Any]]) -> str:
    times = [time for name in ("asked_s", "began_s", "finished_s") for time in turns.get(name, ()) if time is not None]
    if not all(map(math.isfinite, times)):
        return "expected finite times"
    texts: list[str] = [text for text in turns.get("sampling", ()) if text is not None]
    for text in texts:
        try:
            msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return f"expected a JSON object as a turn's sampling, got {text[:80]!r}"
    return ""


def _sampling_problem(b: SampleBatch) -> str:
    """Of what rows say of their sampling beyond the columns that every message has."""
    for text in {text for text in b.optional("sampling") or () if text is not None}:
        try:
            said = msgspec.json.decode(text, type=dict[str, Any])
            turn_sampling(Sampling(), said)
        except (msgspec.MsgspecError, RecursionError, SchemaError) as error:
            return f"expected what a row says of its sampling as JSON, got {text[:80]!r}: {str(error).partition(chr(10))[0]}"
        if twice := said.keys() & set(FORMER_FIELDS):
            return f"expected {sorted(twice)} in columns of their own, got {text[:80]!r}"
    return ""


def _agents_problem(b: SampleBatch) -> str:
    agents = b.agents or [""] * b.num_rows
    if wrong := sorted({name for name in agents if name and not is_agent(name)}):
        return f"expected agents of letters, digits and _.- with at most one slash, got {wrong[0][:80]!r}"
    known: dict[tuple[int, int, str], float | None] = {}
    for task, rollout, agent, reward in zip(b.ints("task").tolist(), b.rollouts.tolist(), agents, b.agent_rewards, strict=True):
        if reward is not None and not (agent and math.isfinite(reward)):
            return f"expected a finite reward of a named agent, got {reward} of {agent!r}"
        if agent and known.setdefault((task, rollout, agent), reward) != reward:
            return f"expected one reward for all samples of agent {agent} in rollout {rollout}, got several"
    return ""


def _branches_problem(b: SampleBatch) -> str:
    parents: list[int | None] = b.optional("branch_parent") or []
    shared: list[int | None] = b.optional("branch_shared") or []
    if len(parents) != len(shared) or any((parent is None) != (count is None) for parent, count in zip(parents, shared, strict=True)):
        return "expected branch_parent and branch_shared together"
    samples = b.ints("sample").tolist()
    rows = {place: row for row, place in enumerate(zip(b.rollouts.tolist(), samples, strict=True))}
    for row, (parent, count) in enumerate(zip(parents, shared, strict=True)):
        if parent is None or count is None:
            continue
        of = rows.get((int(b.rollouts[row]), parent), row)
        if not 0 <= parent < samples[row] or of == row:
            return "expected a branch's parent among the earlier samples of its rollout"
        mine, theirs = slice(*b.offsets[row : row + 2].tolist()), slice(*b.offsets[of : of + 2].tolist())
        if not 1 <= count <= min(b.lengths[row], b.lengths[of]) or (b.tokens[mine][:count] != b.tokens[theirs][:count]).any():
            return "expected a branch to begin with the tokens that it shares with its parent"
        if b.loss_mask[mine][:count].any():
            return "expected the tokens that a branch shares to be trained in its parent only"
    return ""
