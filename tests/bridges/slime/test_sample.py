"""`Sample` over our episodes, both ways: nothing is lost, and a hook cannot make tokens of the model up."""

import copy
from typing import Any

import pytest

from streamrl.bridges.slime.args import Args
from streamrl.bridges.slime.sample import Sample, blank, episode_of, sample_of
from streamrl.bridges.slime.session import Request
from streamrl.errors import SchemaError
from streamrl.producers.completions import Completion
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.schemas.samples import LogprobMode, Status, VersionSpan
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version

TASK = RolloutTask(run="r", index=3, source="main", prompt_ids=(1, 2), prompt="a", label="7", metadata={"level": 1}, num_rollouts=4)


def request(prompt: tuple[int, ...], ids: tuple[int, ...], *spans: tuple[int, int], ends: str = "stop") -> Request:
    versions = tuple(VersionSpan(length, Version(0, number)) for length, number in spans)
    segment = Segment(ids, tuple(-0.1 * (place + 1) for place in range(len(ids))), versions)
    return Request(prompt, Completion(segment, ends, LogprobMode.SAMPLED, "engine-0"))


ASKED = [request((1, 2), (5, 6, 7), (2, 8), (1, 9)), request((1, 2, 5, 6, 7, 40, 41), (8, 9), (2, 9), ends="length")]


def made(**fields: object) -> Sample:
    """Two turns of the model around two tokens of a tool."""
    sample = blank(TASK, 2, "a")
    sample.tokens = [1, 2, 5, 6, 7, 40, 41, 8, 9]
    sample.response, sample.response_length = "answer", 7
    sample.loss_mask = [1, 1, 1, 0, 0, 1, 1]
    sample.status = Sample.Status.TRUNCATED
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


def test_a_sample_becomes_what_engines_gave_and_what_a_tool_said() -> None:
    episode = episode_of(made(), TASK, 2, ASKED, seed=11)
    assert [tuple(segment.token_ids) for segment in episode.segments] == [(1, 2), (5, 6, 7), (40, 41), (8, 9)]
    assert [segment.is_model for segment in episode.segments] == [False, True, False, True]
    [row] = samples_of(TASK, [episode], producer="p")
    assert row.loss_mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert row.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, 0, 0, -0.1, -0.2])
    assert [(span.length, span.version and span.version.number) for span in row.spans] == [(2, None), (2, 8), (1, 9), (2, None), (2, 9)]
    assert (episode.status, episode.finish_reason, episode.rollout, episode.completion) == (Status.TRUNCATED, "length", 2, "answer")


def test_and_back_again() -> None:
    sample = sample_of(TASK, episode_of(made(metadata={"level": 1, "tries": 2}), TASK, 2, ASKED, seed=11), "a")
    want = made(metadata={"level": 1, "tries": 2}, weight_versions=["8", "9"])
    assert sample.rollout_log_probs == pytest.approx([-0.1, -0.2, -0.3, 0, 0, -0.1, -0.2])
    want.rollout_log_probs = sample.rollout_log_probs
    assert sample == want
    assert (sample.group_index, sample.index, sample.effective_response_length) == (3, 14, 5)


def test_the_rows_own_tables_cannot_be_changed_through_a_sample() -> None:
    before = copy.deepcopy(TASK)
    sample = blank(TASK, 0, "a")
    sample.metadata["level"] = 9
    assert before == TASK


def test_what_a_hook_hangs_on_a_sample_is_there_when_it_is_scored() -> None:
    episode = episode_of(made(tool_call_count=2, payload={"a": [1]}, sandbox=None), TASK, 2, ASKED, seed=11)
    sample: Any = sample_of(TASK, episode, "a")
    assert (sample.tool_call_count, sample.payload, sample.metadata) == (2, {"a": [1]}, {"level": 1})
    assert not hasattr(sample, "sandbox")


def test_tokens_that_a_hook_masks_or_cuts_off_are_not_trained() -> None:
    masked = episode_of(made(loss_mask=[0, 1, 1, 0, 0, 0, 0]), TASK, 2, ASKED, seed=11)
    assert [(tuple(s.token_ids), s.is_model) for s in masked.segments] == [
        ((1, 2), False), ((5,), False), ((6, 7), True), ((40, 41, 8, 9), False)
    ]  # fmt: skip
    assert [(span.length, span.version and span.version.number) for span in masked.segments[2].spans] == [(1, 8), (1, 9)]
    cut = episode_of(made(tokens=[1, 2, 5, 6], response_length=2, loss_mask=None), TASK, 2, ASKED, seed=11)
    assert [tuple(segment.token_ids) for segment in cut.segments] == [(1, 2), (5, 6)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": [1, 2, 5, 6, 3, 40, 41, 8, 9]}, "token 2 of the response has loss mask 1"),
        ({"tokens": [1, 9, 5, 6, 7, 40, 41, 8, 9]}, "token 0 of the response"),
        ({"loss_mask": [1] * 7}, "token 3 of the response"),
        ({"loss_mask": [1] * 6}, "expected a loss_mask of 7 zeros and ones"),
        ({"loss_mask": [2] * 7}, "zeros and ones"),
        ({"loss_mask": [0] * 7}, "0 everywhere"),
        ({"response_length": 9}, "9 tokens and response_length = 9"),
        ({"response_length": 0}, "response_length = 0"),
        ({"reward": "1.0"}, "the text '1.0'"),
        ({"teacher_log_probs": [-0.1] * 7}, "came back with teacher_log_probs, which nothing here reads"),
        ({"sandbox": object()}, "sample.sandbox cannot be kept for its reward"),
        ({"status": Sample.Status.ABORTED}, "ABORTED"),
        ({"status": "done"}, "expected a Sample.Status"),
        ({"reward": {"score": 1.0}}, "a table as its reward"),
        ({"reward": float("nan")}, "reward must be finite"),
    ],
)
def test_what_is_no_sample_is_said(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        episode_of(made(**fields), TASK, 2, ASKED, seed=11)


def test_a_turn_of_any_producer_is_a_sample() -> None:
    answer = Segment(token_ids=(5,), logprobs=(-0.7,), spans=(VersionSpan(1, Version(0, 3)),))
    parts = {"score": 1.0}
    episode = Episode(segments=(Segment((1, 2)), answer), finish_reason="stop", turns=("5",), reward=1.0, reward_parts=parts)
    assert sample_of(TASK, episode, "a").reward == 1.0
    sample = sample_of(TASK, episode, "a", parts=True)
    assert (sample.tokens, sample.response, sample.reward, sample.status) == ([1, 2, 5], "5", {"score": 1.0}, Sample.Status.COMPLETED)
    assert sample.get_reward_value(Args({"reward_key": "score"})) == 1.0


def test_args_are_read_and_not_written() -> None:
    args = Args({"rollout_batch_size": 64})
    assert getattr(args, "own", 3) == 3 and vars(args.but(own=4)) == {"rollout_batch_size": 64, "own": 4}
    with pytest.raises(AttributeError, match="did you mean rollout_batch_size"):
        _ = args.rollout_batchsize
    with pytest.raises(AttributeError, match="cannot be set"):
        args.rollout_batch_size = 3


def test_append_keeps_masks_and_log_probs_beside_tokens() -> None:
    sample = blank(TASK, 0, "a")
    sample.tokens = [1, 2]
    meta = {"weight_version": "8", "finish_reason": {"type": "stop"}}
    sample.append_response_tokens(Args({}), tokens=[5, 6], log_probs=[-0.1, -0.2], meta_info=meta, text="x")
    sample.append_response_tokens(Args({}), tokens=[40], trainable=False, text="y")
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 5, 6, 40], [1, 1, 0], [-0.1, -0.2, 0.0])
    assert (sample.response, sample.response_length, sample.weight_versions, sample.status) == ("xy", 3, ["8"], Sample.Status.COMPLETED)
    with pytest.raises(ValueError, match="each of 2 tokens, got 1"):
        sample.append_response_tokens(Args({}), tokens=[5, 6], log_probs=[-0.1])


def test_the_lists_grow_in_place_as_hooks_that_keep_hold_of_them_expect() -> None:
    sample = blank(TASK, 0, "a")
    sample.tokens = prompt = [1, 2]
    sample.loss_mask = mask = []
    sample.append_response_tokens(Args({}), tokens=[5, 6], log_probs=[-0.1, -0.2])
    sample.append_response_tokens(tokens=[40], trainable=False)
    assert (prompt, mask) == ([1, 2, 5, 6, 40], [1, 1, 0])
    sample.append_response_tokens(meta_info={"finish_reason": {"type": "length"}}, update_terminal_info=False)
    assert (sample.response_length, sample.status) == (3, Sample.Status.PENDING)


def test_of_many_answers_the_one_that_was_chosen_counts() -> None:
    # The second answer begins as the first does, at another version, and was cut off.
    asked = [request((1, 2), (5, 6, 7), (3, 8)), request((1, 2), (5, 9), (2, 9), ends="length")]
    sample = made(tokens=[1, 2, 5, 6, 7], response_length=3, loss_mask=None, status=Sample.Status.PENDING)
    episode = episode_of(sample, TASK, 2, asked, seed=11)
    assert [(tuple(one.token_ids), [span.version and span.version.number for span in one.spans]) for one in episode.segments] == [
        ((1, 2), []), ((5, 6, 7), [8])
    ]  # fmt: skip
    assert (episode.finish_reason, episode.status) == ("stop", Status.COMPLETED)
