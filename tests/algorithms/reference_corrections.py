"""The off-policy corrections a second time, sample by sample in plain floats, from their equations in terms of probabilities.

p is a token's probability under the trainer's policy, q under the policy that sampled it; rho = p / q.
"""

import math
from dataclasses import dataclass

from streamrl.config.loss import CorrectionConfig


@dataclass(frozen=True)
class Token:
    log_p: float
    log_q: float
    age: int = 0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.log_p) and math.isfinite(self.log_q)

    @property
    def rho(self) -> float:
        return math.exp(self.log_p) / math.exp(self.log_q)


Sample = list[Token]


def ratios(sample: Sample, level: str) -> list[float]:
    """Of each finite token: its own ratio, the sample's product, or the root of that of order n."""
    own = [token.rho for token in sample]
    if level == "token":
        return own
    whole = math.prod(own)
    return [whole if level == "sequence" else whole ** (1 / len(own))] * len(own)


def bounded(rho: float, config: CorrectionConfig) -> float:
    match config.kind:
        case "truncate":
            return rho if rho < config.high else config.high
        case "clip":
            return max(config.low, min(rho, config.high))
        case "mask":
            return rho if config.low <= rho <= config.high else 0.0
        case _:
            return 1.0


def term(token: Token, measure: str) -> float:
    """Estimates of KL(q || p) = sum_y q(y) log(q(y) / p(y)) at one token drawn from q."""
    surprise = math.log(math.exp(token.log_q) / math.exp(token.log_p))
    return {"k1": surprise, "k2": 0.5 * surprise**2, "k3": token.rho - 1 + surprise}[measure]


def measures(sample: Sample, measure: str, level: str) -> list[float]:
    if measure == "ratio":
        own = [token.rho for token in sample]
        one = {"sequence_sum": math.prod(own), "sequence_mean": math.prod(own) ** (1 / len(own)), "sequence_max": max(own)}
    else:
        own = [term(token, measure) for token in sample]
        one = {"sequence_sum": sum(own), "sequence_mean": sum(own) / len(own), "sequence_max": max(own)}
    return own if level == "token" else [one[level]] * len(own)


def correct(samples: list[Sample], config: CorrectionConfig) -> tuple[list[list[float]], list[list[bool]], float, int]:
    """Weights and decisions of all tokens, and sum and number of the importance weights that normalisation divides by."""
    weights: list[list[float]] = []
    keeps: list[list[bool]] = []
    total, count = 0.0, 0
    for sample in samples:
        finite = [token for token in sample if token.finite]
        found = iter(())
        if finite:
            importance = [bounded(rho, config) for rho in ratios(finite, config.level)]
            # A mean over tokens, or over samples, each of which has one weight.
            counted = importance if config.level == "token" else importance[:1]
            total, count = total + sum(counted), count + len(counted)
            keep = [True] * len(finite)
            for one in config.reject:
                low = one.low if one.measure in ("ratio", "k1") else -math.inf
                values = measures(finite, one.measure, one.level)
                keep = [k and low <= value <= one.high for k, value in zip(keep, values, strict=True)]
            if any(token.rho < config.veto for token in finite):
                keep = [False] * len(finite)
            if config.mask_staleness:
                keep = [k and not token.age > config.mask_staleness for k, token in zip(keep, finite, strict=True)]
            decayed = [w * config.staleness_decay**token.age for w, token in zip(importance, finite, strict=True)]
            found = iter(zip(decayed, keep, strict=True))
        row = [next(found) if token.finite else (0.0, False) for token in sample]
        weights.append([w if k else 0.0 for w, k in row])
        keeps.append([k for _, k in row])
    return weights, keeps, total, count
