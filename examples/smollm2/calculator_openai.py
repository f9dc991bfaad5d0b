"""The agent of calculator.py on OpenAI's SDK, in a process of its own: it is given tasks by a run's gateway, and calls the policy.

python calculator_openai.py http://127.0.0.1:8322 runs/calculator-openai/credentials/gateway-key

It knows no label and sets no reward: the run scores what it did, as it scores the rollouts of calculator.py.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from uuid import uuid4

import openai
from calculator import TURNS, result_of


async def agent(client, model, messages):
    """Answer each call with its result, until a turn is no call."""
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model=model, messages=messages)
        said = completion.choices[0].message
        result = result_of(said.content or "")
        if result is None:
            break
        messages = [*messages, said, {"role": "tool", "content": result}]


async def session(gateway):
    """Make one rollout. The SDK repeats what was not answered; by its key a start that is repeated gives the same session again."""
    once = {"headers": {"Idempotency-Key": uuid4().hex}}
    told = await gateway.post("/rl/start_session", cast_to=object, body={}, options=once)
    mine = gateway.with_options(api_key=told["api_key"])
    await agent(mine.with_options(base_url=told["base_url"]), told["model"], told["messages"])
    await mine.post("/rl/end_session", cast_to=object, body={})


async def work(gateway):
    """Make one rollout after another until the run is over, and return how many were made."""
    done = 0
    while True:
        try:
            await session(gateway)
            done += 1
        except openai.RateLimitError:  # no task is free
            continue
        except openai.APIConnectionError:  # the gateway is gone: it was tried again for some seconds
            return done
        except openai.APIStatusError as error:
            if error.status_code != 410:  # the task has ended meanwhile
                raise


async def main(url, key, num_sessions):
    """Keep `num_sessions` sessions open at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=4) as gateway:
        done = await asyncio.gather(*[work(gateway) for _ in range(num_sessions)])
    print(f"{sum(done)} sessions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes rollouts of a streamrl run over its gateway.")
    parser.add_argument("url", help="of the gateway")
    parser.add_argument("key_file", help="credentials/gateway-key of the run")
    parser.add_argument("--sessions", type=int, default=256, help="that are open at once")
    given = parser.parse_args()
    asyncio.run(main(given.url, Path(given.key_file).read_text(encoding="ascii").strip(), given.sessions))
