"""Section `data.sources`: several sets of training rows."""

from __future__ import annotations

from streamrl.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveInt, Section


class SourceConfig(Section, frozen=True, kw_only=True):
    """One of several sets of training rows: a table `[[data.sources]]` for each."""

    name: str = ""
    """What its tasks carry as `metadata.data_source`; letters, digits, `_` and `-`."""
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
