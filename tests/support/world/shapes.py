"""The runs that are disturbed: what is trained, and how work is handed out while faults are struck."""

import json
from pathlib import Path

import msgspec

from tests.support.world.misdeeds import agent

NAME = "demo"
TOML = """
[run]
name = "demo"
numerics = "bitwise"
seed = 5
[data]
train = "train.jsonl"
chat_template = false
max_prompt_tokens = 16
[model]
max_len = 24
[producer]
concurrency = 6
[reward]
kind = "reward.py:gated"
[weights]
transport = "bus"
[engine]
host = "127.0.0.1"
advertise = "127.0.0.2"
[bus]
host = "127.0.0.1"
advertise = "127.0.0.2"
"""
LIMITS: dict[str, object] = {
    "bus.ack_wait_s": 1.0,
    "supervise.backoff_s": 0.1,
    "supervise.max_restarts": 100,
    "supervise.window_s": 2.0,
    "supervise.drain_s": 60.0,
    "tasks.max_deliveries": 1000,
    "reward.timeout_s": 600.0,
}
"""So that strikes may follow each other closely. A reward waits at the gate for as long as a strike lasts."""
REWARD = """
import asyncio
from pathlib import Path

GATE = Path(__file__).with_name("gate")


async def gated(task, episode):
    while task.index >= int(GATE.read_text()):
        await asyncio.sleep(0.02)
    {reward}
"""
# One task in nine fails in its reward and ends as a tombstone; few groups have all rewards equal.
LETTERS = """if task.index % 9 == 4:
        raise ValueError("no reward for this one")
    return float(sum(map(ord, episode.completion)) % 7)"""
EXACT = "return float(episode.completion.strip() == task.label)"


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    batch_tasks: int
    overrides: dict[str, object]
    """`--set` values."""
    reward: str = LETTERS
    deterministic: bool = False
    """Whether a disturbed run must give the digests of an undisturbed one."""
    losses: bool = False
    """Whether something may be lost, which is judged by what is left and by what the run says of it."""
    misdeed_every: int = 0
    """User code that misbehaves in one task of so many (`tests.support.world.misdeeds`); no gate holds its tasks. 0: none."""
    ranks: int = 1
    """Ranks of the trainer, into which its model is cut."""
    agents: bool = False
    """Whether agents make some of its samples over a gateway."""
    tasks_before: int = 0
    """Tasks of the warm-up, which no gate holds: what is handed out is counted from here."""

    def arguments(self, steps: int, port: int, engine_port: int, gateway_port: int) -> list[str]:
        ports = {"bus.port": port, "engine.port": engine_port} | ({"gateway.port": gateway_port} if self.agents else {})
        ranks = {"trainer.ranks": self.ranks, "trainer.shards": self.ranks} if self.ranks > 1 else {}
        values = {"run.steps": steps, **ports, "tasks.batch_tasks": self.batch_tasks, **ranks, **self.overrides}
        return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value).strip(chr(34))}")]


TABLE: dict[str, object] = {
    "engine.kind": "table",
    "engine.slots": 12,
    "engine.deterministic": True,
    "trainer.backend": "table",
    "trainer.checkpoint_every": 3,
    "sampling.max_new_tokens": 5,
    "tasks.num_rollouts": 3,
}
STREAM = Shape(name="stream", batch_tasks=3, overrides={**TABLE, **LIMITS, "tasks.max_staleness": 2})
LOCKSTEP = Shape(name="lockstep", batch_tasks=3, overrides={**TABLE, **LIMITS, "tasks.max_staleness": 0}, deterministic=True)
AGENTS = Shape(
    name="agents",
    batch_tasks=3,
    overrides={
        **STREAM.overrides,
        "model.max_len": 64,
        "gateway.workers": 1,
        "gateway.wait_s": 5.0,
        "gateway.idle_timeout_s": 4.0,
        "trainer.checkpoint_every": 1000,
        "producer.workers": 0,  # one would roll out itself what a gateway that died gives back
    },
    agents=True,
)
"""All tasks go to agents. Nothing is trimmed before it is looked at; a session whose agent was killed idles for seconds."""
DAMAGED = Shape(name="damaged", batch_tasks=3, overrides={**STREAM.overrides, "trainer.keep_checkpoints": 1000}, losses=True)
_PACED: dict[str, object] = {
    **TABLE,
    "producer.function": "agent.py:agent",
    "reward.kind": "agent.py:score",
    "tasks.max_staleness": 8,
    "tasks.drop_zero_variance": False,
    "debug.token_delay_s": 0.1,
    "debug.token_delay_sigma": 0.3,
}
MISDEEDS = Shape(
    name="misdeeds",
    batch_tasks=3,
    overrides={**_PACED, "producer.idle_timeout_s": 2.0, "reward.timeout_s": 2.0, "debug.token_delay_s": 0.03},
    misdeed_every=10,
)
DEFAULTS = Shape(name="defaults", batch_tasks=3, overrides=_PACED, misdeed_every=24)
"""Every limit is as it comes: of rollouts and rewards, of leases, restarts, silence, deliveries and drains."""
QUICKSTART = Shape(
    name="quickstart",
    batch_tasks=16,
    overrides={
        **LIMITS,
        "model.hidden": 128,
        "engine.slots": 64,
        "producer.concurrency": 32,
        "sampling.max_new_tokens": 5,
        "tasks.num_rollouts": 4,
        "tasks.max_staleness": 1,
        "tasks.drop_zero_variance": False,
        "trainer.checkpoint_every": 4,
        "warmup.max_steps": 20,
        "weights.transport": "shm",
    },
    reward=EXACT,
    tasks_before=22 * 16,
)
RANKS = msgspec.structs.replace(
    QUICKSTART, name="ranks", ranks=2, overrides={**QUICKSTART.overrides, "trainer.rank_timeout_s": 90.0, "weights.also_on_bus": True}
)
"""The quickstart with its model cut in two: a rank that misses the other waits longer than a strike lasts."""


def write_files(place: Path, shape: Shape) -> None:
    """What a run of this shape is started from. Nothing gets through the gate yet."""
    place.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "reward.py").write_text(REWARD.format(reward=shape.reward))
    if shape.misdeed_every:
        (place / "agent.py").write_text(agent(shape.misdeed_every))
    (place / f"{NAME}.toml").write_text(TOML)
    open_gate(place, 0)


def open_gate(place: Path, tasks: int) -> None:
    """Let the rewards of the first `tasks` tasks through."""
    draft = place / "gate.new"
    draft.write_text(str(tasks))
    draft.rename(place / "gate")
