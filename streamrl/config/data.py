"""The section `data`: the rows that tasks are made of."""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from streamrl.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class SourceConfig(Section, frozen=True, kw_only=True):
    """One of several sets of training rows: a table `[[data.sources]]` for each."""

    name: str = ""
    """The name that its tasks carry as `metadata.data_source`; letters, digits, `_` and `-`."""
    train: str = ""
    """Its rows, as `data.train`."""
    weight: tuple[tuple[NonNegativeInt, NonNegativeFloat], ...] | NonNegativeFloat = 1.0
    """Its part of the tasks, beside the others': a number, or pairs of a version and the weight from it on, the first for version 0."""
    prompt_key: str | None = None
    """`data.prompt_key` of this set, where it has another."""
    label_key: str | None = None
    """`data.label_key` of this set, where it has another."""
    messages_key: str | None = None
    """`data.messages_key` of this set, where it has another; empty: its rows have a prompt and a label."""
    metadata_key: str | None = None
    """`data.metadata_key` of this set, where it has another."""
    tools_key: str | None = None
    """`data.tools_key` of this set, where it has another."""
    images_key: str | None = None
    """`data.images_key` of this set, where it has another; empty: its rows have no images."""
    sampling_key: str | None = None
    """`data.sampling_key` of this set, where it has another."""
    chat_template_kwargs_key: str | None = None
    """`data.chat_template_kwargs_key` of this set, where it has another."""
    max_prompt_tokens: PositiveInt | None = None
    """`data.max_prompt_tokens` of this set, where it has another."""


class DataConfig(Section, frozen=True, kw_only=True):
    """Training and held-out problems: JSONL, Parquet or Arrow files, or saved `datasets`, each optionally sliced as `path@[a:b]`."""

    train: str = ""
    """Training rows: a file, a folder, a pattern of Parquet files, or a dataset of the Hub (docs/data.md)."""
    sources: tuple[SourceConfig, ...] = ()
    """Several sets of training rows instead of `data.train`."""
    curriculum: str = ""
    """`file.py:name` or `pkg.mod:name` of a function that weighs the sources anew; empty: their weights alone count."""
    curriculum_every: PositiveInt = 10
    """Versions between two calls of it."""
    heldout: str = ""
    """Held-out rows for evaluation; empty: none."""
    prompt_key: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""
    label_key: str = "label"
    """Field with the expected answer."""
    messages_key: str = ""
    """Field with a whole conversation, of which the assistant's turns are trained on; instead of prompt_key and label_key, in runs of
    kind `sft`. Empty: none."""
    metadata_key: str = ""
    """Field with a table handed to rewards and producers; empty: none."""
    tools_key: str = ""
    """Field with tool definitions for the chat template, as a list or its JSON text; empty: none."""
    reward_key: str = ""
    """Field with the row's own reward: the name of a built-in kind, or a table of `kind` and `options`; rows without one have the run's.
    Empty: all have the run's."""
    reward_options: dict[str, dict[str, Any]] = {}
    """By kind, options of the rewards that rows name, under those of the row itself; an address, a key and an isolation only here."""
    images_key: str = ""
    """Field with the row's images, for producer functions (docs/data.md): a path, bytes, a data URL, or a list of them; parts of messages
    may be images too. Null: the row has none. Empty: no row has."""
    images_folder: str = ""
    """Folder that paths of images begin in, and may not leave. Empty: that of the rows."""
    max_image_bytes: PositiveInt = 16_000_000
    """Bytes of all images of a row; tasks of rows with more end as `row_broken`."""
    sampling_key: str = ""
    """Field with a table of `sampling` fields for the row's own tasks, put over `sampling` (over `evaluation.sampling` in an evaluation);
    empty: none."""
    chat_template: bool = True
    """Apply the tokenizer's chat template (a string prompt becomes one user message)."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template, such as `enable_thinking = false`; one that it does not read is refused. They decide how
    prompts and every later turn begin."""
    chat_template_kwargs_key: str = ""
    """Field with a table of such variables for one row, which go before `data.chat_template_kwargs`; empty: none."""
    tool_calls: Literal["auto", "hermes", "qwen3_coder", "llama3", "deepseek", "none"] = "auto"
    """How the model writes calls of tools: Hermes and Qwen3, Qwen3-Coder and Qwen3.5, Llama 3, DeepSeek; auto: read from the chat
    template."""
    max_prompt_tokens: PositiveInt = 128
    """Tasks of longer prompts end as `row_too_long`; with reading = "whole" their rows are left out. Both are counted."""
    reading: Literal["stream", "whole"] = "stream"
    """stream: rows are read and encoded when their turn comes, and the task of one that cannot be used ends with the reason; whole: all
    training rows are read at each start, one that is broken refuses it, and those that are too long are left out."""
    shuffle: bool = True
    """Permute the rows by (seed, epoch); otherwise file order."""


def data_sets(data: DataConfig) -> list[tuple[str, DataConfig]]:
    """The sets of training rows by name, each with `[data]` as it is for it; one without a name where there are no `data.sources`."""
    if not data.sources:
        return [("", data)]
    own = [name for name in SourceConfig.__struct_fields__ if name not in ("name", "weight")]
    given = [{key: getattr(one, key) for key in own if getattr(one, key) is not None} for one in data.sources]
    return [(one.name, replace(data, sources=(), **keys)) for one, keys in zip(data.sources, given, strict=True)]


def has_images(data: DataConfig) -> bool:
    """Whether rows of some set of training rows may have images."""
    return any(one.images_key for _, one in data_sets(data))
