"""Bounds term by term (ALGORITHMS 3.1, 3.4, 3.5, V6, V8)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def occupancy_penalty_printed(delta: float, *, gamma: float, a_max: float) -> float:
    return 2.0 * gamma / (1.0 - gamma) ** 2 * a_max * math.sqrt(delta / 2.0)


def occupancy_penalty_trpo(delta: float, *, gamma: float, a_max: float) -> float:
    """Ratio to the printed form = sqrt(2 delta) (V2)."""
    return occupancy_penalty_printed(delta, gamma=gamma, a_max=a_max) * math.sqrt(2.0 * delta)


def published(
    deltas: Sequence[float],
    n_episodes: Sequence[int],
    *,
    gamma: float,
    a_max: float,
    delta_conf: float,
    kappas: Sequence[float],
    curvatures: Sequence[float],
    zetas: Sequence[float],
) -> tuple[float, float]:
    """The lower bound of 3.1 and the sum of its absolute terms."""
    gain, scale = 0.0, 0.0
    for i in range(len(deltas)):
        parts = (
            kappas[i] * math.sqrt(deltas[i]),
            -curvatures[i] * deltas[i],
            -occupancy_penalty_printed(deltas[i], gamma=gamma, a_max=a_max),
            -zetas[i] / (1.0 - gamma),
            -a_max / (1.0 - gamma) * math.sqrt(math.log(2.0 * len(deltas) / delta_conf) / (2.0 * n_episodes[i])),
        )
        gain += sum(parts)
        scale += sum(abs(x) for x in parts)
    return gain, scale


def dkw_epsilon(n: int, *, eta: float) -> float:
    """2 exp(-2 n eps^2) = eta."""
    return math.sqrt(math.log(2.0 / eta) / (2.0 * n))


def dkw_n_is_smallest(n: int, eps: float, *, eta: float) -> bool:
    """n is enough for eps, and n - 1 is not."""
    enough = 2.0 * math.exp(-2.0 * n * eps**2) <= eta * (1.0 + 1e-12)
    fewer = n == 1 or 2.0 * math.exp(-2.0 * (n - 1) * eps**2) > eta * (1.0 - 1e-12)
    return enough and fewer


def zero_violation_n(alpha: float, *, confidence: float) -> tuple[int, float]:
    """Smallest n with (1 - alpha)^n <= 1 - confidence by multiplying, and how close the decision was."""
    n, power, closest = 0, 1.0, math.inf
    while power > 1.0 - confidence:
        n += 1
        power *= 1.0 - alpha
        closest = min(closest, abs(power - (1.0 - confidence)) / (1.0 - confidence))
    return n, closest


def message_bound_amax(m: int, delta: float, a_max: float) -> float:
    """Error at own turn k is 2 (k-1) alpha * 2 alpha A_max, alpha^2 = delta / 2, summed (proof in 3.5)."""
    alpha = math.sqrt(delta / 2.0)
    return math.fsum(2.0 * (k - 1) * alpha * 2.0 * alpha * a_max for k in range(1, m + 1))


def message_bound_span(m: int, delta: float, span: float) -> float:
    alpha = math.sqrt(delta / 2.0)
    return math.fsum(2.0 * (k - 1) * alpha * alpha * span for k in range(1, m + 1))


def message_bound_mean(abar: Sequence[float], width: float) -> float:
    """2 width sum_{k<m} abar_k with abar of all m own turns: the last one does not enter."""
    return 2.0 * width * math.fsum(abar[k - 1] for k in range(1, len(abar)))


def message_bound_mixed(abar: Sequence[float], alpha: float, span: float) -> float:
    """2 span alpha sum_{k<m} (m-k) abar_k with abar of all m own turns."""
    m = len(abar)
    return 2.0 * span * alpha * math.fsum((m - k) * abar[k - 1] for k in range(1, m))


def alpha_from_kl(delta: float) -> float:
    """Pinsker, or Bretagnolle-Huber where that is smaller."""
    return min(math.sqrt(delta / 2.0), math.sqrt(-math.expm1(-delta)))


def discount_at(gamma: float, n: int) -> float:
    out = 1.0
    for _ in range(n):
        out *= gamma
    return out


def teamtr_drift(*, gamma: float, a_max: float) -> float:
    """2 gamma/(1-gamma)^2 A_max sqrt(delta/2) at delta = 1: the drift cost c sqrt(delta) has the printed form (3.2)."""
    return occupancy_penalty_printed(1.0, gamma=gamma, a_max=a_max)
