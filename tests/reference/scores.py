"""Scores and their intervals: enumeration, the exact t law of integer degrees of freedom, bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations

from reference.trust_region import bisect


def avg_at_n(correct: Sequence[Sequence[float]]) -> float:
    return math.fsum(math.fsum(row) / len(row) for row in correct) / len(correct)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Share of the subsets of k of n samples, c of them right, that hold a right one: enumerated."""
    subsets = list(combinations(range(n), k))
    return sum(any(i < c for i in subset) for subset in subsets) / len(subsets)


def maj_at_k(answers: Sequence[str | None], gold_equal: Callable[[str], bool]) -> float:
    """Right share of the most frequent answers; None does not vote; no vote scores 0."""
    votes = [a for a in answers if a is not None]
    if not votes:
        return 0.0
    most = max(votes.count(a) for a in votes)
    tied = sorted({a for a in votes if votes.count(a) == most})
    return sum(bool(gold_equal(a)) for a in tied) / len(tied)


def normal_quantile(confidence: float) -> float:
    """z with P(|Z| <= z) = confidence."""
    return bisect(lambda z: math.erf(z / math.sqrt(2.0)) - confidence, 0.0, 40.0)


def student_within(t: float, dof: int) -> float:
    """P(|T| <= t) for integer degrees of freedom: a finite series (Abramowitz and Stegun 26.7.3-4)."""
    theta = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(theta), math.cos(theta)
    if dof == 1:
        return 2.0 * theta / math.pi
    odd = dof % 2 == 1
    term = cosine if odd else 1.0
    series = [term]
    for j in range(3 if odd else 2, dof - 1, 2):
        term *= (j - 1) / j * cosine**2
        series.append(term)
    total = sine * math.fsum(series)
    return 2.0 / math.pi * (theta + total) if odd else total


def student_quantile(confidence: float, dof: int) -> float:
    return bisect(lambda t: student_within(t, dof) - confidence, 0.0, 1e9)


def wilson(values: Sequence[float], *, confidence: float) -> tuple[float, float]:
    """Both p with |p_hat - p| = z sqrt(p (1-p) / n), by bisection on either side of p_hat."""
    n, z = len(values), normal_quantile(confidence)
    p_hat = math.fsum(values) / n

    def miss(p: float) -> float:
        return (p_hat - p) ** 2 - z * z * p * (1.0 - p) / n

    low = 0.0 if p_hat == 0.0 else bisect(lambda p: -miss(p), 0.0, p_hat)
    high = 1.0 if p_hat == 1.0 else bisect(miss, p_hat, 1.0)
    return low, high


def student(values: Sequence[float], *, confidence: float) -> tuple[float, float]:
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = student_quantile(confidence, n - 1) * math.sqrt(variance / n)
    return mean - half, mean + half
