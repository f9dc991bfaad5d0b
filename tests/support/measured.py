"""Print what tests on GPUs measure."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch


def say(text: str) -> None:
    print(f"\n[measured] {text}", flush=True)


class Measured:
    """Milliseconds that CUDA takes for what runs within, and GiB at most: of everything, and more than there were before."""

    ms = peak = more = 0.0

    def __enter__(self) -> Self:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.record()
        self._end.synchronize()
        self.ms, most = self._begin.elapsed_time(self._end), torch.cuda.max_memory_allocated()
        self.peak, self.more = most / (1 << 30), (most - self._before) / (1 << 30)


DIGEST = """
import sys
from pathlib import Path
import numpy as np
from streamrl.core.batches import TrainBatch
from tests.support.trainers import DIRECT, make

settings = {"numerics": "bitwise", "rate": 1e-4, "dtype": "bfloat16", "device": "cuda", "micro_tokens": 512}
made = make(Path(sys.argv[1]), DIRECT, compile=sys.argv[2], **settings)
rng = np.random.default_rng(0)
for step in range(3):
    answers = [rng.integers(2, 1000, int(n)).tolist() for n in rng.integers(20, 200, 16)]
    batch = TrainBatch.from_lists(
        [[5, 6, 7, 8]] * 16, answers, rewards=[float(i % 4 == 0) for i in range(16)], tasks=[i // 4 for i in range(16)],
        sampler_logprobs=[[-7.0] * len(a) for a in answers], stage_step=step,
    )
    result = made.step(batch)
assert (result.choices is not None and result.choices.compiled) == (sys.argv[2] == "on"), result.notices
print("digest", result.digest)
"""


def fresh_digests(model: Path, compile_: str, caches: Sequence[str], folder: Path) -> list[str]:
    """Digests after three steps of a model of 1000 tokens, each in a process of its own with a compiler's cache of that name."""
    found = []
    for cache in caches:
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder / cache), "TRITON_CACHE_DIR": str(folder / cache / "triton")}
        command = [sys.executable, "-c", DIGEST, str(model), compile_]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(done.stdout.split()[-1])
    say(f"digests of {len(caches)} processes, trainer.compile = {compile_}: {found}")
    return found
