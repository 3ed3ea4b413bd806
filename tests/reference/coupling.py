"""The maximal coupling of two laws by its definition and by one draw at a time (ALGORITHMS 3.6, 5.6)."""

from __future__ import annotations

from collections.abc import Sequence

Law = Sequence[float]
"""Probabilities of one state."""


def inverse_cdf(law: Law, u: float) -> int:
    """Smallest v with law[0] + ... + law[v] > u; the last token that can come where rounding leaves none."""
    running, last = 0.0, 0
    for v, p in enumerate(law):
        running += p
        last = v if p > 0.0 else last
        if running > u:
            return v
    return last


def joint(p: Law, q: Law) -> list[list[float]]:
    """P(x, y): min(p, q) where they agree, and what is left of both laws as a product, over their total variation."""
    distance = sum(max(a - b, 0.0) for a, b in zip(p, q, strict=True))
    cells = [[0.0] * len(p) for _ in p]
    for x in range(len(p)):
        for y in range(len(p)):
            apart = max(p[x] - q[x], 0.0) * max(q[y] - p[y], 0.0)
            cells[x][y] = (min(p[x], q[x]) if x == y else 0.0) + (apart / distance if distance > 0.0 else 0.0)
    return cells


def coupled(p: Law, q: Law, u: float, w: float) -> tuple[int, int]:
    """x at u; then x again if w is below q(x)/p(x), else the excess at where w lies between that and 1."""
    x = inverse_cdf(p, u)
    accept = min(1.0, q[x] / p[x])
    excess = [max(b - a, 0.0) for a, b in zip(p, q, strict=True)]
    if w < accept or sum(excess) == 0.0:
        return x, x
    normalised = [e / sum(excess) for e in excess]
    return x, inverse_cdf(normalised, (w - accept) / (1.0 - accept))
