"""Returns and advantages of a chain by recursion, from ALGORITHMS 4.2 (SAO paper, Eq. 4-5)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def adaptive_lambda(tokens: int, alpha: float) -> float:
    return 0.0 if tokens == 0 else max(0.0, 1.0 - 1.0 / (alpha * tokens))


def skip_gae(
    values: Sequence[float],
    rewards: Sequence[float],
    mask: Sequence[bool],
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> list[float]:
    """The sum over later action tokens of (gamma lam)^steps times their d, steps counted in action tokens."""
    chain = [t for t, acts in enumerate(mask) if acts]
    following = [*(values[t] for t in chain[1:]), bootstrap]
    d = [rewards[t] + gamma * v - values[t] for t, v in zip(chain, following, strict=True)] if chain else []
    out = [0.0] * len(mask)
    for i, t in enumerate(chain):
        out[t] = math.fsum((gamma * lam) ** (k - i) * d[k] for k in range(i, len(chain)))
    return out


def value_loss(values: Sequence[float], targets: Sequence[float], mask: Sequence[bool], denominator: float) -> float:
    return math.fsum((v - t) ** 2 for v, t, acts in zip(values, targets, mask, strict=True) if acts) / denominator


def explained_variance(returns: Sequence[float], values: Sequence[float]) -> float | None:
    def variance(x: Sequence[float]) -> float:
        mean = math.fsum(x) / len(x)
        return math.fsum((v - mean) ** 2 for v in x) / len(x)

    if len(set(returns)) < 2:
        return None
    return 1.0 - variance([r - v for r, v in zip(returns, values, strict=True)]) / variance(returns)
