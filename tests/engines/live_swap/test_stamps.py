"""Stamps and the count of forward passes, on stand-ins for what SGLang hands over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from streamrl.engines.live_swap.forwards import Forwards
from streamrl.engines.live_swap.messages import VERSIONS_KEY
from streamrl.engines.sglang.plugin.stamps import one_for_each_token, stamp


def test_every_row_is_stamped_and_other_information_stays():
    output = SimpleNamespace(customized_info={"other": [1, 2]})
    stamp(SimpleNamespace(logits_output=output), 2, 7)
    assert output.customized_info == {"other": [1, 2], VERSIONS_KEY: [7, 7]}
    stamp(SimpleNamespace(logits_output=None), 2, 7)
    stamp(object(), 2, 7)


def test_tokens_made_by_one_pass_share_its_stamp():
    class Processor:
        def _maybe_collect_customized_info(self, i: int, req: Any, output: Any) -> None:
            if req.customized_info is None:
                req.customized_info = {VERSIONS_KEY: []}
            req.customized_info[VERSIONS_KEY].append(output[i])

    processor = Processor()
    one_for_each_token(processor)
    req = SimpleNamespace(customized_info=None, output_ids=[1])
    processor._maybe_collect_customized_info(0, req, [4])
    req.output_ids += [2, 3, 4]
    processor._maybe_collect_customized_info(0, req, [5])
    req.output_ids += [5]
    processor._maybe_collect_customized_info(0, req, [6])
    assert req.customized_info == {VERSIONS_KEY: [4, 5, 5, 5, 6]}


def test_forward_passes_are_counted_always_and_kept_on_demand():
    for keep in (False, True):
        forwards = Forwards(keep=keep, device=torch.device("cpu"))
        for batch in (3, 4):
            forwards.launch_done(forwards.launching(), None, batch, batch == 3, 9)
        assert forwards.launched == 2
        taken = forwards.take().forwards
        assert [(one.index, one.batch, one.extend, one.version) for one in taken] == ([(1, 3, True, 9), (2, 4, False, 9)] if keep else [])
        assert forwards.take().forwards == ()
