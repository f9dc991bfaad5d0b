"""What evaluations may not ask for with the rest of a configuration."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.bridges import brings_tasks
from streamrl.config.check_data import check_data
from streamrl.config.check_sampling import check_drawn
from streamrl.config.evaluation_sets import ProblemSet, problem_sets
from streamrl.config.tree import Config


def check_evaluation(config: Config) -> None:
    """Raise ConfigError for the first rule that does not hold; looks at no file."""
    check_drawn(config, config.evaluation.sampling, "evaluation.sampling", trained=False)
    sets = problem_sets(config)
    for key, wanted in (("evaluation.every", config.evaluation.every), ("evaluation.engines", config.evaluation.engines)):
        refuse(
            wanted > 0 and not sets,
            f"{key} needs problems, got neither data.heldout nor evaluation.sets: there is nothing to evaluate on",
            hint=f"name held-out rows in data.heldout, or set {key} = 0",
            key=key,
        )
    refuse(
        config.debug.delay_versions > 0 and bool(sets),
        "debug.delay_versions leaves no engine that serves the version to be evaluated, but there are problems in "
        f"{', '.join(one.key for one in sets)}",
        hint="leave them out",
        key="debug.delay_versions",
    )
    for one in sets:
        _check_set(config, one)


def _check_set(config: Config, one: ProblemSet) -> None:
    key = one.key.partition("[")[0]
    check_drawn(config, one.sampling, f"{one.key}.sampling" if key != one.key else "evaluation.sampling", trained=False)
    check_data(one.config, asked=True)
    refuse(
        one.config.data.max_prompt_tokens >= config.model.max_len,
        f"{one.key}: prompts of up to {one.config.data.max_prompt_tokens} tokens leave no room for an answer within model.max_len = "
        f"{config.model.max_len}",
        hint="lower max_prompt_tokens, or raise model.max_len",
        key=key,
    )
    refuse(
        one.config.reward.kind == "late",
        f"reward.kind = late leaves episodes without a reward, but {one.key} asks for an evaluation, which needs one at once",
        hint="give the set a reward that is computed" if key != one.key else "leave data.heldout out, or choose a reward that is computed",
        key=key,
    )
    refuse(
        one.n > 1 and one.sampling.temperature == 0 and not one.config.data.sampling_key,
        f"{one.key} asks for n = {one.n} samples of a problem at temperature 0: they would all be the same",
        hint="set a temperature, such as evaluation.sampling = { temperature = 1.0 }, or n = 1",
        key=key,
    )
    refuse(
        brings_tasks(one.config.producer.function),
        f"{one.key} has the producer {one.config.producer.function!r}: held-out tasks are not evaluated by tasksets",
        hint="leave the set out",
        key=key,
    )
