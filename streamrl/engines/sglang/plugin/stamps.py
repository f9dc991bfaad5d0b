"""Stamps: the version that samples a token is written down when its forward pass is launched, and travels with the token."""

from __future__ import annotations

from typing import Any

from streamrl.engines.live_swap.messages import VERSIONS_KEY


def stamp(result: Any, rows: int, version: int) -> None:
    """Give each row of a forward pass's result its version; SGLang appends the row's value to its request's `meta_info`."""
    output = getattr(result, "logits_output", None)
    if output is not None:
        output.customized_info = {**(output.customized_info or {}), VERSIONS_KEY: [version] * rows}


def one_for_each_token(processor: Any) -> None:
    """Speculative decoding makes several tokens of one row: repeat the row's stamp for each of them.

    SGLang collects one value a row. The stamps of a request are as many as its tokens again after each row's collection.
    """
    collect = processor._maybe_collect_customized_info

    def collect_for_each_token(i: int, req: Any, logits_output: Any) -> None:
        collect(i, req, logits_output)
        stamps = (req.customized_info or {}).get(VERSIONS_KEY)
        if stamps:
            stamps.extend([stamps[-1]] * (len(req.output_ids) - len(stamps)))

    processor._maybe_collect_customized_info = collect_for_each_token
