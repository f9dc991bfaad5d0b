"""An agent on OpenAI's SDK, in a process of its own: it is given tasks, talks to the policy, and says what came of it.

python agent.py http://127.0.0.1:8321 runs/openai-agent/credentials/gateway-key
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from uuid import uuid4

import openai


async def work(gateway):
    """One session after the other, until the run is over; returns how many."""
    done = 0
    while True:
        try:
            # The SDK repeats what was not answered; by its key a start that is repeated gives the session that it gave before.
            once = {"headers": {"Idempotency-Key": uuid4().hex}}
            told = await gateway.post("/rl/start_session", cast_to=object, body={}, options=once)
        except openai.RateLimitError:  # no task is free
            continue
        except openai.APIConnectionError:  # nobody is there any more, after some retries
            return done
        try:
            await session(gateway.with_options(api_key=told["api_key"]), told)
            done += 1
        except openai.APIStatusError as error:
            if error.status_code != 410:  # the task has ended meanwhile
                raise
        except openai.APIConnectionError:
            return done


async def session(mine, told):
    """A rollout: the policy is called as any model is, and the two verbs at the end are all that is new."""
    client = mine.with_options(base_url=told["base_url"])
    reward = await agent(client, told["model"], told["messages"], told["metadata"]["answer"])
    await mine.post("/rl/set_reward", cast_to=object, body={"reward": reward})
    await mine.post("/rl/end_session", cast_to=object, body={})


async def agent(client, model, messages, answer):
    said = await say(client, model, messages)
    asked = said.content == "?"
    if asked:
        left, right = messages[-1]["content"].partition("=")[0].split("+")
        messages = [*messages, said, {"role": "user", "content": str(int(left) + int(right))}]
        said = await say(client, model, messages)
    return 0.3 * asked + 0.7 * (said.content == answer)


async def say(client, model, messages):
    completion = await client.chat.completions.create(model=model, messages=messages)
    return completion.choices[0].message


async def main(url, key, num_sessions):
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=4) as gateway:
        done = await asyncio.gather(*[work(gateway) for _ in range(num_sessions)])
    print(f"{sum(done)} sessions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes rollouts of a streamrl run over its gateway.")
    parser.add_argument("url", help="of the gateway")
    parser.add_argument("key_file", help="credentials/gateway-key of the run")
    parser.add_argument("--sessions", type=int, default=32, help="that are open at once")
    given = parser.parse_args()
    asyncio.run(main(given.url, Path(given.key_file).read_text(encoding="ascii").strip(), given.sessions))
