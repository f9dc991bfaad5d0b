"""A gateway on both buses: from a claimed task to samples on the stream."""

from __future__ import annotations

from streamrl.core.seeds import rollout_seed
from tests.gateway.conftest import PROMPT, gateway, shown
from tests.producers.conftest import Loop, samples_in


async def test_sessions_become_the_samples_of_their_task(loop: Loop) -> None:
    async with gateway(loop) as gate:
        await loop.issue(1, num_rollouts=2)
        told = [await gate.start() for _ in range(2)]
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
