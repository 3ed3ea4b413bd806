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


# ---- masks (4.8): which own tokens are kept -----------------------------------------------------------------


def binary_kl(logprob: float, behavior: float) -> float:
    """d = p log(p/q) + (1-p) log((1-p)/(1-q)), p the behaviour's and q the current probability, both clamped."""
    p, q = (min(max(math.exp(x), 1e-6), 1.0 - 1e-6) for x in (behavior, logprob))
    return p * math.log(p / q) + (1.0 - p) * math.log((1.0 - p) / (1.0 - q))


def keep_band(logprobs: Rows, behavior: Rows, mask: Masks, *, low: float, high: float) -> list[list[bool]]:
    return [
        [own and low < exp_bounded(lp - b)[0] < high for lp, b, own in zip(*rows, strict=True)]
        for rows in zip(logprobs, behavior, mask, strict=True)
    ]


def keep_dppo(
    logprobs: Rows, behavior: Rows, advantages: Rows, mask: Masks, *, statistic: str, limit: float
) -> list[list[bool]]:
    """Drop t if its statistic exceeds the limit and, unless `symmetric`, the step moves the probability further."""
    out = [[False] * len(row) for row in mask]
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if not mask[b][t]:
                continue
            lp, old, a = logprobs[b][t], behavior[b][t], advantages[b][t]
            value = binary_kl(lp, old) if statistic == "binary_kl" else abs(math.exp(lp) - math.exp(old))
            further = (a > 0 and lp > old) or (a < 0 and lp < old) or statistic == "symmetric"
            out[b][t] = not (value > limit and further)
    return out


def keep_second_moment(logprobs: Rows, behavior: Rows, mask: Masks, *, limit: float) -> tuple[list[list[bool]], float]:
    """Drop the largest x^2 (with its equals) until the mean of the rest is <= limit; and how close a mean came to it."""
    square = {
        (b, t): (logprobs[b][t] - behavior[b][t]) ** 2 for b in range(len(mask)) for t in range(len(mask[b])) if mask[b][t]
    }
    rest = dict(square)
    closest = math.inf
    while rest:
        mean = math.fsum(rest.values()) / len(rest)
        closest = min(closest, abs(mean - limit))
        if mean <= limit:
            break
        top = max(rest.values())
        rest = {place: x for place, x in rest.items() if x < top}
    return [[(b, t) in rest for t in range(len(mask[b]))] for b in range(len(mask))], closest


def keep_sequence_trust(
    logprobs: Rows, behavior: Rows, mask: Masks, *, episode: Sequence[int], limit: float
) -> tuple[list[list[bool]], float]:
    """Keep the whole trajectory iff mean_t d_t <= limit; and how close a mean came to it."""
    own: dict[int, list[float]] = {}
    for b in range(len(mask)):
        for t in range(len(mask[b])):
            if mask[b][t]:
                own.setdefault(episode[b], []).append(binary_kl(logprobs[b][t], behavior[b][t]))
    mean = {e: math.fsum(ds) / len(ds) for e, ds in own.items()}
    keep = [[mask[b][t] and mean[episode[b]] <= limit for t in range(len(mask[b]))] for b in range(len(mask))]
    return keep, min(abs(m - limit) for m in mean.values())


# ---- weight x mask x level (4.8) ----------------------------------------------------------------------------


def policy_term(
    logprobs: Rows,
    behavior: Rows,
    advantages: Rows,
    mask: Masks,
    keep: Masks,
    *,
    episode: Sequence[int],
    weight: str,
    level: str,
    low: float = 0.0,
    high: float = math.inf,
    cap: float = math.inf,
    clip: float = 0.2,
    weights_at: Rows | None = None,
) -> Slow:
    """-sum_t M_t w_t A_t log pi_t / denominator; clipped ratios where the weight is differentiated through them.

    Level token: every own token, kept or not, counts 1/N_act. Level sequence: 1/(N_episodes own tokens of its
    episode). An episode's clipped term counts as all of its own tokens do together, times the share kept.
    """
    at = logprobs if weights_at is None else weights_at
    places = [(b, t) for b in range(len(mask)) for t in range(len(mask[b])) if mask[b][t]]
    own: dict[int, int] = {}
    kept: dict[int, int] = {}
    for b, t in places:
        own[episode[b]] = own.get(episode[b], 0) + 1
        kept[episode[b]] = kept.get(episode[b], 0) + keep[b][t]
    share = {e: 1.0 / len(places) if level == "token" else 1.0 / (len(own) * n) for e, n in own.items()}
    terms: list[float] = []
    if weight in ("sequence", "gspo"):
        advantage = {episode[b]: advantages[b][t] for b, t in places}
        for e, u in episode_log_ratios(logprobs, behavior, mask, episode).items():
            u = u / own[e] if weight == "gspo" else u
            r, bounded = exp_bounded(u)[0], math.exp(min(max(u, math.log(1.0 - clip)), math.log(1.0 + clip)))
            whole = own[e] * share[e]
            terms.append(-min(r * advantage[e], bounded * advantage[e]) * whole * kept[e] / own[e])
    for b, t in places:
        if weight in ("sequence", "gspo") or not keep[b][t]:
            continue
        a, lp = advantages[b][t], logprobs[b][t]
        rho, held = exp_bounded(lp - behavior[b][t])[0], exp_bounded(at[b][t] - behavior[b][t])[0]
        value = {
            "is": min(held, cap) * a * lp,
            "dis": held * a * lp if low < held < high else 0.0,
            "ppo": min(rho * a, min(max(rho, 1.0 - clip), 1.0 + clip) * a),
            "likelihood": a * lp,
        }[weight]
        terms.append(-value * share[episode[b]])
    return Slow(terms, math.fsum(terms), math.fsum(abs(x) for x in terms), {})
