"""Losses by loops (ALGORITHMS 2.3 F6, 4.2, 4.8). Rows are lists of floats; a masked entry is never read.

`weights_at` are the log-probabilities at which detached weights are evaluated. Finite differences of a
surrogate move `logprobs` and leave `weights_at` where it was, which is what a stop-gradient means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Rows = Sequence[Sequence[float]]
Masks = Sequence[Sequence[bool]]

BOUND = 20.0
"""Largest exponent of any weight."""


@dataclass(frozen=True)
class Slow:
    terms: list[float]
    """One per kept token or per episode, already over the denominator."""
    total: float
    scale: float
    """Sum of the absolute terms over the denominator: what a rounding error is relative to."""
    counts: dict[str, int]


def log_ratio(logprobs: Rows, behavior: Rows, mask: Masks) -> list[list[float]]:
    return [[logprobs[b][t] - behavior[b][t] if mask[b][t] else 0.0 for t in range(len(mask[b]))] for b in range(len(mask))]


def exp_bounded(x: float) -> tuple[float, bool]:
    """e^x with the exponent bounded from above: a ratio can overflow, it cannot underflow into harm."""
    if math.isnan(x):
        return math.nan, False
    return (math.exp(BOUND), True) if x > BOUND else (math.exp(x), False)


def dis(
    logprobs: Rows,
    behavior: Rows,
    advantages: Rows,
    mask: Masks,
    *,
    low: float,
    high: float,
    denominator: float,
    weights_at: Rows | None = None,
) -> Slow:
    """loss = -sum_t mask_t sg(f(rho_t)) A_t log pi_t / denominator  (SAO paper, Eq. 1-3).

    f(rho) = rho if low < rho < high else 0, strict at both ends.
    """
    at = logprobs if weights_at is None else weights_at
    terms: list[float] = []
    counts = {"kept": 0, "rejected_low": 0, "rejected_high": 0, "clamped": 0}
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if not mask[b][t]:
                continue
            rho, clamped = exp_bounded(at[b][t] - behavior[b][t])
            counts["clamped"] += clamped
            if rho <= low:
                counts["rejected_low"] += 1
            elif rho >= high:
                counts["rejected_high"] += 1
            else:
                counts["kept"] += 1
                terms.append(-rho * advantages[b][t] * logprobs[b][t])
    return _over(terms, denominator, counts)


def ppo(logprobs: Rows, behavior: Rows, advantages: Rows, mask: Masks, *, clip: float, denominator: float) -> Slow:
    """loss = -sum_t mask_t min(rho A, clip(rho, 1-eps, 1+eps) A) / denominator  (4.8)."""
    terms: list[float] = []
    counts = {"clamped": 0}
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if not mask[b][t]:
                continue
            rho, clamped = exp_bounded(logprobs[b][t] - behavior[b][t])
            counts["clamped"] += clamped
            clipped = min(max(rho, 1.0 - clip), 1.0 + clip)
            terms.append(-min(rho * advantages[b][t], clipped * advantages[b][t]))
    return _over(terms, denominator, counts)


def episode_log_ratios(logprobs: Rows, behavior: Rows, mask: Masks, episode: Sequence[int]) -> dict[int, float]:
    """u of each episode that has an action token: the raw sum over all its rows and own tokens (F6)."""
    u: dict[int, float] = {}
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if mask[b][t]:
                u[episode[b]] = u.get(episode[b], 0.0) + logprobs[b][t] - behavior[b][t]
    return u


def sequence(
    logprobs: Rows,
    behavior: Rows,
    advantages: Rows,
    mask: Masks,
    *,
    episode: Sequence[int],
    clip: float,
    denominator: float,
) -> Slow:
    """loss = -sum_e min(r A, exp(clip(u, log(1-eps), log(1+eps))) A) / denominator,  r = exp(u)  (F6)."""
    advantage: dict[int, float] = {}
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if mask[b][t]:
                advantage[episode[b]] = advantages[b][t]
    terms: list[float] = []
    counts = {"clamped": 0}
    for e, u in episode_log_ratios(logprobs, behavior, mask, episode).items():
        r, clamped = exp_bounded(u)
        counts["clamped"] += clamped
        bounded = math.exp(min(max(u, math.log(1.0 - clip)), math.log(1.0 + clip)))
        terms.append(-min(r * advantage[e], bounded * advantage[e]))
    return _over(terms, denominator, counts)


def kl_term(kl: Rows, mask: Masks, *, denominator: float) -> Slow:
    """sum_t mask_t kl_t / denominator."""
    terms = [kl[b][t] for b in range(len(mask)) for t in range(len(mask[b])) if mask[b][t]]
    return _over(terms, denominator, {})


def _over(terms: Sequence[float], denominator: float, counts: dict[str, int]) -> Slow:
    parts = [x / denominator for x in terms]
    return Slow(parts, math.fsum(parts), math.fsum(abs(x) for x in parts), counts)
