"""The gate and what steers it, by sums and bisections (ALGORITHMS 2.4, 2.5, 2.13, V6)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from reference import divergence


def binomial_pmf(k: int, n: int, p: float) -> float:
    if p <= 0.0 or p >= 1.0:
        return float(k == (0 if p <= 0.0 else n))
    if n <= 60:
        return math.comb(n, k) * p**k * (1.0 - p) ** (n - k)
    log_comb = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log_comb + k * math.log(p) + (n - k) * math.log1p(-p))


def binomial_cdf(k: int, n: int, p: float) -> float:
    return math.fsum(binomial_pmf(i, n, p) for i in range(k + 1))


def order_statistic_rank(n: int, *, level: float, miss: float) -> tuple[int | None, float]:
    """Smallest k <= n with P(Bin(n, level) <= k-1) >= 1 - miss, and how close any k came to the bound.

    The complement P(Bin >= k) <= miss is summed from the top, where a small miss loses no digits.
    """
    best: int | None = None
    closest = math.inf
    tail: list[float] = []
    for k in range(n, 0, -1):
        tail.append(binomial_pmf(k, n, level))
        above = math.fsum(tail)
        closest = min(closest, abs(above - miss) / miss)
        if above <= miss:
            best = k
        else:
            break
    return best, closest


def certifiable_level(n: int, *, miss: float) -> float:
    """The level at which the largest of n values is just certified: level^n = miss, by bisection."""
    return bisect(lambda level: n * math.log(level) - math.log(miss), 1e-300, 1.0)


def units_needed(*, level: float, miss: float) -> int:
    """Smallest n for which some order statistic certifies the level."""
    n = 1
    while order_statistic_rank(n, level=level, miss=miss)[0] is None:
        n += 1
    return n


def clopper_pearson_upper(k: int, n: int, *, confidence: float) -> float:
    """The p at which k or fewer violations of n have probability 1 - confidence."""
    if k == n:
        return 1.0
    return bisect(lambda p: (1.0 - confidence) - binomial_cdf(k, n, p), 0.0, 1.0)


def bisect(f: Callable[[float], float], low: float, high: float) -> float:
    """Root of a function that rises from negative to positive, to the last bit."""
    for _ in range(2000):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if f(middle) < 0.0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def quantile_point(values: Sequence[float], *, alpha: float) -> float:
    """X_(ceil((1-alpha) N)) with alpha read as the decimal that was written (.1 of 10 is 1)."""
    rank = math.ceil((1 - Fraction(repr(alpha))) * len(values))
    return sorted(values)[rank - 1]


@dataclass(frozen=True)
class Gate:
    q_point: float
    q_ucb: float | None
    q_gate: float
    message_mean: float
    message_sum: float
    n_units: int
    n_states: int
    certified: bool
    certifiable_level: float
    passed: bool
    tie: float
    """Relative distance of the binomial sum from its bound: below 1e-9 the rank hangs on rounding."""


def gate(
    new_old: Sequence[float],
    old_new: Sequence[float],
    *,
    message: Sequence[int],
    drawn: Sequence[int],
    direction: str,
    alpha: float,
    eta: float,
    looks: int,
    radius_token: float,
    radius_message_mean: float,
) -> Gate:
    """The three numbered steps of 2.4."""
    pick = {"new_old": lambda a, b: a, "old_new": lambda a, b: b, "max": max}[direction]
    d = [pick(a, b) for a, b in zip(new_old, old_new, strict=True)]
    q_point = quantile_point(d, alpha=alpha)
    k, tie = order_statistic_rank(len(drawn), level=1.0 - alpha, miss=eta / looks)
    q_ucb = None if k is None else sorted(d[i] for i in drawn)[k - 1]
    q_gate = q_point if q_ucb is None else max(q_point, q_ucb)
    means, _ = divergence.message_values(d, message)
    _, sums = divergence.message_values(old_new, message)
    message_mean = math.inf if math.inf in means else math.fsum(means) / len(means)
    return Gate(
        q_point=q_point,
        q_ucb=q_ucb,
        q_gate=q_gate,
        message_mean=message_mean,
        message_sum=math.inf if math.inf in sums else math.fsum(sums) / len(sums),
        n_units=len(drawn),
        n_states=len(d),
        certified=k is not None,
        certifiable_level=certifiable_level(len(drawn), miss=eta / looks),
        passed=q_gate <= radius_token and message_mean <= radius_message_mean,
        tie=tie,
    )


def next_penalty(beta: float, *, full_step_failed: bool, relaxed: bool, low: float, high: float) -> float:
    """Doubled after a failed full displacement, halved after an easy pass, kept in [low, high] (2.5)."""
    if full_step_failed:
        beta = beta * 2
    elif relaxed:
        beta = beta / 2
    return min(max(beta, low), high)


def next_lr(lr: float, *, configured: float, accepted: bool, reason: str | None) -> float:
    """Halved on Rejected(radius), doubled back per acceptance up to the configured value (2.5)."""
    if accepted:
        return min(configured, lr * 2)
    return lr / 2 if reason == "radius" else lr


def fisher_rao(p0: float, p1: float) -> float:
    """Length of the way from p0 to p1: the integral of dp / sqrt(p (1-p)), twice an angle of sine sqrt p.

    The angle is taken from both legs of the triangle with hypotenuse 1, which keeps its digits near p = 1.
    """

    def angle(p: float) -> float:
        return math.atan2(math.sqrt(p), math.sqrt(1.0 - p))

    return 2.0 * abs(angle(p1) - angle(p0))


def binary_kl(p: float, q: float) -> float:
    total = 0.0
    for a, b in ((p, q), (1.0 - p, 1.0 - q)):
        if a > 0.0:
            total += math.inf if b <= 0.0 else a * math.log(a / b)
    return total


def greedy_exact_steps(p0: float, p1: float, *, delta: float, direction: str) -> int:
    """Updates needed when each goes as far towards p1 as its divergence allows."""

    def moved(old: float, new: float) -> float:
        new_old, old_new = binary_kl(new, old), binary_kl(old, new)
        return {"new_old": new_old, "old_new": old_new, "max": max(new_old, old_new)}[direction]

    p, steps = p0, 0
    while p != p1:
        steps += 1
        if moved(p, p1) <= delta:
            break
        here = p
        share = bisect(lambda s, here=here: moved(here, here + s * (p1 - here)) - delta, 0.0, 1.0)
        p = here + share * (p1 - here)
    return steps


def retry(beta: float, lr: float, r: int) -> tuple[float, float]:
    """beta_r = min(10, max(beta, .05) 10^r) and lr_r = lr / 2^r, one factor at a time (2.5)."""
    beta_r, lr_r = (beta if beta > 0.05 else 0.05), lr
    for _ in range(r):
        beta_r, lr_r = beta_r * 10, lr_r / 2
    return min(10.0, beta_r), lr_r


def greedy_gain(gradient: Sequence[float], fisher: Sequence[float], *, delta: float, eps: float) -> float:
    """max sum_p g_p x_p over sum_p (f_p + eps) x_p^2 / 2 <= delta: by Lagrange, x = t g/(f + eps), t at the boundary."""
    direction = [g / (f + eps) for g, f in zip(gradient, fisher, strict=True)]
    longest = max(map(abs, direction)) or 1.0
    direction = [x / longest for x in direction]  # any length will do, and the square of a tiny one would be 0
    size = math.fsum((f + eps) * x * x for f, x in zip(fisher, direction, strict=True)) / 2.0
    if size == 0.0:
        return 0.0
    return math.sqrt(delta / size) * math.fsum(g * x for g, x in zip(gradient, direction, strict=True))


def allocate_radius(kappas: Sequence[float], *, total: int, most: int) -> float:
    """The largest sum of kappa_j sqrt(quanta_j) over all ways to give out at most `total` quanta, 1..most each."""
    return max(
        math.fsum(k * math.sqrt(q) for k, q in zip(kappas, quanta, strict=True))
        for quanta in itertools.product(range(1, most + 1), repeat=len(kappas))
        if sum(quanta) <= total
    )


def allocate_radius_continuous(kappas: Sequence[float], budget: float) -> list[float]:
    """delta_j at which all marginal gains kappa_j / (2 sqrt(delta_j)) equal one multiplier, found by bisection."""

    def spent(mu: float) -> float:
        return math.fsum((k / (2.0 * mu)) ** 2 for k in kappas)

    mu = bisect(lambda mu: budget - spent(mu), 1e-12 * max(kappas), 1e12 * max(kappas))
    return [(k / (2.0 * mu)) ** 2 for k in kappas]
