"""GPUs, engines and the trainer's mesh; sampling, rewards, hooks and evaluations."""

from __future__ import annotations

import re
from typing import Any

from streamrl.bridges.slime.script.draft import Draft
from streamrl.bridges.slime.script.hooks import GROUP_RM, NAMED, NONZERO_STD, SAMPLE_HOOKS, key_of
from streamrl.bridges.slime.script.toml import Entry
from streamrl.bridges.slime.script.work import is_sft
from streamrl.config.recording import MOST_MASKED
from streamrl.config.reward_kinds import BOXED

_REWARDS = {
    "math": "math",
    "dapo": "dapo",
    "deepscaler": "deepscaler",
    "f1": "f1",
    "gpqa": "gpqa",
    "random": "random",
    "ifbench": "ifbench",
    "remote_rm": "remote",
}
_DIFFERENT = {
    "math": "equal values are right by math-verify: 2/4 is 1/2, also without a box",
    "dapo": "labels need not be whole numbers",
    "deepscaler": "equal values are right by math-verify",
    "gpqa": "the letter behind `the answer is` is read",
    "ifbench": "instructions that are not known, and kwargs that are missing, fail the rollout; it needs pip install 'streamrl[ifbench]'",
    "remote": "the server is sent the row's metadata, too",
}
_BY_ROW = "put it into a field of its own and name that in data.reward_key"
_SHARED = 0.35
"""An engine's part of a GPU that the trainer has, too (docs/gpu.md)."""
_FRACTION = "engine.sglang.flags.mem_fraction_static"


def write_mesh(draft: Draft) -> None:
    """The trainer's ranks and how they share the model."""
    args = draft.arguments
    nodes, each = args.whole("--actor-num-nodes", least=1), args.whole("--actor-num-gpus-per-node", least=1)
    if nodes is None or each is None:
        return
    draft.put("trainer.ranks", nodes * each, "--actor-num-gpus-per-node", "--actor-num-nodes", note=f"{nodes} x {each} GPUs")
    cuts = {name: args.whole(f"--{name}-model-parallel-size", least=1) or 1 for name in ("tensor", "pipeline", "expert")}
    context, experts = args.whole("--context-parallel-size", least=1) or 1, cuts["expert"]
    backend, fsdp = args.text("--train-backend"), args.text("--train-backend") == "fsdp"
    if backend not in ("megatron", "fsdp"):
        draft.refuse("--train-backend", f"{backend} is none here", "megatron or fsdp")
    if (args.whole("--expert-tensor-parallel-size", least=1) or 1) > 1:
        draft.refuse("--expert-tensor-parallel-size", "an expert stays whole", "1, and --expert-model-parallel-size")
    draft.spoken |= {"--expert-tensor-parallel-size", "--num-gpus-per-node"}
    megatron = max(cuts.values()) > 1 and not fsdp
    draft.put(
        "trainer.backend",
        "megatron" if megatron else "torch",
        "--train-backend",
        note="" if megatron else "no part of it is Megatron's own",
    )
    if experts > 1:
        for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"):
            if (args.whole(flag) or 1) > 1:
                draft.say(
                    flag, "experts are divided, all else of a layer is whole on each rank: the numbers are the same, the memory is not"
                )
        draft.put("trainer.experts", experts, "--expert-model-parallel-size")
    else:
        draft.put("trainer.tensor", cuts["tensor"] if cuts["tensor"] > 1 else None, "--tensor-model-parallel-size")
        draft.put("trainer.pipeline", cuts["pipeline"] if cuts["pipeline"] > 1 else None, "--pipeline-model-parallel-size")
        draft.put("trainer.context", context if context > 1 else None, "--context-parallel-size")
    if not megatron and nodes * each > 1:
        draft.put(
            "trainer.shards", nodes * each, "--actor-num-gpus-per-node", note="parameters and the optimizer's state are cut over all ranks"
        )
    _write_memory(draft)


def _write_memory(draft: Draft) -> None:
    args = draft.arguments
    tokens = args.whole("--max-tokens-per-gpu", least=1) if args.on("--use-dynamic-batch-size") or args.on("--max-tokens-per-gpu") else None
    if tokens is not None:
        shared = draft.get("trainer.context", 1)
        draft.put("trainer.micro_tokens", tokens * shared, "--max-tokens-per-gpu", note=f"x {shared} ranks a row" if shared > 1 else "")
    if args.text("--recompute-granularity") == "full" or args.on("--gradient-checkpointing"):
        draft.put("trainer.activations", 0, "--recompute-granularity", "--gradient-checkpointing")
    minutes = args.whole("--distributed-timeout-minutes", least=1)
    draft.put("trainer.rank_timeout_s", 60.0 * minutes if minutes else None, "--distributed-timeout-minutes")
    if args.on("--use-rollout-routing-replay") or args.on("--use-routing-replay") or args.on("--sglang-enable-return-routed-experts"):
        draft.put(
            "trainer.routing_replay", True, "--use-rollout-routing-replay", "--use-routing-replay", "--sglang-enable-return-routed-experts"
        )


def write_micro_batches(draft: Draft) -> None:
    """Micro-batches by their number of samples: room for as many of the greatest length."""
    count, longest = draft.arguments.whole("--micro-batch-size", least=1), draft.get("model.max_len")
    if "trainer.micro_tokens" not in draft.entries and count and longest:
        draft.put("trainer.micro_tokens", count * longest, "--micro-batch-size", note=f"{count} x {longest} tokens")


def write_model(draft: Draft) -> None:
    """The model's directory and type."""
    draft.put("model.path", draft.path("--hf-checkpoint"), "--hf-checkpoint")
    draft.put("model.dtype", "bfloat16", "--bf16")
    if not draft.arguments.on("--hf-checkpoint"):
        draft.refuse("--hf-checkpoint", "is not given: there is no model", "name its directory")


def write_engines(draft: Draft) -> None:
    """Engines, and which GPUs they have; none for fine-tuning."""
    args = draft.arguments
    if is_sft(draft):
        return
    draft.put("engine.kind", "sglang", note="slime's engine")
    width, ranks, colocate = args.whole("--rollout-num-gpus-per-engine", least=1), draft.get("trainer.ranks"), args.on("--colocate")
    wanted = args.whole("--rollout-num-gpus", least=1)
    if wanted is None and not args.on("--rollout-num-gpus"):
        wanted = ranks if colocate else None
        if not colocate:
            draft.refuse("--rollout-num-gpus", "is not given, nor --colocate: engines have no GPUs", "slime needs one of them, too")
    if width is None or wanted is None or ranks is None:
        return
    if wanted % width:
        return draft.refuse(
            "--rollout-num-gpus-per-engine", f"{wanted} GPUs are {wanted // width} engines of {width} and {wanted % width} more"
        )
    draft.put(
        "engine.workers",
        wanted // width,
        "--rollout-num-gpus" if args.on("--rollout-num-gpus") else "--colocate",
        note=f"{wanted} / {width} GPUs",
    )
    draft.put("engine.sglang.tensor_parallel", width, "--rollout-num-gpus-per-engine")
    _place_engines(draft, width, wanted, ranks, colocate=colocate)
    _write_flags(draft, colocate=colocate)


def _place_engines(draft: Draft, width: int, wanted: int, ranks: int, *, colocate: bool) -> None:
    args = draft.arguments
    node = args.whole("--num-gpus-per-node", least=1) or 8
    if width > node:
        return draft.refuse("--rollout-num-gpus-per-engine", f"an engine lives on one host, of {node} GPUs, got {width}", f"at most {node}")
    on_bus = args.text("--update-weight-transport") == "disk"
    if args.text("--update-weight-transport") == "nccl":
        draft.spoken.add("--update-weight-transport")
    used = max(ranks, wanted) if colocate else ranks + wanted
    flag = "--colocate" if colocate else "--rollout-num-gpus"
    if args.whole("--actor-num-nodes") == 1 and used <= max(node, ranks):
        first = 0 if colocate else ranks
        draft.put(
            "engine.sglang.gpus", list(range(first, first + wanted)), flag, note="the trainer's" if colocate else "behind the trainer's"
        )
        draft.put("weights.transport", "bus" if on_bus else "ipc", "--update-weight-transport" if on_bus else flag)
        return
    draft.put("ray.address", "auto", "--actor-num-nodes", note=f"{used} GPUs on several hosts")
    draft.put("bus.host", "0.0.0.0", note="other hosts reach the bus")
    draft.put("engine.host", "0.0.0.0", note="other hosts reach the engines")
    if on_bus:
        draft.put("weights.transport", "bus", "--update-weight-transport")
    if colocate and width > 1:
        says = f"under Ray an engine of {width} GPUs has them for itself, and ranks and engines share single GPUs only"
        draft.refuse("--colocate", says, "--rollout-num-gpus-per-engine 1, or GPUs of their own by --rollout-num-gpus")
    elif colocate:
        draft.put("ray.trainer.gpus", 0.6, "--colocate")
        draft.put("ray.engine.gpus", 0.4, "--colocate")


def _write_flags(draft: Draft, *, colocate: bool) -> None:
    """`--sglang-...`."""
    args = draft.arguments
    draft.put("engine.slots", args.whole("--sglang-server-concurrency", least=1), "--sglang-server-concurrency")
    for name, given in list(args.given.items()):
        if not name.startswith("--sglang-") or not given.flag.keys:
            continue
        key = given.flag.keys[0]
        values = [_typed(text) for text in args.texts(name)]
        if len(values) != len(given.values):
            continue
        value: Any = True if not values else values[0] if len(values) == 1 else values
        if key.startswith("engine."):
            draft.put(key, True if key == "engine.deterministic" else value, name)
    fraction = draft.get(_FRACTION)
    if colocate and (not isinstance(fraction, float) or fraction > _SHARED):
        draft.put(
            _FRACTION, _SHARED, "--sglang-mem-fraction-static", "--colocate", note="beside the trainer; streamrl doctor says what fits"
        )
        if fraction is not None:
            says = f"{fraction} is of a GPU that the trainer has left; here it stays: {_SHARED}, and `streamrl doctor` says what fits"
            draft.say("--sglang-mem-fraction-static", says)


def _typed(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,15}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d{1,2})?", text) else text


def write_sampling(draft: Draft) -> None:
    """How tokens are drawn."""
    args = draft.arguments
    if is_sft(draft):
        return
    draft.put("sampling.temperature", args.number("--rollout-temperature"), "--rollout-temperature")
    draft.put("sampling.top_p", args.number("--rollout-top-p"), "--rollout-top-p")
    draft.put("sampling.top_k", args.whole("--rollout-top-k"), "--rollout-top-k")
    if args.number("--rollout-top-p") not in (None, 1.0):
        _write_replay(draft)
    if stop := args.texts("--rollout-stop"):
        draft.put("sampling.stop", stop, "--rollout-stop")
    if ids := args.wholes("--rollout-stop-token-ids"):
        draft.put("sampling.stop_token_ids", ids, "--rollout-stop-token-ids")


def _write_replay(draft: Draft) -> None:
    """Slime trains on what was kept by top-p when the tokens were drawn."""
    top_p = "--rollout-top-p"
    if draft.arguments.on("--sglang-speculative-algorithm"):
        draft.say(top_p, "SGLang does not say what it drew drafted tokens from: log-probs are compared from before the cut")
        return
    draft.put("trainer.support_replay", True, top_p)
    if not 0 < draft.get("sampling.top_k", -1) <= MOST_MASKED:
        draft.put("sampling.top_k", MOST_MASKED, top_p, note="SGLang says what it drew from only with a top_k of at most this")
        draft.say(top_p, f"draws from at most {MOST_MASKED} tokens: SGLang does not say otherwise what it drew from")


def write_hooks(draft: Draft) -> None:
    """Code, in the table `[slime]`."""
    args = draft.arguments
    if not is_sft(draft):
        draft.put("tasks.drop_zero_variance", False, note="slime trains such groups")
    for flag in NAMED:
        if not args.on(flag):
            continue
        path = args.texts(flag) if flag == SAMPLE_HOOKS else args.text(flag)
        own = (path.rpartition(":")[2] if isinstance(path, str) else "").rpartition(".")[2]
        if own in (NONZERO_STD, f"{NONZERO_STD}_with_fallback"):
            draft.put("tasks.drop_zero_variance", True, flag)
            draft.spoken.add(flag)
            if own != NONZERO_STD:
                draft.say(flag, "batches are always filled with groups that are kept: there is no fallback")
        else:
            draft.put(key_of(flag), path, flag)
    if args.on(GROUP_RM):
        draft.put(key_of(GROUP_RM), True, GROUP_RM)


def write_reward(draft: Draft) -> None:
    """How answers are scored."""
    args = draft.arguments
    kind, custom = args.text("--rm-type"), args.on("--custom-rm-path")
    if is_sft(draft):
        return
    if kind is not None and not custom:
        boxed, bare = (BOXED, kind.removeprefix(BOXED)) if kind.startswith(BOXED) else ("", kind)
        ours = _REWARDS.get(bare)
        if ours is None:
            draft.refuse("--rm-type", f"{kind} is none here", "a function in reward.kind; docs/rewards.md has the kinds")
        else:
            draft.put("reward.kind", boxed + ours, "--rm-type")
            if ours in _DIFFERENT:
                draft.say("--rm-type", f"{_DIFFERENT[ours]} (docs/rewards.md)")
            draft.assume("--rm-type", f"no row has metadata.rm_type, which slime looks at first; if some do, {_BY_ROW}")
        if ours == "remote":
            draft.put("reward.options.url", args.text("--rm-url"), "--rm-url")
    elif kind is None and not custom and not args.on("--custom-generate-function-path"):
        draft.refuse(
            "--rm-type", "is not given, nor --custom-rm-path: nothing scores", f"one of the two; if rows have metadata.rm_type, {_BY_ROW}"
        )
    elif kind is None and not custom and "reward.kind" not in draft.entries:
        says = "no flag says what scores; in slime the function may, here it is reward.kind, exact_match until you set it"
        draft.assume("--custom-generate-function-path", says)
    if args.on("--rm-url") and "reward.options.url" not in draft.entries:
        draft.refuse("--rm-url", "is for --rm-type remote_rm", "reward.options")
    draft.put("reward.key", args.text("--reward-key"), "--reward-key")


def write_evaluation(draft: Draft) -> None:
    """Sets of problems, each `--eval-interval` versions."""
    args = draft.arguments
    every, names = args.whole("--eval-interval", least=1), args.texts("--eval-prompt-data")
    if not args.on("--eval-interval"):
        if args.on("--eval-prompt-data"):
            draft.say("--eval-prompt-data", "without --eval-interval slime evaluates nothing: it is left out")
        return
    if args.on("--eval-prompt-data") and names and len(names) % 2 and len(names) != 1:
        return draft.refuse("--eval-prompt-data", f"takes pairs of name and path, got {len(names)} words")
    if not names:
        if not args.on("--eval-prompt-data") and not args.on("--eval-config"):
            draft.refuse("--eval-interval", "there are no rows: --eval-prompt-data is not given", "name a file of rows")
        return
    draft.put("evaluation.every", every, "--eval-interval")
    for name, read, key in (
        ("temperature", args.number, "temperature"),
        ("top-p", args.number, "top_p"),
        ("top-k", args.whole, "top_k"),
        ("max-response-len", args.whole, "max_new_tokens"),
    ):
        flag = f"--eval-{name}" if args.on(f"--eval-{name}") else f"--rollout-{name}"
        draft.put(f"evaluation.sampling.{key}", read(flag), flag)
    pairs = [("aime", names[0])] if len(names) == 1 else list(zip(names[::2], names[1::2], strict=True))
    draft.flags["evaluation.sets"] = ("--eval-prompt-data",)
    draft.sets = [_set(draft, name, path) for name, path in pairs]


def _set(draft: Draft, name: str, path: str) -> dict[str, Entry]:
    args, flag = draft.arguments, "--eval-prompt-data"
    table = {"name": draft.entry(re.sub(r"[^A-Za-z0-9_-]+", "-", name), flag)}
    table["path"] = draft.entry(draft.absolute(flag, path) or path, flag)
    table["n"] = draft.entry(args.whole("--n-samples-per-eval-prompt", least=1) or 1, "--n-samples-per-eval-prompt")
    for other, key in (("--eval-input-key", "prompt_key"), ("--eval-label-key", "label_key"), ("--eval-tool-key", "tools_key")):
        if (value := args.text(other)) is not None:
            table[key] = draft.entry(value, other)
    if (tokens := args.whole("--eval-max-prompt-len", least=1)) is not None:
        table["max_prompt_tokens"] = draft.entry(tokens, "--eval-max-prompt-len")
    if args.on("--eval-reward-key"):
        table["reward.key"] = draft.entry(args.text("--eval-reward-key") or "", "--eval-reward-key")
    return table
