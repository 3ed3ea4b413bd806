"""Divergences by loops over states and vocabulary (ALGORITHMS 2.4; `k3` of 2.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

Law = Sequence[float]
"""Log-probabilities of one state."""

NEVER = -math.inf


def log_law(logits: Sequence[float], *, temperature: float, forbidden: Sequence[bool] | None) -> list[float]:
    """log softmax(logits / T) over the allowed entries; a forbidden entry has probability 0."""
    allowed = [v for v in range(len(logits)) if forbidden is None or not forbidden[v]]
    scaled = {v: logits[v] / temperature for v in allowed}
    if any(math.isnan(x) for x in scaled.values()):
        return [math.nan if v in scaled else NEVER for v in range(len(logits))]
    top = max(scaled.values())
    norm = top + math.log(math.fsum(math.exp(x - top) for x in scaled.values()))
    return [scaled[v] - norm if v in scaled else NEVER for v in range(len(logits))]


def kl(log_p: Law, log_q: Law) -> float:
    """sum_v p (log p - log q): 0 where p = 0, +inf where p > 0 and q = 0, NaN where anything is NaN."""
    if any(math.isnan(x) for x in (*log_p, *log_q)):
        return math.nan
    terms: list[float] = []
    for p, q in zip(log_p, log_q, strict=True):
        if p == NEVER:
            continue
        if q == NEVER:
            return math.inf
        terms.append(math.exp(p) * (p - q))
    return math.fsum(terms)


def entropy(log_p: Law) -> float:
    if any(math.isnan(x) for x in log_p):
        return math.nan
    return -math.fsum(math.exp(p) * p for p in log_p if p != NEVER)


def total_variation(log_p: Law, log_q: Law) -> float:
    return 0.5 * math.fsum(abs(math.exp(p) - math.exp(q)) for p, q in zip(log_p, log_q, strict=True))


def k3(x: float) -> float:
    """e^x - 1 - x where no bound is needed; a Taylor series near 0, where the closed form cancels."""
    if abs(x) < 0.1:
        return math.fsum(x**n / math.factorial(n) for n in range(2, 14))
    return math.exp(x) - 1.0 - x


def message_values(values: Sequence[float], row: Sequence[int]) -> tuple[list[float], list[float]]:
    """Mean and sum of the values of each message, messages in order of first appearance."""
    seen: dict[int, list[float]] = {}
    for value, r in zip(values, row, strict=True):
        seen.setdefault(r, []).append(value)
    sums = [math.inf if math.inf in v else math.fsum(v) for v in seen.values()]
    return [s / len(v) for s, v in zip(sums, seen.values(), strict=True)], sums


def project(pre: Law, current: Law, *, radius: float) -> tuple[list[float], float]:
    """The newcomer's law in the ball and lam: new ~ pre^(1/(1+lam)) current^(lam/(1+lam)), by halving the interval of the
    exponent lam/(1+lam) (2.8). Only tokens that both laws have keep any probability."""
    if kl(pre, current) <= radius:
        return list(pre), 0.0
    both = [v for v in range(len(pre)) if pre[v] != NEVER and current[v] != NEVER]

    def at(share: float) -> list[float]:
        mixed = {v: (1.0 - share) * pre[v] + share * current[v] for v in both}
        top = max(mixed.values())
        norm = top + math.log(math.fsum(math.exp(x - top) for x in mixed.values()))
        return [mixed[v] - norm if v in mixed else NEVER for v in range(len(pre))]

    near, far = 0.0, 1.0
    if kl(at(0.0), current) <= radius:
        return at(0.0), 0.0
    for _ in range(200):
        middle = (near + far) / 2.0
        near, far = (middle, far) if kl(at(middle), current) > radius else (near, middle)
    return at(far), far / (1.0 - far) if far < 1.0 else math.inf
