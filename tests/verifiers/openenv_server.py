"""An OpenEnv server: `python openenv_server.py PORT`, in the environment with OpenEnv. What it does is chosen by the row's `reset`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    message: str


class Seen(Observation):
    text: str = ""


class Sums(Environment[Say, Seen, State]):
    """Shows a sum and wants its result; each wrong answer gets a hint."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)
        self._mode = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, mode: str = "", **given: Any) -> Seen:
        self._state = State(episode_id=episode_id or "", step_count=0)
        self._mode = mode
        return Seen(text="3+4", done=False, reward=None)

    def step(self, action: Say, timeout_s: float | None = None, **given: Any) -> Seen:
        self._state.step_count += 1
        last = self._state.step_count == 2
        match self._mode:
            case "crashes":
                raise RuntimeError("the environment is broken")
            case "dies":
                os._exit(3)
            case "hangs":
                time.sleep(3600)
            case "silent":
                return Seen(text="", done=True, reward=None)
            case "nan":
                return Seen(text="", done=True, reward=float("nan"))
            case _:
                return Seen(text=f"not {action.message}", done=last, reward=1.0 if last else 0.25)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    uvicorn.run(
        create_app(Sums, Say, Seen, env_name="sums", max_concurrent_envs=int(sys.argv[2])), port=int(sys.argv[1]), log_level="warning"
    )
