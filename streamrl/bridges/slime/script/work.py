"""Batches, staleness, lengths and data of a run."""

from __future__ import annotations

import json

from streamrl.bridges.slime.known import HOOKS
from streamrl.bridges.slime.script.draft import Draft

_PROMPT = 2048
"""Tokens of a prompt, where slime sets no bound."""
_FULLY_ASYNC = 2
"""Versions, where slime sets no bound."""


def write_batches(draft: Draft) -> None:
    """Tasks, rollouts, optimizer steps and the length of the run.

    A rollout of slime has R = --rollout-batch-size prompts with N = --n-samples-per-prompt answers each, trained in steps of
    G = --global-batch-size samples: R N / G steps. Here a batch has R tasks with N rollouts each, trained in as many minibatches.
    """
    args = draft.arguments
    prompts, samples = args.whole("--rollout-batch-size", least=1), args.whole("--n-samples-per-prompt", least=1)
    if not args.on("--num-rollout") and not args.on("--num-epoch"):
        draft.refuse("--num-rollout", "is not given, nor --num-epoch", "slime needs one of them, too")
    if prompts is None or samples is None:
        if not args.on("--rollout-batch-size"):
            draft.refuse("--rollout-batch-size", "is not given", "slime needs it, too")
        return
    draft.put("tasks.batch_tasks", prompts, "--rollout-batch-size")
    if is_sft(draft):  # a conversation is trained once, whatever tasks.num_rollouts is
        if samples != 1:
            draft.refuse("--n-samples-per-prompt", f"a conversation is trained once, got {samples} samples of it", "1")
    else:
        draft.put("tasks.num_rollouts", samples, "--n-samples-per-prompt")
    steps = _steps(draft, prompts * samples)
    by = "--num-steps-per-rollout" if args.on("--num-steps-per-rollout") else "--global-batch-size"
    if steps is not None and steps > prompts:
        draft.refuse(by, f"{prompts * samples} samples in {steps} steps, but groups stay whole, and there are {prompts}", "fewer steps")
    elif steps is not None:
        draft.put(
            "trainer.minibatches",
            steps,
            by,
            note=f"{prompts} x {samples} = {prompts * samples} samples, {prompts * samples // steps} a step",
        )
        if steps > 1:
            draft.say(by, f"the answers to a prompt are in one of the {steps} steps together; slime may spread them over several")
    _write_length(draft, prompts)
    wanted = args.whole("--over-sampling-batch-size", least=1) or prompts
    draft.put("producer.concurrency", max(wanted, prompts), "--over-sampling-batch-size", "--rollout-batch-size")


def _steps(draft: Draft, total: int) -> int | None:
    """Optimizer steps of a rollout of `total` samples; None where the numbers do not fit, which is refused."""
    args = draft.arguments
    size, steps = args.whole("--global-batch-size", least=1), args.whole("--num-steps-per-rollout", least=1)
    if steps is not None:
        if total % steps:
            draft.refuse(
                "--num-steps-per-rollout", f"{total} samples are {total // steps} x {steps} + {total % steps}", "a divisor of them"
            )
            return None
        if size is not None and size != total // steps:
            says = f"{size} is not {total} samples / {steps} steps = {total // steps}"
            draft.refuse("--global-batch-size", says, "leave one of the two out")
            return None
        return steps
    if size is None:
        if args.on("--global-batch-size") or args.on("--num-steps-per-rollout"):
            return None
        says = "neither it nor --num-steps-per-rollout is given; Megatron would take a micro-batch a replica, here it is one step a rollout"
        draft.assume("--global-batch-size", says)
        return 1
    if total % size:
        draft.refuse(
            "--global-batch-size", f"{total} samples of a rollout are {total // size} x {size} + {total % size}", f"a divisor of {total}"
        )
        return None
    return total // size


def _write_length(draft: Draft, prompts: int) -> None:
    args = draft.arguments
    rollouts, epochs = args.whole("--num-rollout", least=1), args.whole("--num-epoch", least=1)
    if rollouts is not None:
        draft.put("run.steps", rollouts, "--num-rollout")
    elif epochs is not None and draft.options.num_rows:
        rows = draft.options.num_rows
        note = f"{epochs} x {rows} rows // {prompts}"
        if not (steps := epochs * rows // prompts):
            draft.refuse("--num-epoch", f"{note} is no batch at all", "fewer prompts in a batch")
        draft.put("run.steps", steps or None, "--num-epoch", note=note)
    elif epochs is not None:
        draft.refuse(
            "--num-epoch", "the number of rollouts follows from that of rows, which the script does not say", "give it with --rows N"
        )


def write_staleness(draft: Draft) -> None:
    """How old a token may be: as the loop of slime has it."""
    args, entry = draft.arguments, draft.training.entry
    function = (args.text("--rollout-function-path") or "").rpartition(".")[2]
    interval = args.whole("--update-weights-interval", least=1) or 1
    if "fully_async" in function:
        draft.put("tasks.max_staleness", max(interval, _FULLY_ASYNC), "--rollout-function-path")
        draft.say(
            "--rollout-function-path", f"slime bounds no staleness; here tokens are at most {max(interval, _FULLY_ASYNC)} versions old"
        )
    elif "async" in entry:
        draft.put("tasks.max_staleness", interval, note=f"{entry} samples one rollout ahead")
    elif args.on("--partial-rollout"):
        draft.put("tasks.max_staleness", 1, "--partial-rollout")
    else:
        draft.put("tasks.max_staleness", 0, note=f"{entry} samples and trains in turn")
    if interval == 1:
        draft.spoken.add("--update-weights-interval")
    elif "async" not in entry + function:
        draft.say("--update-weights-interval", f"{entry} takes new weights after every rollout, and so does streamrl")
    known = ("generate_rollout", "generate_rollout_fully_async", "generate_rollout_streaming")
    path = args.text("--rollout-function-path") or ""
    if "sleep" in path:
        draft.refuse("--rollout-function-path", "engines are not kept idle", "`streamrl bench` measures them")
    elif args.on("--rollout-function-path") and path and function not in known and "sft_rollout" not in path:
        draft.put("slime.rollout_function_path", path, "--rollout-function-path")
        draft.say("--rollout-function-path", HOOKS["rollout_function_path"].differs)
    if is_sft(draft):
        draft.put("run.kind", "sft", "--loss-type")
    if args.on("--debug-train-only"):
        draft.spoken.add("--debug-train-only")
        if not is_sft(draft):
            draft.refuse(
                "--debug-train-only", "a run of reinforcement learning has engines", "`streamrl replay RUN` trains on recorded samples"
            )


def is_sft(draft: Draft) -> bool:
    """Whether it is supervised fine-tuning."""
    return draft.arguments.text("--loss-type") == "sft_loss"


def write_data(draft: Draft) -> None:
    """Rows and their fields."""
    args = draft.arguments
    rows = draft.path("--prompt-data")
    draft.put("data.train", rows, "--prompt-data")
    if not args.on("--prompt-data"):
        draft.refuse("--prompt-data", "is not given: there are no rows", "name a JSONL or Parquet file")
    template = args.on("--apply-chat-template")
    if is_sft(draft):
        draft.put("data.messages_key", args.text("--input-key"), "--input-key")
        draft.put("data.label_key", "", note="conversations have none")
    else:
        draft.put("data.prompt_key", args.text("--input-key"), "--input-key")
        draft.put("data.label_key", args.text("--label-key") or "", "--label-key")
        draft.put("data.chat_template", template, "--apply-chat-template")
    draft.put("data.metadata_key", args.text("--metadata-key"), "--metadata-key")
    if template or is_sft(draft):
        draft.put("data.tools_key", args.text("--tool-key"), "--tool-key")
    draft.put("data.shuffle", args.on("--rollout-shuffle"), "--rollout-shuffle")
    draft.put("run.seed", args.whole("--rollout-seed", least=0), "--rollout-seed")
    if text := args.text("--apply-chat-template-kwargs"):
        try:
            variables = json.loads(text)
        except (ValueError, RecursionError):
            variables = None
        if not isinstance(variables, dict):
            draft.refuse("--apply-chat-template-kwargs", f"takes a JSON object, got {text[:60]!r}")
        elif variables:
            draft.put("data.chat_template_kwargs", variables, "--apply-chat-template-kwargs")


def write_lengths(draft: Draft) -> None:
    """Tokens of prompts, answers and both together."""
    args = draft.arguments
    context, prompt = args.whole("--rollout-max-context-len", least=2), args.whole("--rollout-max-prompt-len", least=1)
    answer = args.whole("--rollout-max-response-len", least=1)
    if is_sft(draft):
        longest = context or draft.get("trainer.micro_tokens", 0) or _PROMPT * 2
        draft.put("model.max_len", longest, "--rollout-max-context-len", "--max-tokens-per-gpu")
        draft.put("data.max_prompt_tokens", prompt or longest - 1, "--rollout-max-prompt-len")
        if context is None:
            draft.assume(
                "--rollout-max-context-len",
                f"slime bounds no conversation; one of more than {longest} tokens ends as failed (model.max_len)",
            )
        return
    if answer is None:
        if not args.on("--rollout-max-response-len"):
            draft.refuse("--rollout-max-response-len", "is not given: answers have no bound", "give the greatest number of tokens")
        return
    draft.put("sampling.max_new_tokens", answer, "--rollout-max-response-len")
    if prompt is not None:
        draft.put("data.max_prompt_tokens", prompt, "--rollout-max-prompt-len")
        draft.put("data.reading", "whole", "--rollout-max-prompt-len", note="longer rows are left out at the start, as slime does")
    elif context is not None and context > answer:
        prompt = context - answer
        draft.put("data.max_prompt_tokens", prompt, "--rollout-max-context-len", "--rollout-max-response-len")
        draft.say(
            "--rollout-max-context-len",
            f"a prompt of more than {prompt} tokens ends its task: a whole answer has no room; slime leaves out those of {context} or more",
        )
    elif context is not None:
        draft.refuse(
            "--rollout-max-context-len",
            f"{context} tokens have no room for an answer of {answer} and a prompt",
            "a lower --rollout-max-response-len",
        )
        return
    else:
        prompt = _PROMPT
        draft.put("data.max_prompt_tokens", prompt, note="slime has no bound")
        draft.assume(
            "--rollout-max-prompt-len",
            f"slime bounds no prompt; the task of one with more than {prompt} tokens ends (data.max_prompt_tokens)",
        )
    asked = args.whole("--eval-max-response-len", least=1) or answer
    asked += args.whole("--eval-max-prompt-len", least=1) or prompt
    evaluated = args.whole("--eval-max-context-len", least=2) or 0
    sources = ("--rollout-max-context-len", "--rollout-max-response-len", "--eval-max-response-len", "--eval-max-context-len")
    longest = max(context or 0, prompt + answer, *((min(asked, evaluated or asked), evaluated) if args.on("--eval-interval") else (0,)))
    if context is not None and context < longest and not (args.on("--eval-interval") and evaluated >= longest):
        draft.say(
            "--rollout-max-context-len", f"{longest} tokens are room for the longest prompt with the longest answer, of evaluations too"
        )
    draft.put("model.max_len", longest, *sources)
