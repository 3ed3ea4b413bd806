"""Advantages by loops (ALGORITHMS 2.3 F4, F5, Baselines; 2.2 share of informative groups)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product


def _members(groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for i, name in enumerate(groups):
        members.setdefault(name, []).append(i)
    return members


def group(
    rewards: Sequence[float], groups: Sequence[str], *, clip: float | None, eps: float
) -> tuple[list[float], int, int]:
    """(R - mu) / (s + eps), population s, |.| <= clip; constant group: zeros.

    Gives the values, the number of groups, and the number of degenerate ones.
    """
    out = [0.0] * len(rewards)
    degenerate = 0
    members = _members(groups)
    for index in members.values():
        values = [rewards[i] for i in index]
        if all(v == values[0] for v in values):
            degenerate += 1
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        for i in index:
            a = (rewards[i] - mean) / (std + eps)
            out[i] = a if clip is None else min(max(a, -clip), clip)
    return out, len(members), degenerate


def loo(rewards: Sequence[float], groups: Sequence[str]) -> list[float]:
    """R_i - mean of the others of its group."""
    out: list[float] = []
    for i, name in enumerate(groups):
        others = [rewards[j] for j in range(len(groups)) if groups[j] == name and j != i]
        out.append(rewards[i] - math.fsum(others) / len(others))
    return out


def batch_mean(rewards: Sequence[float]) -> list[float]:
    """R_i - mean over the batch."""
    mean = math.fsum(rewards) / len(rewards)
    return [r - mean for r in rewards]


def informative_share(accuracy: float, size: int) -> float:
    """P(a group of `size` independent episodes has a right and a wrong one), by enumeration."""
    total = 0.0
    for outcome in product((True, False), repeat=size):
        if any(outcome) and not all(outcome):
            total += math.prod(accuracy if right else 1.0 - accuracy for right in outcome)
    return total


def informative_groups(rewards: Sequence[float], groups: Sequence[str]) -> int:
    """Groups in which two rewards differ."""
    return sum(any(rewards[i] != rewards[j] for i in index for j in index) for index in _members(groups).values())


def decided_prompts(rewards: Sequence[float], groups: Sequence[str]) -> int:
    """The smaller of: prompts whose mean reward lies above the batch's mean, prompts whose mean lies below."""
    mean = math.fsum(rewards) / len(rewards)
    above = below = 0
    for index in _members(groups).values():
        own = math.fsum(rewards[i] for i in index) / len(index)
        above += own > mean
        below += own < mean
    return min(above, below)


def truncated_trace(
    rewards: Sequence[float], values: Sequence[float], ratios: Sequence[float], *, gamma: float, lam: float
) -> list[float]:
    """A_t = sum_{k >= t} d_k prod_{j = t+1..k} gamma lam min(1, rho_j), d_k = r_k + gamma V_{k+1} - V_k (F2, unrolled)."""
    n = len(values)
    after = [*values[1:], 0.0]
    d = [rewards[k] + gamma * after[k] - values[k] for k in range(n)]
    return [
        math.fsum(d[k] * math.prod(gamma * lam * min(1.0, ratios[j]) for j in range(t + 1, k + 1)) for k in range(t, n))
        for t in range(n)
    ]


def effective_sample_share(weights: Sequence[float]) -> float:
    """(sum w)^2 / (B sum w^2)."""
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))
