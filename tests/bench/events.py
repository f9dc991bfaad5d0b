"""Raw files of a run that never was, with known numbers in them."""

import msgspec
import numpy as np

from benchmarks.machine import Machine
from benchmarks.raw import Header
from benchmarks.report import Check
from benchmarks.weights.options import Options, parse_plan
from benchmarks.weights.records import Forwards, Raw, RequestRecord, RunRecord, Tokens, UpdateRecord, WindowRecord

PLAN = "steady:5,paced:10/1,steady:5,flip:3/1,steady:5,tensor:10/0.5,steady:5"
STEP_MS = 10.0
PAUSE_MS = 40.0
ROWS = 16


def windows():
    start = 100.0
    for window in parse_plan(PLAN):
        yield WindowRecord(mode=window.mode, title=window.title, every_s=window.every_s, start_s=start, end_s=start + window.seconds)
        start += window.seconds


def updates():
    number = 0
    for index, window in enumerate(windows()):
        if window.mode == "steady":
            continue
        for i in range(int((window.end_s - window.start_s) / window.every_s)):
            number += 1
            at_s = window.start_s + i * window.every_s + 0.2
            ours = window.mode != "tensor"
            yield UpdateRecord(
                window=index,
                mode=window.mode,
                version=f"0.{number}",
                publish_s=at_s,
                released_s=at_s + 0.002,
                announced_s=at_s + 0.003,
                staged_s=at_s + 0.033,
                commit_s=at_s + (0.035 if ours else PAUSE_MS / 1e3),
                done_s=at_s + 0.05,
                stage_ms=[30.0, 25.0] if ours else [],
                commit_ms=[0.1, 0.2] if ours else [],
                nbytes=[3_000_000_000, 3_000_000_000] if ours else [],
                forwards=[number * 100, number * 100] if ours else [],
                manifest_digest="ab" if ours else "",
                served_digest=["ab", "ab"] if ours else [],
            )


def forwards(seed: int) -> Forwards:
    """Passes every 10 ms with 1 % noise, and a pause in every stock update."""
    random = np.random.default_rng(seed)
    pauses = [update.publish_s for update in updates() if update.mode == "tensor"]
    host, gpu, now = [], [], 99.0
    while now < 144.0:
        step = STEP_MS * (1 + 0.01 * random.standard_normal())
        if pauses and now <= pauses[0] < now + step / 1e3:
            step += PAUSE_MS
            pauses.pop(0)
        now += step / 1e3
        host.append(now - 0.004)
        gpu.append((now - 99.0) * 1e3)
    n = len(host)
    extend = np.zeros(n, np.bool_)
    extend[::200] = True
    rows = np.where(extend, 1, ROWS)
    return Forwards(host_s=np.array(host), gpu_ms=np.array(gpu), rows=rows, extend=extend, version=np.zeros(n, np.int64))


def header(options: Options) -> Header:
    machine = Machine(processor="a processor", cores=2, python="3.11", packages={"torch": "2"}, date="2026-11-21", load=0.5)
    return Header(benchmark="weights", command="streamrl bench weights", machine=machine, spec=msgspec.to_builtins(options))


def raw() -> Raw:
    ranks = [forwards(0), forwards(1)]
    at_s = ranks[0].host_s
    options = Options(shape="8B", plan=PLAN, streams=ROWS, probes=1, mean_tokens=1000, tensor_parallel=2, trainer_device="cuda:1")
    run = RunRecord(
        nbytes=6_000_000_000,
        num_tensors=10,
        device="test",
        num_devices=2,
        transport="ipc",
        sglang="0",
        start_server_s=1.0,
        hello=[
            {"graphs_s": 1.5, "graphs_nbytes": 2e8, "buffer_nbytes": 3e9},
            {"graphs_s": 1.0, "graphs_nbytes": 1e8, "buffer_nbytes": 3e9},
        ],
        windows=list(windows()),
        checks=[Check("pushing the same bytes changes no token", True, "64 tokens")],
    )
    requests = [
        RequestRecord(lane=i, start_s=99.0 + i, end_s=110.0 + i, asked=900, made=900, finish="length", retractions=0, versions=runs)
        for i, runs in enumerate([[(1, 400), (2, 500)], *[[(3, 900)]] * 79])
    ]
    n = len(at_s)
    tokens = Tokens(lane=np.zeros(n, np.int64), request=np.zeros(n, np.int64), at_s=at_s, count=np.ones(n, np.int64))
    return Raw(header=header(options), run=run, updates=list(updates()), requests=requests, forwards=ranks, tokens=tokens)
