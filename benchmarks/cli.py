"""`streamrl bench WHAT ...`: flags and what they start. A flag's `dest` is a field of what the benchmark is asked."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.bus.plan import BusOptions, Transport
from benchmarks.engine.spec import Spec
from benchmarks.evaluation.spec import EvaluationSpec
from benchmarks.gateway.spec import GatewaySpec
from benchmarks.hung.spec import HungSpec
from benchmarks.loop.ways import LoopSpec, Way
from benchmarks.names import names, numbers
from benchmarks.report import Report, render, write_between
from benchmarks.rollouts.flags import LONE_SETS
from benchmarks.rollouts.spec import RolloutsSpec
from benchmarks.trainer.spec import Contender, TrainerSpec, named_shape
from benchmarks.weights.options import Options
from streamrl.config.engines import SglangConfig
from streamrl.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code; raises StreamRLError."""
    given = parser().parse_args(arguments)
    given.command = shlex.join(["streamrl", "bench", *arguments])
    code: int = given.run_bench(given)
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command line after `streamrl bench`."""
    bench = argparse.ArgumentParser(prog="streamrl bench", description="Measure the product on this machine.")
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    _add_weights(kinds)
    _add_bus(kinds)
    _add_engine(kinds)
    _add_evaluation(kinds)
    _add_loop(kinds)
    _add_hung(kinds)
    _add_rewards(kinds)
    _add_gateway(kinds)
    _add_trainer(kinds)
    _add_rollouts(kinds)
    return bench


def _add_bus(kinds: Any) -> None:
    bus = kinds.add_parser("bus", help="samples/s and tokens/s of the sample stream beside Redis streams, ZMQ and Ray's object store")
    flag = bus.add_argument
    flag("--samples", type=partial(numbers, "--samples"), default="1,8,64", help="samples of a message (default 1,8,64)")
    flag("--tokens", type=partial(numbers, "--tokens"), default="256,2k,16k", help="tokens of a sample (default 256,2k,16k)")
    transports = partial(names, "--transports", kind=Transport)
    flag("--transports", type=transports, default="", help=f"{', '.join(Transport)} (default: all that are there)")
    flag("--round-tokens", type=int, default=16 << 20, help="tokens of each shape in a round (default 16777216)")
    _add_common(bus, rounds=5, out="bench-bus", run=_bus)


def _bus(given: argparse.Namespace) -> int:
    from benchmarks.bus.measure import measure
    from benchmarks.bus.report import report_of

    return _run(given, "bus", BusOptions, measure, report_of)


def _add_engine(kinds: Any) -> None:
    engine = kinds.add_parser("engine", help="tokens/s of the local engine beside transformers' generate and continuous batching")
    flag = engine.add_argument
    flag("--models", type=lambda text: tuple(text.split(",")), default="quickstart,30M", help="quickstart, 30M or both (default)")
    flag("--batches", type=partial(numbers, "--batches"), default="1,8,32,64", help="requests at once (default 1,8,32,64)")
    flag("--prompt", dest="prompt_tokens", type=int, default=12, metavar="TOKENS", help="tokens of a prompt (default 12)")
    flag("--tokens", dest="new_tokens", type=int, default=48, metavar="TOKENS", help="new tokens of each request (default 48)")
    least = "least seconds of transformers' generate in a round (default 0.5)"
    flag("--round-s", dest="min_round_s", type=float, default=0.5, metavar="SECONDS", help=least)
    flag("--threads", type=int, default=1, help="CPU threads of a forward pass (default 1)")
    _add_common(engine, rounds=7, out="bench-engine", run=_engine)


def _engine(given: argparse.Namespace) -> int:
    from benchmarks.engine.measure import measure
    from benchmarks.engine.report import report_of

    return _run(given, "engine", Spec, measure, report_of)


def _add_evaluation(kinds: Any) -> None:
    evaluation = kinds.add_parser("eval", help="tokens/s of an evaluation beside the engine alone with the same requests")
    flag = evaluation.add_argument
    flag("--engine", default="table", help="table, with an artificial time of a token, local or sglang (default table)")
    flag("--model", default="", help="Hugging Face directory that SGLang serves")
    flag("--set", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")
    flag("--problems", type=int, default=10_000, help="problems of the set (default 10000)")
    flag("--n", type=int, default=16, help="samples of each (default 16)")
    flag("--tokens", type=int, default=4, help="tokens of each sample (default 4)")
    flag("--slots", type=int, default=256, help="of the engine (default 256)")
    flag("--token-ms", type=float, default=20.0, help="time of a token on the table engine (default 20)")
    _add_common(evaluation, rounds=3, out="bench-eval", run=_evaluation)


def _evaluation(given: argparse.Namespace) -> int:
    from benchmarks.evaluation.measure import measure
    from benchmarks.evaluation.report import report_of

    return _run(given, "eval", EvaluationSpec, measure, report_of)


def _add_loop(kinds: Any) -> None:
    loop = kinds.add_parser("loop", help="the quickstart's loop with and without the bus; asynchronous against lockstep with a heavy tail")
    flag = loop.add_argument
    ways = partial(names, "--ways", kind=Way)
    flag("--ways", type=ways, default="stream,queues,pipes,memory", help="stream, queues, pipes, memory (default: all)")
    flag("--batches", type=int, default=120, help="trained in each run (default 120)")
    flag("--skip", type=int, default=30, help="the first of them, which are not measured (default 30)")
    flag("--tail-rounds", type=int, default=3, help="rounds of asynchronous and lockstep; 0: none (default 3)")
    flag("--tail-batches", type=int, default=30, help="trained in each of their runs (default 30)")
    flag("--tail-token-ms", type=float, default=20.0, help="mean time of a token there (default 20)")
    flag("--backend", default="torch", choices=("torch", "table"), help="table: without torch, to try it out")
    screens = "instead: what looking at the stream's run costs; file, page, page-top, or a sink's name (alone: all that are there)"
    flag("--screens", nargs="?", const="", metavar="NAMES", help=screens)
    flag("--slices", type=int, help="of each run with --screens, for spreads within runs (default 4)")
    _add_common(loop, rounds=5, out="bench-loop", run=_loop)


def _loop(given: argparse.Namespace) -> int:
    if given.screens is not None:
        return _screens(given)
    if given.slices is not None:
        raise ConfigError(
            "--slices: expected --screens with it, got none", hint="slices are of its runs", option="--slices", got=given.slices
        )
    from benchmarks.loop.report import report_of
    from benchmarks.loop.run import measure

    given.tail_delay_s = given.tail_token_ms / 1e3
    return _run(given, "loop", LoopSpec, measure, report_of)


def _screens(given: argparse.Namespace) -> int:
    from benchmarks.loop.screens import SCREENS, SLICES, ScreensSpec, asked, measure
    from benchmarks.loop.screens_report import report_of

    given.screens = asked(given.screens)
    if given.slices is None:
        given.slices = SLICES
    return _run(given, SCREENS, ScreensSpec, measure, report_of)


def _add_hung(kinds: Any) -> None:
    hung = kinds.add_parser("hung", help="the speed of a run in which some rollouts hang until their limit, beside the same run without")
    flag = hung.add_argument
    flag("--batches", type=int, default=40, help="trained in each run (default 40)")
    flag("--skip", type=int, default=10, help="the first of them, which are not measured (default 10)")
    flag("--share", dest="hung", type=float, default=0.05, help="of rollouts that hang (default 0.05)")
    least = "tasks.max_staleness (default: the least at which credits suffice and groups with a hung rollout are not too old)"
    flag("--staleness", type=int, default=0, metavar="S", help=least)
    flag("--rollout-s", type=float, default=2.0, metavar="SECONDS", help="of a rollout (default 2)")
    flag("--limit-s", type=float, default=6.0, metavar="SECONDS", help="producer.idle_timeout_s (default 6)")
    _add_common(hung, rounds=3, out="bench-hung", run=_hung)


def _hung(given: argparse.Namespace) -> int:
    from benchmarks.hung.measure import measure
    from benchmarks.hung.report import report_of

    return _run(given, "hung", HungSpec, measure, report_of)


def _add_rewards(kinds: Any) -> None:
    rewards = kinds.add_parser("rewards", help="many graders that block; and the quickstart's speed while some graders hang")
    flag = rewards.add_argument
    flag("--graders", type=int, default=512, help="calls of the first part (default 512)")
    flag("--children", type=int, default=8, help="grader processes there (default 8)")
    flag("--batches", type=int, default=120, help="trained in each run of the second part (default 120)")
    flag("--skip", type=int, default=30, help="the first of them, which are not measured (default 30)")
    flag("--share", dest="hung", type=float, default=0.01, help="of graders that hang there (default 0.01)")
    flag("--backend", default="torch", choices=("torch", "table"), help="table: without torch, to try it out")
    _add_common(rewards, rounds=3, out="bench-rewards", run=_rewards)


def _rewards(given: argparse.Namespace) -> int:
    from benchmarks.rewards.measure import measure
    from benchmarks.rewards.report import report_of
    from benchmarks.rewards.spec import RewardsSpec

    return _run(given, "rewards", RewardsSpec, measure, report_of)


def _add_gateway(kinds: Any) -> None:
    gateway = kinds.add_parser("gateway", help="milliseconds that a gateway adds to an engine's call, with many sessions open")
    flag = gateway.add_argument
    flag("--sessions", type=int, default=1000, help="open meanwhile (default 1000)")
    flag("--rate", type=float, default=100.0, metavar="CALLS", help="a second, whether those before are answered or not (default 100)")
    flag("--seconds", type=float, default=10.0, help="of each half of a round (default 10)")
    flag("--tokens", type=int, default=8, help="of an answer (default 8)")
    _add_common(gateway, rounds=5, out="bench-gateway", run=_gateway)


def _gateway(given: argparse.Namespace) -> int:
    from benchmarks.gateway.measure import measure
    from benchmarks.gateway.report import report_of

    return _run(given, "gateway", GatewaySpec, measure, report_of)


def _add_trainer(kinds: Any) -> None:
    trainer = kinds.add_parser("trainer", help="training steps of the torch trainer beside a plain compiled loop and TRL's loss")
    flag = trainer.add_argument
    shapes = "model: tiny, tiny-moe (CPU), 0.6b, 4b, 8b, 30b-a3b-6; random weights (default tiny)"
    flag("--shape", type=named_shape, default="tiny", help=shapes)
    means = "mean tokens of an answer, a batch for each (default 1500,8000; tiny: 48,160)"
    flag("--answers", type=partial(numbers, "--answers"), default="", help=means)
    flag("--ranks", type=int, default=1, help="of the product's trainer (default 1)")
    contenders = partial(names, "--contenders", kind=Contender)
    flag("--contenders", type=contenders, default="", help=f"{', '.join(Contender)} (default: all that are there)")
    flag("--prompt", dest="prompt_tokens", type=int, default=0, metavar="TOKENS", help="tokens of a prompt (default 300; tiny: 32)")
    flag("--rollouts", type=int, default=8, help="samples that share a prompt (default 8)")
    size = "tokens of a batch, about (default 131072; tiny: 2048)"
    flag("--batch-tokens", type=int, default=0, metavar="TOKENS", help=size)
    flag("--steps", type=int, default=2, help="measured steps of a contender in a round (default 2)")
    flag("--device", default="auto", choices=("auto", "cpu", "cuda"), help="default: a GPU if there is one")
    flag("--threads", type=int, default=1, help="CPU threads of a rank (default 1)")
    settings = "configuration of the product's trainer"
    flag("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help=settings)
    compiled = "whether the plain loop is compiled (default: on a GPU)"
    flag("--compile", dest="compiled", default="auto", choices=("auto", "on", "off"), help=compiled)
    kept = "layers of the plain loop that keep their activations (default: as many as memory should hold)"
    flag("--kept-layers", type=int, default=-1, help=kept)
    flag("--model", dest="model_dir", default="", metavar="DIR", help="keep the model there, or take the one that an earlier run kept")
    _add_common(trainer, rounds=2, out="bench-trainer", run=_trainer)


def _trainer(given: argparse.Namespace) -> int:
    from benchmarks.trainer.measure import measure
    from benchmarks.trainer.report import report_of

    given.settings = tuple(given.settings)
    return _run(given, "trainer", TrainerSpec, measure, report_of)


def _add_rollouts(kinds: Any) -> None:
    rollouts = kinds.add_parser("rollouts", help="rollouts/s of the whole stack, trainer apart, beside a plain client of its servers")
    flag = rollouts.add_argument
    flag("config", nargs="?", default="", metavar="TOML", help="file of a run; its engine, rows, prompts and numbers are taken")
    flag("--set", dest="changes", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated")
    flag("--tokens", type=partial(numbers, "--tokens"), default="10,300", help="tokens of an answer, none shorter (default 10,300)")
    count = "rollouts of a round, one number for all lengths or one for each (default 2048)"
    flag("--rollouts", type=_counts, default="2048", metavar="N[,N]", help=count)
    flag("--plain", action="store_true", help="ask the same servers for the same by a plain HTTP client, too")
    flag("--sweep", action="store_true", help="compare sets of SGLang's flags first, one server each, and give the stack the best")
    flag("--sets", type=_flag_sets, default=",".join(LONE_SETS), help=f"of the sweep, at most 7 (default {','.join(LONE_SETS)})")
    flag("--sweep-s", type=float, default=360.0, metavar="SECONDS", help="no set is begun later (default 360)")
    flag("--start-s", type=float, default=150.0, metavar="SECONDS", help="a server that starts more slowly is left out (default 150)")
    _add_common(rollouts, rounds=1, out="bench-rollouts", run=_rollouts)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(number for part in text.split(",") for number in numbers("--rollouts", part))


def _flag_sets(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))


def _rollouts(given: argparse.Namespace) -> int:
    from benchmarks.rollouts.report import report_of

    def measure(spec: RolloutsSpec, out: Path, command: str) -> None:
        from benchmarks.rollouts.measure import measure  # not for --report: it loads the stack

        measure(spec, out, command)

    given.changes = tuple(given.changes)
    return _run(given, "rollouts", RolloutsSpec, measure, report_of)


def _add_weights(kinds: Any) -> None:
    weights = kinds.add_parser("weights", help="new weights for a decoding SGLang: ours and SGLang's own ways, beside steady decoding")
    flag = weights.add_argument
    flag("--shape", default="tiny", help="model: tiny or tiny-moe (CPU), 0.6B, 4B, 8B or 30B-A3B; random weights (default tiny)")
    flag("--plan", default="", help="full, short, smoke, or windows like steady:5,paced:10/1,steady:5")
    flag("--streams", type=int, default=0, help="requests decoding at once (default 128; on a CPU 8)")
    flag("--probes", type=int, default=0, help="how many of them stream, for the gaps a client sees (default 4)")
    tokens = "tokens a request makes on average (default 1500; on a CPU 64)"
    flag("--tokens", dest="mean_tokens", type=int, default=0, metavar="TOKENS", help=tokens)
    flag("--tp", dest="tensor_parallel", type=int, default=0, metavar="GPUS", help="GPUs of the engine (default: as the shape needs)")
    devices = "where the trainer's weights are (default: a GPU that the engine leaves free); several, with commas, have a part each"
    flag("--trainer-device", default="", help=devices)
    gap_ms = SglangConfig().max_gap_ms
    bound = f"bound of the paced windows on copying beside a pass (default {gap_ms:g}, a run's; 0: none)"
    flag("--max-gap-ms", type=float, default=gap_ms, help=bound)
    flag("--warm-s", type=float, default=0.0, help="seconds of load before the first window (default 15; on a CPU 1)")
    flag("--default-graphs", action="store_true", help="capture graphs at SGLang's default sizes (slow start)")
    flag("--python", default="", help="interpreter of SGLang's environment (default: this one)")
    named = "any flag of SGLang; JSON or text"
    flag("--flag", dest="flags", type=_flag, action="append", default=[], metavar="NAME=VALUE", help=named)
    _add_common(weights, rounds=0, out="", run=_weights)


def _weights(given: argparse.Namespace) -> int:
    from benchmarks.weights.report import render_several, report_of

    def measure(options: Options, out: Path, command: str) -> None:
        from benchmarks.weights.run import measure  # not for --report: it loads torch

        measure(options, out, command)

    given.flags = dict(given.flags)
    given.out = given.out or f"bench-{given.shape}"
    return _run(given, "weights", Options, measure, report_of, render_several)


def _add_common(kind: argparse.ArgumentParser, *, rounds: int, out: str, run: Callable[[argparse.Namespace], int]) -> None:
    """What all of them understand; `rounds` 0: it has none."""
    if rounds:
        kind.add_argument("--rounds", type=int, default=rounds, help=f"rounds over all contenders (default {rounds})")
    kind.add_argument("--out", metavar="DIR", default=out, help=f"new directory for the files (default {out or 'bench-SHAPE'})")
    kind.add_argument("--report", metavar="DIR", nargs="+", default=[], help="measure nothing: make report, table and picture again")
    kind.add_argument("--docs", metavar="FILE", help="put the tables between the marks in a document")
    kind.add_argument("--json", action="store_true", help="print the report as JSON")
    kind.set_defaults(run_bench=run)


def _together(reports: Sequence[Report]) -> str:
    return "\n".join(map(render, reports))


def _run(
    given: argparse.Namespace,
    benchmark: str,
    asked: type[S],
    measure: Callable[[S, Path, str], None],
    report_of: Callable[[Path], Report],
    for_documents: Callable[[Sequence[Report]], str] = _together,
) -> int:
    """Measure (or read raw files), write and print the report.

    Returns 1 if a check of correctness did not hold. A target that was missed is a measurement, not a failure.
    """
    if not given.report:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        fields = {name: getattr(given, name) for name in asked.__struct_fields__ if hasattr(given, name)}
        measure(asked(**fields), Path(given.out), given.command)
    reports = [report_of(Path(directory)) for directory in given.report or [given.out]]
    for report in reports:
        print(msgspec.json.encode(report).decode() if given.json else render(report))
    if given.docs:
        write_between(Path(given.docs), benchmark, for_documents(reports))
    return 0 if all(check.held for report in reports for check in report.checks) else 1


def _flag(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--flag: expected NAME=VALUE, got {text!r}", hint="for example --flag mem_fraction_static=0.5")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
