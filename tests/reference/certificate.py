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


# ---- bounds of a mean (3.6) --------------------------------------------------------------------------------


def wealth(d: Sequence[float], gain: float, *, width: float, level: float) -> list[float]:
    """K_1, K_2, ... of the bet against `gain`, one pair at a time: each stake knows only the pairs before it."""
    m = (gain + width) / (2.0 * width)
    seen: list[float] = []
    squares = 0.0
    variance = 0.25
    k, path = 1.0, []
    for s, difference in enumerate(d, start=1):
        x = (difference + width) / (2.0 * width)
        stake = math.sqrt(2.0 * math.log(1.0 / level) / (variance * s * math.log(1.0 + s)))
        if m > 0.0:
            stake = min(stake, 0.5 / m)
        k *= 1.0 + stake * (x - m)
        path.append(k)
        seen.append(x)
        squares += (x - (0.5 + math.fsum(seen)) / (s + 1.0)) ** 2
        variance = (0.25 + squares) / (s + 1.0)
    return path


def betting_bound(d: Sequence[float], *, width: float, level: float, steps: int = 50) -> float:
    """The supremum of gains against which the wealth reaches 1/level, by halving."""
    low, high = -width, width
    for _ in range(steps):
        middle = (low + high) / 2.0
        if max(wealth(d, middle, width=width, level=level)) >= 1.0 / level:
            low = middle
        else:
            high = middle
    return low


def bernstein_bound(values: Sequence[float], *, reach: float, level: float) -> float:
    n = len(values)
    mean = math.fsum(values) / n
    spread = math.fsum((x - mean) ** 2 for x in values) / (n - 1)
    return mean - math.sqrt(2.0 * spread * math.log(2.0 / level) / n) - 7.0 * reach * math.log(2.0 / level) / (3.0 * (n - 1))


def hoeffding_bound(values: Sequence[float], *, reach: float, level: float) -> float:
    return math.fsum(values) / len(values) - reach * math.sqrt(math.log(1.0 / level) / (2.0 * len(values)))


def betting_n(level: float) -> int:
    """The first pair at which a candidate that always wins outright has been certified."""
    path: list[float] = []
    while not path or path[-1] <= 1.0 / level:
        path = wealth([1.0] * (len(path) + 1), 0.0, width=1.0, level=level)
    return len(path)


def bernstein_n(level: float, share: float) -> int:
    n = 2
    while 7.0 * 2.0 * math.log(2.0 / level) / (3.0 * (n - 1)) >= share:
        n += 1
    return n


# ---- the surrogate (3.6) -----------------------------------------------------------------------------------


def surrogate_terms(
    ratios: Sequence[Sequence[float]], returns: Sequence[float], values: Sequence[Sequence[float]], *, cap: float
) -> tuple[list[float], list[float], list[list[float]]]:
    """Per episode: sum of (min(r, cap) - 1)(R - V), sum of 1 - min(r, cap), and each (1 - r)^+."""
    gain, lost, apart = [], [], []
    for row, r_episode, v_row in zip(ratios, returns, values, strict=True):
        gain.append(math.fsum((min(r, cap) - 1.0) * (r_episode - v) for r, v in zip(row, v_row, strict=True)))
        lost.append(math.fsum(1.0 - min(r, cap) for r in row))
        apart.append([max(1.0 - r, 0.0) for r in row])
    return gain, lost, apart


def surrogate(
    ratios: Sequence[Sequence[float]],
    returns: Sequence[float],
    values: Sequence[Sequence[float]],
    *,
    low: float,
    high: float,
    level: float,
    looks: int,
) -> float:
    """LCB(G) - width UCB(zeta_trunc) - 2 width UCB(sum of abar but the last), the level over terms and looks."""
    m, width = len(ratios[0]), high - low
    each = level / looks / (2 if m == 1 else 3)
    clipped = [[min(max(v, low), high) for v in row] for row in values]
    gain, lost, apart = surrogate_terms(ratios, returns, clipped, cap=2.0)
    bound = bernstein_bound(gain, reach=2.0 * m * width, level=each)
    # An upper bound is minus the lower bound of the negative; zeta is never below 0.
    bound -= width * max(0.0, -bernstein_bound([-x for x in lost], reach=2.0 * m, level=each))
    if m > 1:
        bound += 2.0 * width * bernstein_bound([-math.fsum(row[:-1]) for row in apart], reach=m - 1.0, level=each)
    return bound


def staleness_bound(m: int, alpha: float, accepted: Sequence[tuple[int, float]], width: float) -> float:
    return math.fsum(2.0 * width * m * alpha * turns * other for turns, other in accepted)


def miss_rate(delta_conf: float, *, n_agents: int, stage: int | None) -> float:
    each = delta_conf / n_agents
    return each if stage is None else 6.0 * each / (math.pi**2 * stage**2)
