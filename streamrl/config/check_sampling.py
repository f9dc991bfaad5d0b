"""What the section `sampling`, that of an evaluation, and the rows' own may not ask for with the rest of a configuration.

Those of evaluations are looked at by `streamrl.config.check_evaluation`.
"""

from __future__ import annotations

import importlib.util

from streamrl.config.bounds import refuse
from streamrl.config.check_recording import check_recorded
from streamrl.config.tree import Config
from streamrl.schemas.tasks import Sampling

GRAMMARS = "llguidance"
"""The package of grammars on the local engine, with the extra `grammar`."""
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_GRAMMARS = ("json_schema", "regex")
_CUTS = ("top_p", "top_k", "min_p")


def check_sampling(config: Config) -> None:
    """Raise ConfigError for the first rule that does not hold; looks at no file and no package."""
    check_drawn(config, config.sampling, "sampling", trained=True)


def check_drawn(config: Config, sampling: Sampling, place: str, *, trained: bool) -> None:
    """Raise ConfigError where tasks cannot be sampled so, or their tokens not be trained.

    Args:
        config: the whole tree.
        sampling: of the tasks.
        place: where it is from, such as `sampling`.
        trained: whether their tokens are to be trained on.
    """
    refuse(
        trained and sampling.temperature == 0,
        f"{place}.temperature must be above 0 (a greedy token has no log-prob to train on), got 0",
        hint="only evaluation.sampling may be greedy",
        key=f"{place}.temperature",
    )
    later, engine = sampling.later(), config.engine
    for name in (*_PENALTIES, *_GRAMMARS):
        refuse(
            trained and name in later and config.tasks.inexact == "refuse",
            f"{place}.{name} draws from a distribution that the trainer does not compute: tasks.inexact = refuse leaves it all out",
            hint=f"leave {place}.{name} out, or set tasks.inexact to 'mask' or 'allow'",
            key=f"{place}.{name}",
        )
    for name in _GRAMMARS:
        refuse(
            name in later and engine.traits.tabular,
            f"{place}.{name} is a grammar, which engine.kind = {engine.kind} does not know",
            hint="use engine.kind = 'local' or 'sglang', or leave it out",
            key=f"{place}.{name}",
        )
        refuse(
            name in later and engine.traits.server and not engine.sglang.grammar_backend,
            f"{place}.{name} needs engine.sglang.grammar_backend, got none: servers start without a tokenizer otherwise",
            hint="set engine.sglang.grammar_backend = 'xgrammar', whose package is in SGLang's environment",
            key="engine.sglang.grammar_backend",
        )
    refuse(
        sampling.min_p > 0 and engine.traits.server and engine.deterministic,
        f"{place}.min_p does not go with engine.deterministic = true on SGLang, which draws by seed without it only",
        hint="leave one of them out",
        key=f"{place}.min_p",
    )
    if trained and sampling.cuts:
        check_recorded(config, sampling, place)
    for name in _CUTS:
        refuse(
            trained and getattr(sampling, name) != getattr(Sampling(), name) and config.trainer.tensor > 1,
            f"trainer.backend = megatron cannot do what {place}.{name} asks for: log-probs over a vocabulary in parts "
            "are of the whole distribution",
            hint=f"leave {place}.{name} out, or set trainer.backend = 'torch'",
            key=f"{place}.{name}",
        )


def check_vocabulary(sampling: Sampling, vocab_size: int, place: str) -> None:
    """Raise ConfigError where a logit bias is of tokens that the model does not have."""
    bias = sampling.logit_bias
    refuse(
        bool(bias) and max(bias) >= vocab_size,
        f"{place}.logit_bias must be of token ids in 0 .. {vocab_size - 1}, got {max(bias, default=0)}",
        hint="was it made for the tokenizer of another model?",
        key=f"{place}.logit_bias",
    )


def check_grammars(config: Config, sampling: Sampling, place: str) -> None:
    """Raise ConfigError where the local engine has not what a grammar takes, or the grammar is none that it understands."""
    if not sampling.grammar or config.engine.traits.tabular or config.engine.traits.server:
        return
    name = "json_schema" if sampling.json_schema else "regex"
    refuse(
        importlib.util.find_spec(GRAMMARS) is None,
        f"{place}.{name} needs the package {GRAMMARS} on the local engine, which is not installed",
        hint="pip install 'streamrl[grammar]'",
        key=f"{place}.{name}",
    )
    problem = grammar_problem(sampling)
    refuse(
        bool(problem),
        f"expected a grammar that {GRAMMARS} understands in {place}.{name}, got {getattr(sampling, name)[:80]!r}: {problem}",
        hint="see docs/sampling.md",
        key=f"{place}.{name}",
    )


def grammar_problem(sampling: Sampling) -> str:
    """What is wrong with a grammar as far as can be said without a model, within the library's bounds, or an empty text."""
    import llguidance

    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar_text(sampling))
    return short(messages[0]) if is_error else ""


def grammar_text(sampling: Sampling) -> str:
    """The grammar that `sampling` asks for, in the library's own form; the library is there."""
    import llguidance

    if sampling.json_schema:
        return llguidance.LLMatcher.grammar_from_json_schema(sampling.json_schema)
    return llguidance.LLMatcher.grammar_from_regex(sampling.regex)


def short(error: str) -> str:
    """The library's words without its state."""
    return " ".join(error.partition("<state>")[0].split())[:300]
