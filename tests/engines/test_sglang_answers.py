"""Requests to SGLang and its results, without a server."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest

from streamrl.config.recording import Recording
from streamrl.engines.experts import Routing, from_sglang, from_text, read_routing
from streamrl.engines.extras import read_extras, write_extras
from streamrl.engines.live_swap.messages import stamp_of, version_of
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.sglang.answers import Row, Style, body_of, check_sampling, group_body, joined, must_cut
from streamrl.engines.wire import MetaInfo, Result
from streamrl.errors import EngineError, SchemaError
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.errors import raises

OLD, NEW = Version(0, 3), Version(1, 3)
STYLE = Style(engine="e", seeded=False, isolate=True)


def request_of(**sampling: Any) -> GenerateRequest:
    sampling.setdefault("max_new_tokens", 8)
    return GenerateRequest(request_id="r", prompt_ids=(5, 6), seeds=(1, 2**63 + 9), sampling=Sampling(**sampling))


def result(ids: list[int], total: int, reason: str | None = None, **meta: Any) -> Result:
    rows = [[-0.5, token, None] for token in ids]
    found = {"completion_tokens": total, "output_token_logprobs": rows, "finish_reason": None if reason is None else {"type": reason}}
    body = {"output_ids": ids, "meta_info": found | {"streamrl_versions": [stamp_of(OLD)] * len(ids)} | meta}
    return msgspec.json.decode(json.dumps(body), type=Result)


def taken(result: Result, style: Style = STYLE, **sampling: Any) -> Chunk:
    """The chunk that a first result gives."""
    chunk = Row(request_of(**sampling), 0, style, OLD).take(result)
    assert chunk is not None
    return chunk


def test_a_stamp_keeps_epoch_and_number():
    assert stamp_of(Version(0, 7)) == 7
    for version in (Version(0, 0), OLD, NEW, Version(9, 2**31)):
        assert version_of(stamp_of(version)) == version
        assert json.loads(json.dumps(stamp_of(version))) == stamp_of(version)
    with pytest.raises(SchemaError):
        version_of(-1)


def test_a_request_asks_for_what_is_needed_and_no_more():
    body = body_of(request_of(), "id", 1, STYLE, limit=5, serving=NEW, stream=False)
    assert body["sampling_params"]["max_new_tokens"] == 5
    assert body["extra_key"] == "streamrl:1.3;"
    assert "return_sampling_mask" not in body and "return_routed_experts" not in body and "sampling_seed" not in body["sampling_params"]
    style = msgspec.structs.replace(STYLE, seeded=True, isolate=False, routing=Routing(2, 2, 8))
    body = body_of(request_of(top_p=0.9, top_k=50), "id", 1, style, limit=5, serving=NEW, stream=True)
    assert body["sampling_params"]["sampling_seed"] == 9, "SGLang's seeds are signed"
    assert body["return_sampling_mask"] and body["return_routed_experts"] and "extra_key" not in body


@pytest.mark.parametrize("seeded", [False, True])
def test_a_group_is_asked_for_in_one_request_with_an_id_and_where_it_draws_by_them_a_seed_for_each(seeded: bool):
    style = msgspec.structs.replace(STYLE, seeded=seeded)
    one, other = (body_of(request_of(), f"id{index}", index, style, limit=5, serving=NEW, stream=False) for index in range(2))
    body = group_body([one, other])
    assert (body["rid"], body["input_ids"]) == (["id0", "id1"], [[5, 6], [5, 6]])
    assert body["sampling_params"] == ([one["sampling_params"], other["sampling_params"]] if seeded else one["sampling_params"])
    alone = ("rid", "input_ids", "sampling_params")
    assert {name: body[name] for name in body if name not in alone} == {name: one[name] for name in one if name not in alone}


def test_every_token_gets_its_stamped_version():
    chunk = taken(result([4, 5, 6], 3, "length", streamrl_versions=[stamp_of(OLD), stamp_of(OLD), stamp_of(NEW)]))
    assert chunk.spans == (VersionSpan(2, OLD), VersionSpan(1, NEW))
    assert (chunk.token_ids, chunk.logprobs, chunk.finish_reason) == ((4, 5, 6), (-0.5,) * 3, "length")
    assert chunk.logprob_mode is LogprobMode.SAMPLED
    chunk = taken(result([4, 5], 2, "abort", streamrl_versions=None))
    assert (chunk.token_ids, chunk.spans, chunk.finish_reason) == ((), (), "abort"), "an abort in the queue gives no tokens"


def test_a_stream_gives_each_token_once():
    row = Row(request_of(), 1, STYLE, OLD)
    parts = [row.take(result([4], 1)), row.take(result([], 1)), row.take(result([5, 6], 3)), row.take(result([], 3, "abort"))]
    assert parts[1] is None, "neither tokens nor an end"
    chunks = [part for part in parts if part is not None]
    assert [chunk.token_ids for chunk in chunks] == [(4,), (5, 6), ()]
    whole = joined(chunks)
    assert (whole.completion, whole.token_ids, whole.finish_reason) == (1, (4, 5, 6), "abort")
    assert whole.spans == (VersionSpan(3, OLD),)


def test_what_truncated_sampling_drew_from_has_its_own_log_probs():
    row = Row(request_of(top_k=2), 0, STYLE, OLD)
    chunk = row.take(result([4, 5], 2, "length", output_token_sampling_logprobs=[-0.1, -0.2]))
    assert chunk is not None and chunk.logprobs == (-0.1, -0.2)
    with raises(EngineError, expected=ANY, got="2 tokens and 0 log-probs"):
        Row(request_of(top_k=2), 0, STYLE, OLD).take(result([4, 5], 2, "length"))
    shifted = [[-0.5, 5, None], [-0.5, 4, None]]
    with raises(EngineError, expected=ANY, got="the log-prob of token 5 for token 4, which is number 0 of 2"):
        cut = result([4, 5], 2, "length", output_token_logprobs=shifted, output_token_sampling_logprobs=[-0.1, -0.2])
        Row(request_of(top_k=2), 0, STYLE, OLD).take(cut)


@pytest.mark.parametrize(
    ("sampling", "drafts", "asks", "mode"),
    [
        ({}, False, False, LogprobMode.SAMPLED),
        ({"top_p": 0.9}, False, False, LogprobMode.TEMPERATURE),
        ({"top_p": 0.9, "top_k": 50}, False, True, LogprobMode.SAMPLED),
        ({"min_p": 0.1}, False, False, LogprobMode.TEMPERATURE),
        ({"min_p": 0.1, "top_k": 50}, False, True, LogprobMode.SAMPLED),
        ({"logit_bias": {3: 1.0}, "presence_penalty": 0.5}, False, False, LogprobMode.SAMPLED),
        ({"top_k": 5000}, False, False, LogprobMode.TEMPERATURE),
        ({"top_k": 50}, True, False, LogprobMode.TEMPERATURE),
        ({"top_k": 50, "temperature": 0.0}, True, False, LogprobMode.SAMPLED),
    ],
)
def test_the_mode_says_which_distribution_the_log_probs_belong_to(sampling: dict[str, Any], drafts: bool, asks: bool, mode: LogprobMode):
    style = msgspec.structs.replace(STYLE, drafts=drafts)
    request = request_of(**sampling)
    assert body_of(request, "id", 0, style, limit=5, serving=NEW, stream=False).get("return_sampling_mask", False) is asks
    chunk = taken(result([4], 1, "length", output_token_sampling_logprobs=[-0.1] if asks else None), style, **sampling)
    assert chunk.logprob_mode is mode
    assert chunk.logprobs == ((-0.1,) if asks else (-0.5,)), "what truncated sampling drew from has log-probs of its own"
    if asks:
        with raises(EngineError, expected=ANY, got="1 tokens and 0 log-probs"):
            taken(result([4], 1, "length"), style, **sampling)


def test_a_stop_token_ends_a_completion_that_ignores_the_end_token():
    row = Row(request_of(ignore_eos=True, stop_token_ids=(9,)), 0, STYLE, OLD)
    assert row.take(result([4], 1)) is not None
    chunk = row.take(result([8, 9, 7], 4))
    assert chunk is not None and row.cut
    assert (chunk.token_ids, chunk.finish_reason, chunk.spans) == ((8, 9), "stop", (VersionSpan(2, OLD),))


def test_what_is_asked_for_goes_under_sglangs_names_but_for_stop_strings():
    asked = {"min_p": 0.1, "presence_penalty": 0.5, "repetition_penalty": 1.5, "logit_bias": {7: 1.0, 3: -2.0}, "json_schema": "{}"}
    params = body_of(request_of(stop=("x",), **asked), "id", 0, STYLE, limit=5, serving=NEW, stream=True)["sampling_params"]
    assert {name: params[name] for name in asked} == asked and "stop" not in params and "regex" not in params
    assert msgspec.json.decode(msgspec.json.encode(params))["logit_bias"] == {"3": -2.0, "7": 1.0}
    plain = body_of(request_of(), "id", 0, STYLE, limit=5, serving=NEW, stream=False)["sampling_params"]
    assert plain.keys() == {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos"}


def test_a_stop_string_ends_a_completion_that_the_server_goes_on_with():
    letters = {4: "x<", 5: "/", 6: "a>y", 7: "z"}
    row = Row(request_of(stop=("</a>",)), 0, STYLE, OLD, lambda ids: "".join(letters[token] for token in ids))
    assert row.take(result([4, 5], 2)) is not None and not row.cut
    chunk = row.take(result([6, 7], 4))
    assert chunk is not None and row.cut
    assert (chunk.token_ids, chunk.finish_reason, chunk.extras) == ((6,), "stop", {"matched": "</a>"})
    assert must_cut(Sampling(stop=("a",))) and not must_cut(Sampling(stop_token_ids=(3,)))


@pytest.mark.parametrize(
    ("sampling", "style", "name"),
    [
        ({"min_p": 0.1}, {"seeded": True}, "min_p"),
        ({"regex": "a"}, {}, "regex"),
        ({"json_schema": "{}"}, {}, "json_schema"),
        ({"logit_bias": {3: 1.0}}, {"drafts": True}, "logit_bias"),
        ({"regex": "a"}, {"drafts": True, "grammars": True}, "regex"),
    ],
)
def test_what_a_server_cannot_do_is_refused_by_name(sampling: dict[str, Any], style: dict[str, Any], name: str):
    with raises(EngineError, key=f"sampling.{name}"):
        check_sampling(request_of(**sampling), msgspec.structs.replace(STYLE, **style))
    fine = {"stop": ("a",), "min_p": 0.1, "logit_bias": {3: 1.0}, "regex": "a"}
    check_sampling(request_of(**fine), msgspec.structs.replace(STYLE, grammars=True))


@pytest.mark.parametrize(
    ("broken", "values"),
    [
        ({"streamrl_versions": [3]}, {"expected": "the version that sampled each token"}),
        ({"streamrl_versions": None}, {"expected": "the version that sampled each token"}),
        ({"streamrl_versions": [-1, -1]}, {"expected": "the version that sampled each token"}),
        ({"output_token_logprobs": [[-0.5, 5, None]]}, {"got": "2 tokens and 1 log-probs"}),
        ({"output_token_logprobs": [[None, 4, None], [-0.5, 5, None]]}, {"got": "None for the log-prob of token 4, which was drawn"}),
        ({"output_token_logprobs": [[-0.5, 4, None], [-1e30, 5, None]]}, {"got": "-1e+30 for the log-prob of token 5, which was drawn"}),
        ({"output_token_logprobs": [[0.7, 4, None], [-0.5, 5, None]]}, {"got": "0.7 for the log-prob of token 4, which was drawn"}),
        (
            {"output_token_logprobs": [[-0.5, 5, None], [-0.5, 6, None]]},
            {"got": "the log-prob of token 5 for token 4, which is number 0 of 2"},
        ),
        ({"finish_reason": {"type": "magic"}}, {"got": "{'type': 'magic'}"}),
        ({"finish_reason": {"type": "abort", "status_code": 503, "message": "queue is full"}}, {"gave_up": "queue is full"}),
    ],
)
def test_a_token_without_provenance_is_an_error(broken: dict[str, Any], values: dict[str, Any]):
    with raises(EngineError, **values) as caught:
        taken(result([4, 5], 2, "length", **broken))
    assert caught.value.hint


def test_versions_without_the_plugin_are_exact_or_marked():
    style = msgspec.structs.replace(STYLE, stamped=False)
    spans = [{"version": "0.3", "start": 0, "end": 1}, {"version": "1.3", "start": 1, "end": 2}]
    for meta, expected, extras in (
        ({"weight_version": "0.3"}, (VersionSpan(2, OLD),), {}),
        # Never younger than it may be.
        ({"weight_version": "1.3"}, (VersionSpan(2, OLD),), {"inexact_versions": True}),
        ({"weight_version": "0.3", "weight_versions": spans}, (VersionSpan(1, OLD), VersionSpan(1, NEW)), {"inexact_versions": True}),
    ):
        chunk = taken(result([4, 5], 2, "length", streamrl_versions=None, **meta), style)
        assert (chunk.spans, chunk.extras) == (expected, extras)


@pytest.mark.parametrize(("experts", "dtype"), [(8, "uint8"), (256, "uint8"), (257, "uint16")])
def test_routed_experts_become_compact(experts: int, dtype: str):
    ids = np.arange(3 * 2 * 2, dtype=np.int32).reshape(3, 2, 2) % experts
    ids[2, 1, 1] = experts - 1
    text = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    found = from_sglang(text, Routing(2, 2, experts), tokens=3)
    assert (found.dtype, found.shape) == (dtype, (3, 2, 2))
    np.testing.assert_array_equal(found.array(), ids)
    meta = MetaInfo(finish_reason={"type": "length"})
    write_extras({"routed_experts": found, "cached_tokens": 7}, meta)
    again = read_extras(msgspec.json.decode(msgspec.json.encode(meta), type=MetaInfo))
    assert again == {"routed_experts": found, "cached_tokens": 7}
    with raises(SchemaError, shape=(4, 2, 2), numbers=12):
        from_sglang(text, Routing(2, 2, experts), tokens=4)
    with raises(SchemaError, experts=experts - 1, highest=experts - 1):
        from_sglang(text, Routing(2, 2, experts - 1), tokens=3)
    with raises(SchemaError, shape=(4, 2, 2), size_bytes=ANY):
        from_text(dtype, (4, 2, 2), found.text())


def test_a_completion_brings_its_experts_and_counters():
    ids = np.zeros((4, 2, 2), "<i4")
    style = msgspec.structs.replace(STYLE, routing=Routing(2, 2, 8))
    meta = {"routed_experts": base64.b64encode(ids.tobytes()).decode(), "cached_tokens": 1, "spec_verify_ct": 2, "num_retractions": 0}
    chunk = taken(result([4, 5, 6], 3, "length", **meta), style)
    assert chunk.extras.pop("routed_experts").shape == (4, 2, 2), "two prompt tokens and two of three output tokens"
    assert chunk.extras == {"cached_tokens": 1, "spec_verify_ct": 2}


def test_the_routing_is_read_from_the_model(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4, "num_experts": 128, "num_experts_per_tok": 8}')
    assert read_routing(tmp_path) == Routing(4, 8, 128)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    assert read_routing(tmp_path) is None


RECORDS = msgspec.structs.replace(STYLE, recording=Recording(support=True), vocab_size=100)
LIKELY = msgspec.structs.replace(STYLE, recording=Recording(top=2), vocab_size=100)


def masked(ids: list[int], total: int, reason: str | None, mask: Any) -> Result:
    """As SGLang 0.5.23 answers `return_sampling_mask`: the likeliest first, the drawn one last where its count leaves it out."""
    meta = {"output_token_sampling_mask": mask, "output_token_sampling_mask_length": len(mask or ())}
    return result(ids, total, reason, output_token_sampling_logprobs=[-0.1] * len(ids), **meta)


def likely(ids: list[int], total: int, reason: str | None, tops: Any) -> Result:
    """As SGLang 0.5.23 answers `top_logprobs_num`."""
    return result(ids, total, reason, output_top_logprobs=tops)


def test_candidates_of_a_stream_are_put_together() -> None:
    row = Row(request_of(top_k=3), 0, RECORDS, OLD)
    assert row.take(masked([4], 1, None, [[4]])) is not None
    assert row.take(masked([], 1, None, [])) is None
    chunk = row.take(masked([7, 9], 3, "length", [[9, 2, 7], [8, 1, 5, 9]]))
    assert chunk is not None
    sets = chunk.extras["candidates"].sets()
    assert (sets.bounds.tolist(), sets.ids.tolist(), sets.logprobs) == ([0, 1, 4, 8], [4, 2, 7, 9, 1, 5, 8, 9], None)
    # They end with a completion that we cut.
    row = Row(request_of(top_k=3, ignore_eos=True, stop_token_ids=(9,)), 0, RECORDS, OLD)
    chunk = row.take(masked([8, 9, 7], 3, None, [[8, 3], [9], [7]]))
    assert chunk is not None and row.cut and chunk.token_ids == (8, 9)
    sets = chunk.extras["candidates"].sets()
    assert (sets.bounds.tolist(), sets.ids.tolist()) == ([0, 2, 3], [3, 8, 9])
    # The likeliest come with what was drawn.
    row = Row(request_of(), 0, LIKELY, OLD)
    assert row.take(likely([4], 1, None, [[[-0.4, 7, None], [-0.5, 4, None]]])) is not None
    chunk = row.take(likely([9, 8], 3, "length", [[[-0.7, 3, None], [-0.8, 2, None]], [[-0.01, 1, None], [None, 8, None]]]))
    assert chunk is not None
    sets = chunk.extras["candidates"].sets()
    assert (sets.bounds.tolist(), sets.ids.tolist()) == ([0, 2, 5, 7], [4, 7, 2, 3, 9, 1, 8])
    assert sets.logprobs == pytest.approx([-0.5, -0.4, -0.8, -0.7, -0.5, -0.01, -0.5])


def test_candidates_are_asked_for_and_read_for_who_wants_them() -> None:
    for sampling, style in (({"top_k": 3}, STYLE), ({}, RECORDS), ({"top_k": 3, "temperature": 0.0}, RECORDS)):
        assert "candidates" not in taken(masked([4], 1, "length", [["noise"]]), style, **sampling).extras

    def asked(style: Style, **sampling: Any) -> Any:
        return body_of(request_of(**sampling), "id", 0, style, limit=5, serving=NEW, stream=False).get("top_logprobs_num")

    assert (asked(LIKELY), asked(LIKELY, top_k=3), asked(LIKELY, top_p=0.9), asked(LIKELY, temperature=0.0)) == (2, None, None, None)
    assert asked(RECORDS) is None


MASKS: dict[str, Any] = {
    "none": None,
    "one too few": [[4]],
    "of nobody": [[4], None],
    "empty": [[4], []],
    "without its token": [[4], [3, 2]],
    "an id twice": [[4], [5, 5]],
    "beyond the vocabulary": [[4], [5, 100]],
    "negative": [[4], [5, -1]],
    "more than top-k and one": [[4], [5, 1, 2, 3, 6]],
    "no lists": [4, 5],
    "texts": [["4"], ["5"]],
    "no list": "mask",
}
TOPS: dict[str, Any] = {
    "none": None,
    "one too few": [[[-0.1, 4, None]]],
    "of nobody": [[[-0.1, 4, None]], None],
    "an id twice": [[[-0.1, 4, None]], [[-0.1, 5, None], [-0.2, 5, None]]],
    "beyond the vocabulary": [[[-0.1, 4, None]], [[-0.1, 100, None]]],
    "more than asked for": [[[-0.1, 4, None]], [[-3, 5, None], [-3, 6, None], [-3, 7, None]]],
    "likelier than sure": [[[-0.1, 4, None]], [[0.5, 5, None]]],
    "pairs": [[[-0.1, 4]], [[-0.1, 5]]],
}


@pytest.mark.parametrize("case", [*((masked, name) for name in MASKS), *((likely, name) for name in TOPS)], ids=lambda case: case[1])
def test_candidates_that_are_none_are_refused(case: tuple[Any, str]) -> None:
    answer, name = case
    with raises(EngineError, expected="what else each token could have been", got=ANY):
        if answer is masked:
            taken(masked([4, 5], 2, "length", MASKS[name]), RECORDS, top_k=3)
        else:
            taken(likely([4, 5], 2, "length", TOPS[name]), LIKELY)
