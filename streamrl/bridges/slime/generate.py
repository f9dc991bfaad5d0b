"""Generation as slime writes it: the function that is called without a custom one, its tokenizer, and what calls a custom one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.bridges.slime import session
from streamrl.bridges.slime.args import Args, args_of, taken
from streamrl.bridges.slime.sample import Sample, blank, episode_of
from streamrl.bridges.slime.session import Session
from streamrl.config.plugins import resolve
from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode
from streamrl.producers.protocol import Tokenizer
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.schemas.tasks import RolloutTask

EVALUATION = "evaluation"
"""`RolloutTask.source` of an evaluator's tasks."""
HOOK_KEY = "slime.rollout_sample_hook_path"
_Hook = tuple[Callable[..., Any], Sequence[str]]
"""A sample hook, and which arguments it takes by name."""


class TextTokens:
    """The policy's tokenizer with the calls of transformers that hooks make: ids without anything added.

    Args:
        tokenizer: of the policy.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.stop_ids[0] if tokenizer.stop_ids else None

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text."""
        if add_special_tokens:
            raise SchemaError("expected add_special_tokens = False, got True", hint="special tokens are written out in the text")
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens written out."""
        return self._tokenizer.decode(ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> Any:
        """Messages as token ids, or without `tokenize` as text."""
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_kwargs=more or None
        )
        return self._tokenizer.encode(text) if tokenize else text

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the tokenizer that hooks are handed has no {name!r}; transformers.AutoTokenizer.from_pretrained(args.hf_checkpoint) has all"
        )


class GenerateState:
    """What hooks of slime's take from its object of this name: tokenizer, args, sampling parameters."""

    def __init__(self, args: Any) -> None:
        context = session.current().context
        self.args = args
        self.tokenizer = TextTokens(context.tokenizer)
        self.sampling_params = session.sampling_params(context)


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One turn of the model, appended to what the sample has; the prompt's tokens first where it has none.

    As in slime `max_new_tokens` is for the whole response, of which a sample may have a part already.
    """
    asking = session.current()
    if not sample.tokens:
        sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt)
    left = sampling_params.get("max_new_tokens", asking.context.task.sampling.max_new_tokens) - sample.response_length
    if left <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": left}
    answer = await asking.post({"input_ids": list(sample.tokens), "sampling_params": params, "return_logprob": True})
    given = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in given],
        log_probs=[logprob for logprob, _, _ in given],
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    return sample


def prompt_text(task: RolloutTask, tokenizer: Tokenizer) -> str:
    """The prompt as slime has it: with the chat template applied, special tokens written out."""
    return task.prompt if isinstance(task.prompt, str) and not task.prompt_ids else tokenizer.decode(task.prompt_ids)


def producer(function: Callable[..., Any]) -> Callable[[RolloutTask, RolloutEngine], Any]:
    """A producer that calls a generate function of slime's, then the sample hooks that `args` names."""
    tells = EVALUATION in inspect.signature(function).parameters
    hooks: list[_Hook] = []

    async def roll_out(task: RolloutTask, engine: RolloutEngine) -> list[Episode]:
        context, args = engine.context, args_of(engine.options)
        evaluation = task.source == EVALUATION
        if not hooks:  # once a process, before the first rollout
            hooks.extend([_hook(reference) for reference in getattr(args, "rollout_sample_hook_path", None) or ()])
        asking = Session(context, evaluation=evaluation)
        sample = blank(task, context.rollout_index, prompt_text(task, context.tokenizer))
        named = {"evaluation": evaluation} if tells else {}
        with session.running(asking):
            given = await function(args, sample, session.sampling_params(context), **named)
            samples = [await _hooked(hooks, args, one, evaluation) for one in _samples(given)]
        kept = [one for one in samples if not one.remove_sample]
        return [episode_of(one, task, context.rollout_index, asking.asked, seed=context.seed) for one in kept]

    return roll_out


def _samples(given: Any) -> list[Any]:
    samples = given if isinstance(given, list) else [given]
    for one in samples:
        if not all(hasattr(one, name) for name in ("tokens", "response_length", "status", "remove_sample")):
            raise SchemaError(
                f"expected a generate function to return a Sample or a list of them, got {type(one).__name__}",
                hint="end it with `return sample`",
            )
    return samples


def _hook(reference: str) -> _Hook:
    hook = resolve(reference, what="sample hook", key=HOOK_KEY)
    return hook, taken(hook, ("rollout_id", EVALUATION))


async def _hooked(hooks: Sequence[_Hook], args: Args, sample: Any, evaluation: bool) -> Any:
    told = {"rollout_id": None, EVALUATION: evaluation}
    for hook, names in hooks:
        given = hook(args, sample, **{name: told[name] for name in names})
        given = await given if inspect.isawaitable(given) else given
        if given is not None:
            [sample] = _samples(given)
    return sample
