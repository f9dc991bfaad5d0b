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
    """Like the next ones the key of `[data]`, where this set has another."""
    label_key: str | None = None
    metadata_key: str | None = None
    tools_key: str | None = None
    sampling_key: str | None = None
    chat_template_kwargs_key: str | None = None
    max_prompt_tokens: PositiveInt | None = None
