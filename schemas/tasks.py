"""Rollout tasks: what the feeder issues and producers claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.images import Image
from streamrl.schemas.versions import Version

MOST_STOPS = 32
"""Stop strings of a request."""
LONGEST_STOP = 256
"""Characters of one."""
MOST_BIASES = 4096
"""Tokens of a logit bias."""
LONGEST_GRAMMAR = 1 << 16
"""Characters of a JSON schema or a regular expression."""
FORMER_FIELDS = ("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos")
"""Fields of `Sampling` that are always on the wire; the others, which came later, only where they say something."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn; the names are SGLang's, and so is the order in which logits are changed.

    Penalties, then the grammar, then `logit_bias`, then the temperature; `top_k`, `top_p` and `min_p` each look at the whole distribution
    that this gives, and what all of them leave is drawn from. The log-probs kept with a sample are those of this distribution. The
    trainer computes it too, but for penalties and grammars: such tokens are inexact (`tasks.inexact`).
    """

    max_new_tokens: int = 64
    """Longest completion."""
    temperature: float = 1.0
    """0 means greedy (evaluation only: a trained token needs a log-prob)."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together; 1: all."""
    top_k: int = -1
    """Draw from this many of the likeliest tokens; -1: all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, beside the model's own end."""
    ignore_eos: bool = False
    """Do not end at the model's own end."""
    min_p: float = 0.0
    """Draw from tokens that are at least this many times as likely as the likeliest one (arXiv 2407.01082); 0: all."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion. Its text ends before the first of them, its tokens with the one that completed it."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the completion has already, in [-2, 2] (OpenAI's)."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the completion has it, in [-2, 2] (OpenAI's)."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the completion has already are divided by it where above 0, else multiplied, in (0, 2] (arXiv 1909.05858; of
    the completion alone, as SGLang has it)."""
    logit_bias: dict[int, float] = {}
    """By token id, added to its logit; in [-100, 100]."""
    json_schema: str = ""
    """JSON schema, as text, that the completion's text obeys; empty: any text."""
    regex: str = ""
    """Regular expression that the whole text of the completion matches; empty: any text."""

    @property
    def cuts(self) -> bool:
        """Whether top-k, top-p or min-p leave only a part of the vocabulary, above temperature 0."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalized(self) -> bool:
        """Whether tokens that are there already are drawn otherwise."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def grammar(self) -> bool:
        """Whether the text has to have a form."""
        return bool(self.json_schema or self.regex)

    @property
    def inexact(self) -> bool:
        """Whether it is a distribution that no trainer computes."""
        return self.penalized or self.grammar

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise _wrong("max_new_tokens", ">= 1", self.max_new_tokens)
        if not self.temperature >= 0:
            raise _wrong("temperature", ">= 0", self.temperature)
        if not 0 < self.top_p <= 1:
            raise _wrong("top_p", "in (0, 1]", self.top_p)
        if self.top_k == 0 or self.top_k < -1:
            raise _wrong("top_k", "-1 or >= 1", self.top_k)
        if not 0 <= self.min_p <= 1:
            raise _wrong("min_p", "in [0, 1]", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise _wrong(name, "in [-2, 2]", getattr(self, name))
        if not 0 < self.repetition_penalty <= 2:
            raise _wrong("repetition_penalty", "in (0, 2]", self.repetition_penalty)
        if self.stop or self.logit_bias or self.grammar:
            _check_texts(self)

    def __hash__(self) -> int:
        # A table has none, and what a table holds may stand in any order.
        plain = [getattr(self, name) for name in self.__struct_fields__ if name != "logit_bias"]
        return hash((*plain, frozenset(self.logit_bias.items())))

    def changes(self, other: Sampling) -> dict[str, Any]:
        """Fields in which this one differs from `other`, by name, in their order; tokens of a bias by their ids."""
        changed = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) != getattr(other, name)}
        if "logit_bias" in changed:
            changed["logit_bias"] = dict(sorted(self.logit_bias.items()))
        return changed

    def later(self) -> dict[str, Any]:
        """What it says beyond `FORMER_FIELDS`, by name; empty where that is nothing."""
        return {name: value for name, value in self.changes(_NOTHING).items() if name not in FORMER_FIELDS}


_NOTHING = Sampling()


def turn_sampling(sampling: Sampling, said: Mapping[str, Any]) -> Sampling:
    """How a turn was drawn, of the sampling of its sample and what `TurnSpan.sampling` says of it: fields by name, as JSON has them.

    Raises:
        SchemaError: another name, or a value that its field does not take.
    """
    if unknown := said.keys() - set(Sampling.__struct_fields__):
        known = ", ".join(Sampling.__struct_fields__)
        raise SchemaError(f"expected fields of sampling ({known}), got {sorted(unknown)}", hint="see docs/configuration.md", key="sampling")
    try:
        given = msgspec.convert(said, Sampling, str_keys=True)
    except msgspec.ValidationError as error:
        raise SchemaError(f"expected the fields of sampling to have their types, got: {error}", key="sampling") from error
    return msgspec.structs.replace(sampling, **{name: getattr(given, name) for name in said})


def _wrong(name: str, expected: str, got: object) -> SchemaError:
    return SchemaError(f"sampling.{name} must be {expected}, got {got}", key=f"sampling.{name}")


def _check_texts(sampling: Sampling) -> None:
    """Stop strings, biases and grammars: what takes longer to look at than a number."""
    stop: Any = sampling.stop  # of any type in code of users: types are checked where a message is read
    bias: dict[Any, float] = sampling.logit_bias
    if not isinstance(stop, tuple):
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        msgspec.structs.force_setattr(sampling, "stop", stop)
    if not all(isinstance(text, str) for text in stop):
        raise _wrong("stop", "texts", stop)
    if not all(isinstance(token, int) for token in bias):
        raise _wrong("logit_bias", "by token ids, which are integers", list(bias)[:4])
    if len(stop) > MOST_STOPS or not all(0 < len(text) <= LONGEST_STOP for text in stop):
        expected = f"at most {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters"
        raise _wrong("stop", expected, f"{len(stop)} of {[len(text) for text in stop[:MOST_STOPS]]}")
    if len(bias) > MOST_BIASES:
        raise _wrong("logit_bias", f"of at most {MOST_BIASES} tokens", len(bias))
    for token, value in bias.items():
        if not (token >= 0 and -100 <= value <= 100):
            raise _wrong("logit_bias", "numbers in [-100, 100] by token ids of at least 0", f"{value} for {token}")
    if sampling.json_schema and sampling.regex:
        raise SchemaError("sampling has a json_schema and a regex, a text obeys one grammar", hint="leave one out", key="sampling.regex")
    if sampling.grammar and sampling.ignore_eos:
        said = "sampling has ignore_eos and a grammar, which is ended by the model's own end"
        raise SchemaError(said, hint="leave one out", key="sampling.ignore_eos")
    for name in ("json_schema", "regex"):
        if len(getattr(sampling, name)) > LONGEST_GRAMMAR:
            raise _wrong(name, f"of at most {LONGEST_GRAMMAR} characters", len(getattr(sampling, name)))
    if sampling.json_schema:
        try:
            msgspec.json.decode(sampling.json_schema, type=dict[str, Any] | bool)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _wrong("json_schema", "a JSON schema as text", f"{sampling.json_schema[:80]!r}: {error}") from error


class RewardSpec(msgspec.Struct, frozen=True):
    """A built-in reward that a row names for its own tasks."""

    kind: str
    options: dict[str, Any] = {}


class Refused(msgspec.Struct, frozen=True):
    """Why a task ends as soon as somebody claims it: its row cannot be used."""

    reason: str
    """Of the tombstone."""
    detail: str = ""


class RolloutTask(msgspec.Struct, frozen=True, kw_only=True):
    """One dataset row to be rolled out `num_rollouts` times; a group is the rollouts of a task.

    The feeder leaves `index` out of the wire's meaning: it equals the message's sequence - 1 and is stored for readers of the
    body alone.

    Example:
        >>> task = RolloutTask(run="r", index=5, source="main", prompt_ids=(7, 8), label="15", num_rollouts=4, min_version=2)
        >>> task.num_rollouts, task.sampling.temperature
        (4, 1.0)
    """

    run: str
    index: int
    """Task index: position in the run's task stream, from 0."""
    source: str
    policy: str = "policy"
    row: int = 0
    """Row of the dataset (after slicing and filtering)."""
    data_epoch: int = 0
    """How many times the dataset had been gone through when this row came up."""
    prompt_ids: tuple[int, ...] = ()
    prompt: Any = None
    """Prompt as the dataset has it: a string, or a list of chat messages."""
    label: Any = None
    tools: Any = None
    metadata: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The row's own variables of the chat template, over those of the configuration; not on the wire when unset."""
    num_rollouts: int = 1
    sampling: Sampling = Sampling()
    min_version: int = 0
    """Lowest version number that may sample this task's first token; an engine holds the request back until it serves it."""
    min_epoch: int | msgspec.UnsetType = msgspec.UNSET
    """Epoch of that version: any of a later epoch will do, whatever its number. Not on the wire when unset: the first."""
    seed: int = 0
    """Seed of the task; rollout k derives its own with `streamrl.core.seeds.rollout_seed`."""
    reward: RewardSpec | msgspec.UnsetType = msgspec.UNSET
    """The row's own reward, in place of the run's; not on the wire when unset."""
    refused: Refused | msgspec.UnsetType = msgspec.UNSET
    """Set where there is nothing to roll out: whoever claims the task stores its end. Not on the wire when unset."""
    image_blob: BlobRef | msgspec.UnsetType = msgspec.UNSET
    """Where the feeder has stored the images of the row, before the task: a row for each. Not on the wire when unset."""
    image_rows: tuple[Image, ...] | msgspec.UnsetType = msgspec.UNSET
    """What these rows hold; not on the wire when unset."""
    greedy_baseline: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the last of its rollouts is the `baseline`; not on the wire when unset."""

    @property
    def least(self) -> Version:
        """The lowest version that may sample this task's first token."""
        return Version(0 if isinstance(self.min_epoch, msgspec.UnsetType) else self.min_epoch, self.min_version)

    @property
    def baseline(self) -> int | None:
        """The rollout that is drawn greedily and never trained: the others' rewards are compared with its own. None: there is none."""
        return self.num_rollouts - 1 if self.greedy_baseline is True else None

    def for_rollout(self, rollout: int) -> RolloutTask:
        """The same as one of its rollouts has it: the baseline's sampling is greedy."""
        if rollout != self.baseline:
            return self
        return msgspec.structs.replace(self, sampling=msgspec.structs.replace(self.sampling, temperature=0.0))

    @property
    def images(self) -> tuple[Image, ...]:
        """The row's images, whose bytes a producer has of its engine: `await engine.image(0)`."""
        return () if isinstance(self.image_rows, msgspec.UnsetType) else self.image_rows


def on_the_wire(task: RolloutTask) -> dict[str, Any]:
    """A task as it is encoded: later fields of its sampling are there only where they say something, so that others cost nothing."""
    sampling = task.sampling
    former = {name: getattr(sampling, name) for name in FORMER_FIELDS}
    said = {name: value for name, value in msgspec.structs.asdict(task).items() if value is not msgspec.UNSET}
    return said | {"sampling": former | sampling.later()}
