"""What engines record beside each sampled token, because a trainer computes with it. Read off the configuration by both."""

from __future__ import annotations

from streamrl.config.bounds import Section
from streamrl.config.loss import likeliest_of
from streamrl.config.tree import Config

MOST_MASKED = 4096
"""Largest top-k for which SGLang 0.5.23 says what was drawn from, unless `sampling_mask_max_tokens` says otherwise."""


class Recording(Section, frozen=True, kw_only=True):
    """Of a token that is drawn from a part of the vocabulary its support, of one that is drawn from all of it the likeliest."""

    support: bool = False
    """Whether the former is recorded (`trainer.support_replay`)."""
    top: int = 0
    """How many the latter are, beside the token itself (`loss.dppo_top_k`); 0: none."""

    @property
    def anything(self) -> bool:
        """Whether there is anything to record."""
        return self.support or self.top > 0

    @property
    def logprobs(self) -> bool:
        """Whether their log-probs are recorded too."""
        return self.top > 0


NOTHING = Recording()


def recording_of(config: Config) -> Recording:
    """Of a run."""
    return Recording(support=config.trainer.support_replay, top=likeliest_of(config.loss))
