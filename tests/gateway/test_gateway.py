"""A gateway on both buses: from a claimed task to samples on the stream."""

from __future__ import annotations

from streamrl.core.seeds import rollout_seed
from tests.support.gateways import PROMPT, gateway, shown, tool_policy
from tests.support.producing import Loop, samples_in


async def test_sessions_become_the_samples_of_their_task(on_both_buses: Loop) -> None:
    loop = on_both_buses
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=2)
        starts = [await gate.post("/rl/start_session", {}, gate.key, Idempotency_Key=name) for name in ("a", "a", "b")]
        assert starts[0] == starts[1], "a start that is repeated gives one session"
        told = [answer for _, answer in starts[1:]]
        assert [one["session_id"] for one in told] == ["0.0", "0.1"]
        assert told[0]["messages"] == PROMPT
        for number, one in enumerate(told):
            answer = await gate.chat(one["api_key"], one["messages"], return_token_ids=True, logprobs=True)
            assert answer["choices"][0]["message"]["content"] == "7"
            await gate.end(one["api_key"], reward=float(number))
        samples = samples_in(await loop.records(1))
        await loop.queue_is_empty()
    assert [(s.rollout, s.reward, s.seed, s.num_samples) for s in samples] == [(k, float(k), rollout_seed(0, k), 1) for k in range(2)]
    assert loop.tokenizer.decode(samples[0].tokens.tolist()) == "<|user|>3+4<|end|><|assistant|>7<|end|>"
    assert shown(loop, samples[0]) == "7<|end|>"
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] + choice["token_ids"] == samples[1].tokens.tolist()
    assert choice["prompt_token_ids"] == answer["prompt_token_ids"]
    assert samples[0].producer == "gateway-0" and samples[0].engine == "table-0"


async def test_forks_and_compactions_are_branches_and_a_retry_is_abandoned(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=1)
        told = await gate.start()
        key, prompt = told["api_key"], told["messages"]
        first = (await gate.chat(key, prompt))["choices"][0]["message"]
        kept = [*prompt, first]
        given_up = await gate.chat(key, [*kept, {"role": "user", "content": "1"}])
        second = (await gate.chat(key, [*kept, {"role": "user", "content": "2"}]))["choices"][0]["message"]
        await gate.chat(key, [*kept, {"role": "user", "content": "2"}, second, {"role": "user", "content": "3"}])
        compacted = [*prompt, {"role": "assistant", "content": "9"}, {"role": "user", "content": "4"}]
        last = await gate.chat(key, compacted, return_token_ids=True)
        await gate.end(key, reward=1.0)
        samples = samples_in(await loop.records(1))
    text = [loop.tokenizer.decode(sample.tokens.tolist()) for sample in samples]
    assert "<|user|>1" not in "".join(text) and given_up["id"].endswith(".1")
    assert text[0].startswith("<|user|>3+4<|end|><|assistant|>7<|end|><|user|>2<|end|><|assistant|>7<|end|>")
    assert text[1] == "<|user|>3+4<|end|><|assistant|>9<|end|><|user|>4<|end|><|assistant|>7<|end|>"
    assert last["prompt_token_ids"] + last["choices"][0]["token_ids"] == samples[1].tokens.tolist()
    assert [(s.sample, s.num_samples, s.reward) for s in samples] == [(0, 2, 1.0), (1, 2, 1.0)]
    assert samples[0].branch is None and samples[1].branch is not None and samples[1].branch.parent == 0
    assert samples[0].loss_mask.sum() == 4 and samples[1].loss_mask.sum() == 2
    shared = samples[1].branch.num_shared
    assert samples[1].tokens[:shared].tolist() == samples[0].tokens[:shared].tolist()


async def test_the_greedy_session_of_a_task_is_greedy_whatever_its_agent_asks(loop: Loop) -> None:
    """Its agent is told a temperature of 0, and may send that, or any other, as agents of the others do."""
    async with gateway(loop, logits=tool_policy(loop)) as gate:
        await loop.issue(1, num_rollouts=4, greedy=True)
        told = [await gate.start() for _ in range(4)]
        assert [one["sampling"]["temperature"] for one in told] == [1.0, 1.0, 1.0, 0.0]
        for one in told:
            key, messages = one["api_key"], one["messages"]
            answer = await gate.chat(key, messages, temperature=0.9, top_p=0.99)
            messages = [*messages, answer["choices"][0]["message"], {"role": "tool", "content": "7", "tool_call_id": "x"}]
            await gate.chat(key, messages, temperature=one["sampling"]["temperature"])
            await gate.end(key, reward=1.0)
        samples = samples_in(await loop.records(1))
    assert [bool(sample.loss_mask.any()) for sample in samples] == [True, True, True, False]
    greedy = samples[3]
    assert greedy.sampling.temperature == 0 and [turn.sampling for turn in greedy.turns] == [{"top_p": 0.99}, {}]
    assert [turn.sampling for turn in samples[0].turns] == [{"temperature": 0.9, "top_p": 0.99}, {}]
