"""Tables of the estimators and policy losses in `streamrl.config.registry`."""

from __future__ import annotations

from collections.abc import Collection

from streamrl.config.registry import ESTIMATORS, POLICY_LOSSES


def registry_tables() -> str:
    """Both tables."""
    lines = ["| `loss.advantage` | compares rollouts of a task | whitened | needs | reads of `loss` |", "|---|---|---|---|---|"]
    for name, estimator in ESTIMATORS.items():
        needs = ", ".join([*sorted(estimator.needs), *(["a greedy rollout"] if estimator.greedy else [])])
        cells = (_yes(estimator.grouped), _yes(estimator.whitened), needs, _keys(estimator.settings))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["", "| `loss.policy` | ratio against | of whole samples | without torch | reads of `loss` |", "|---|---|---|---|---|"]
    for name, policy in POLICY_LOSSES.items():
        cells = (policy.anchor, _yes(policy.sequences), _yes(policy.table), _keys(policy.keys))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _yes(flag: bool) -> str:
    return "yes" if flag else ""


def _keys(keys: Collection[str]) -> str:
    return ", ".join(f"`{key}`" for key in sorted(keys))
